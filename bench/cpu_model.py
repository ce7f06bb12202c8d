"""Time a whole model on the CPU: prefill of 512 tokens, decode of 1, 8 and 32 sequences after a 32-token prompt.

python bench/cpu_model.py [--model FOLDER] [--threads N]. Without a folder: random bf16 weights in the shape of
Qwen3.5-0.8B, written to a temporary folder. Tokens are drawn at random; outputs are counted, not read.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "tests_py"))
from tiny_model import write_checkpoint

QWEN3_5_0_8B = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 4096,
    "eos_token_id": 248319,
}


def run(engine: Engine, num_seqs: int, num_prompt_tokens: int, num_new_tokens: int, seed: int) -> tuple[float, float]:
    """Return the seconds until every sequence had its first token, and those of the rest."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    for i in range(num_seqs):
        prompt = [rng.randrange(engine.vocab_size) for _ in range(num_prompt_tokens)]
        engine.add_request(f"{seed}-{i}", prompt, params)
    started = time.perf_counter()
    first: dict[str, float] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.req_id, time.perf_counter())
    ended = time.perf_counter()
    return max(first.values()) - started, ended - max(first.values())


def measure(model: Path, num_threads: int) -> None:
    config = EngineConfig(
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        num_threads=num_threads,
        enable_prefix_caching=False,
    )
    engine = Engine.from_checkpoint(model, config)
    run(engine, 1, 64, 4, seed=0)
    prefill = [run(engine, 1, 512, 1, seed)[0] for seed in range(1, 4)]
    print(f"prefill 512 tokens: {512 / statistics.median(prefill):.1f} tokens/s")
    for num_seqs in (1, 8, 32):
        num_new_tokens = 33
        decode = [run(engine, num_seqs, 32, num_new_tokens, 10 * num_seqs + seed)[1] for seed in range(3)]
        rate = num_seqs * (num_new_tokens - 1) / statistics.median(decode)
        print(f"decode of {num_seqs:2} sequences: {rate:.1f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.model:
        measure(options.model, options.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(write_checkpoint(Path(folder) / "model", with_tokenizer=False, **QWEN3_5_0_8B), options.threads)


if __name__ == "__main__":
    main()
