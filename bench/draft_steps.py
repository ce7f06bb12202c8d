"""Time steps with drafts on a GPU, with random weights: what a draft costs, and what it gives at a known acceptance.

    python bench/draft_steps.py bench/configs/qwen3_5_35b_a3b.json --drafts 0 1 2 --batch 1 4 8 16 --acceptance 0.8

Each draft is accepted with that probability by a seeded script, whatever it is (Engine.from_checkpoint): the tokens
mean nothing. The ratio is that of output tokens a second to those without drafts.
"""

from __future__ import annotations

import argparse
import statistics

from deltaic.bench.latency import Sample, Workload, needed_model_len, run_workload
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig


def measure(args: argparse.Namespace, drafts: int) -> dict[int, Sample]:
    """Return a sample for each batch size, of one engine."""
    workloads = [Workload(batch, args.input_len, args.output_len) for batch in args.batch]
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        load_format="dummy",
        max_num_seqs=max(args.batch),
        max_model_len=needed_model_len(workloads, None, None, args.input_len + 4 * args.output_len),
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        speculative_tokens=drafts,
    )
    engine = Engine.from_checkpoint(args.model, config, scripted_draft_acceptance=args.acceptance if drafts else None)
    samples = {}
    for workload in workloads:
        run_workload(engine, workload, seed=1)  # the first of a batch size looks for kernels
        samples[workload.batch_size] = run_workload(engine, workload, seed=2)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a config.json, or a folder with one")
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    columns = ("drafts", "batch", "step ms", "tokens a step and request", "tokens/s", "ratio")
    print(f"| {' | '.join(columns)} |")
    print("|" + " --- |" * len(columns))
    plain: dict[int, float] = {}
    for drafts in args.drafts:
        for batch, sample in measure(args, drafts).items():
            rate = sample.num_step_tokens / sum(sample.steps)
            if drafts == 0:
                plain[batch] = rate
            length = sample.num_step_tokens / len(sample.steps) / batch
            ratio = f"{rate / plain[batch]:.2f}" if batch in plain else ""
            step_ms = 1e3 * statistics.median(sample.steps)
            print(f"| {drafts} | {batch} | {step_ms:.2f} | {length:.2f} | {rate:,.0f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
