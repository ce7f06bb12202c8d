"""Say where the GPU idles between the kernels of an engine's decode steps: CUPTI, through PyTorch's profiler.

    python bench/kernel_gaps.py bench/configs/qwen3_5_0_8b.json --batch 1 128

Weights are random. Tracing makes launches slower, so of the host's part only what a step waits for is seen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import engine_steps
import torch
from deltaic.engine import Engine


def trace(engine: Engine, num_steps: int) -> list[dict[str, Any]]:
    """Return what ran on the device in num_steps steps, in order of its begin."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((event for event in events if event.get("cat") in kinds), key=lambda event: float(event["ts"]))


def short_name(event: dict[str, Any]) -> str:
    name = str(event["name"]).replace("(anonymous namespace)::", "").split("(")[0].split("<")[0]
    return name.split("::")[-1].split(" ")[-1][-32:]


def report(batch: int, events: list[dict[str, Any]]) -> None:
    """Print the gaps of whole steps, from one upload to another; the first and the last steps are left out."""
    marks = [i for i, event in enumerate(events) if "upload_step" in event["name"]]
    if len(marks) < 8:
        raise SystemExit(f"only {len(marks)} steps were traced")
    first, last = marks[3], marks[-3]
    num_steps = len(marks) - 6
    end = begin = float(events[first]["ts"])
    gaps: Counter[str] = Counter()
    for event in events[first:last]:
        start = float(event["ts"])
        if start > end:
            gaps[short_name(event)] += start - end
        end = max(end, start + float(event["dur"]))
    idle, total = gaps.total(), end - begin
    print(
        f"batch {batch}: {total / num_steps:.1f} us a step, {(last - first) / num_steps:.0f} kernels, idle "
        f"{idle / num_steps:.1f} us = {100 * idle / total:.2f} %, of that before a step "
        f"{gaps['upload_step_kernel'] / num_steps:.1f}"
    )
    print("  before: " + ", ".join(f"{name} {us / num_steps:.1f}" for name, us in gaps.most_common(8)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a config.json or a folder with one")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--steps", type=int, default=20)
    own, others = parser.parse_known_args()
    args = engine_steps.make_parser().parse_args([own.model, *others])
    torch.cuda.init()
    for batch in own.batch:
        engine = engine_steps.start(args, batch)
        report(batch, trace(engine, own.steps))


if __name__ == "__main__":
    main()
