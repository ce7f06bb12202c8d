"""Time an engine's decode steps: the device's part, the host's, and how long the device waits for the host.

    python bench/engine_steps.py bench/configs/qwen3_5_0_8b.json --batch 1 32 128 256

Weights are random. For each batch it prints, in ms per step:
  step      of the engine as a user has it, every step scheduled while the one before it runs
  device    of steps enqueued so far ahead that the device never waits for the host (or the host's, where it is slower)
  idle      the share of `step` that the device waits: 1 - device / step
  host      all that Python, the bindings and the core do in a step, but the wait for its tokens
  core      of host: ModelRunner.execute_model and sample_tokens_async, bindings included
  resize    the longest of the steps after a quarter of the requests ends: a size that has no graph yet
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.sampling_params import SamplingParams


@dataclass(slots=True)
class Times:
    core: float = 0.0
    wait: float = 0.0


@dataclass(slots=True)
class TimedOutput:
    output: Any
    times: Times

    def get_output(self) -> Any:
        begin = time.perf_counter()
        output = self.output.get_output()
        self.times.wait += time.perf_counter() - begin
        return output


@dataclass(slots=True)
class TimedRunner:
    """A ModelRunner that knows how long its caller was in it."""

    runner: Any
    times: Times = field(default_factory=Times)

    def execute_model(self, step: Any) -> Any:
        begin = time.perf_counter()
        output = self.runner.execute_model(step)
        self.times.core += time.perf_counter() - begin
        return output

    def sample_tokens_async(self) -> TimedOutput:
        begin = time.perf_counter()
        output = self.runner.sample_tokens_async()
        self.times.core += time.perf_counter() - begin
        return TimedOutput(output, self.times)


def start(args: argparse.Namespace, batch: int) -> Engine:
    """Return an engine whose `batch` requests all decode."""
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        load_format="dummy",
        max_num_seqs=batch,
        max_model_len=args.max_model_len,
        kv_cache_memory_bytes=args.cache_gib << 30,
        enable_prefix_caching=args.prefix_caching,
        enforce_eager=args.eager,
    )
    engine = Engine.from_checkpoint(args.model, config)
    sampling: dict[str, Any] = {"temperature": 0.0} if not args.sample else {"temperature": 0.8, "top_p": 0.95}
    params = SamplingParams(max_tokens=1000, ignore_eos=True, **sampling)
    for i in range(batch):
        engine.add_request(str(i), [(7 * i + j) % 1000 for j in range(args.context)], params)
    while engine.stats().num_generated_tokens < 4 * batch:
        engine.step()
    return engine


def measure(engine: Engine, num_steps: int) -> dict[str, float]:
    timed = TimedRunner(engine.runner)
    engine.runner = timed  # type: ignore[assignment]
    walls = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - begin)
    step = sum(walls) / num_steps
    host = step - timed.times.wait / num_steps
    core = timed.times.core / num_steps
    engine.runner = timed.runner

    scheduler = engine._scheduler  # its steps, without those of the loop
    while engine._in_flight:
        engine._read_until(0)
    ahead = []
    begin = time.perf_counter()
    for _ in range(num_steps):
        scheduled = scheduler.schedule()
        engine.runner.execute_model(scheduled)
        ahead.append((scheduled, engine.runner.sample_tokens_async()))
    enqueued = (time.perf_counter() - begin) / num_steps
    outputs = [pending.get_output() for _, pending in ahead]
    device = (time.perf_counter() - begin) / num_steps
    for (scheduled, _), output in zip(ahead, outputs, strict=True):
        scheduler.update(scheduled, output)
    for request in list(scheduler._running[: len(scheduler._running) // 4]):
        engine.abort([request.req_id])
    resize = 0.0
    for _ in range(4):
        begin = time.perf_counter()
        engine.step()
        resize = max(resize, time.perf_counter() - begin)
    return {
        "step": 1e3 * step,
        "median": 1e3 * statistics.median(walls),
        "device": 1e3 * device,
        "enqueued": 1e3 * enqueued,
        "idle": 1 - device / step,
        "host": 1e3 * host,
        "core": 1e3 * core,
        "resize": 1e3 * resize,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a config.json or a folder with one")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--context", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cache-gib", type=int, default=16)
    parser.add_argument("--sample", action="store_true", help="temperature and top-p instead of greedy")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--eager", action="store_true", help="no graphs")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    names = ("step", "median", "device", "enqueued", "idle", "host", "core", "resize")
    print("batch " + " ".join(f"{name:>9}" for name in names))
    for batch in args.batch:
        times = measure(start(args, batch), args.steps)
        print(f"{batch:5} " + " ".join(f"{times[name]:9.4f}" for name in names), flush=True)


if __name__ == "__main__":
    main()
