"""Load a model to be measured, and find out what bounds it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltaic import __version__, _core
from deltaic.bench.ceilings import Ceilings, describe_ceilings, find_ceilings, measure_again, notes_on_shares
from deltaic.bench.latency import Workload, run_workload
from deltaic.checkpoint import resolve_model
from deltaic.device import place
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.memory_plan import device_memory, gigabytes
from deltaic.model_costs import ModelCosts


@dataclass(slots=True)
class Loaded:
    """An engine, the costs of its model and the ceilings of its device."""

    name: str
    engine: Engine
    costs: ModelCosts
    ceilings: Ceilings
    facts: dict[str, Any]  # for a result file
    num_threads: int

    def settle_ceilings(self) -> None:
        """Measure the ceilings again if other processes disturbed that before the model was loaded."""
        new = measure_again(self.ceilings, self.num_threads)
        if new != self.ceilings:
            self.ceilings = new
            self.facts["ceilings"] = asdict(new)
            print(f"measured again, {describe_ceilings(new)}", file=sys.stderr, flush=True)

    def explain(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Say on stderr what shares above 1 mean, if there are any."""
        for line in notes_on_shares(results):
            print(line, file=sys.stderr)


def load_engine(
    model: str | None,
    config: EngineConfig,
    prompt_len: int,
    *,
    bandwidth: float | None = None,
    flops: float | None = None,
    draft_acceptance: float | None = None,
) -> Loaded:
    """Load a model, answer a prompt of random tokens with one, and say on stderr how long that took.

    bandwidth (GB/s) and flops (TFLOP/s) replace the ceilings. With draft_acceptance drafts are accepted by a script
    (Engine.from_checkpoint).
    """
    path = resolve_model(model, config.load_format)
    model_config = _core.load_model_config(path)
    placement = place(model_config, config)
    # Before the caches take the memory of a GPU; not a part of the start-up.
    started = time.perf_counter()
    ceilings = find_ceilings(placement, bandwidth=bandwidth, flops=flops, num_threads=config.num_threads)
    measuring_s = time.perf_counter() - started
    started = time.perf_counter()
    engine = Engine.from_checkpoint(path, config, scripted_draft_acceptance=draft_acceptance)
    load_s = time.perf_counter() - started
    run_workload(engine, Workload(batch_size=1, input_len=prompt_len, output_len=1), seed=-1)
    startup_s = seconds_since_start() - measuring_s
    weight_bytes = engine.runner.weight_bytes / model_config.num_parameters()
    name = path.stem if path.is_file() else path.name
    print(
        f"{name}, {model_config.num_parameters() / 1e9:.3g} B parameters in {engine.runner.weight_bytes / 1e9:.2f} GB "
        f"on {placement.device_name}, loaded in {load_s:.2f} s, first token {startup_s:.2f} s after the "
        f"start of the process\n{describe_ceilings(ceilings)}",
        file=sys.stderr,
        flush=True,
    )
    memory = memory_facts(engine)
    if memory:
        shown = {name: gigabytes(num_bytes) for name, num_bytes in memory.items()}
        line = f"device memory: {shown['taken']} taken, {shown['planned']} planned, {shown['free']} free of "
        print(line + shown["total"], file=sys.stderr, flush=True)
    facts = {
        "deltaic_version": __version__,
        "model_id": str(model or name),
        "load_format": config.load_format,
        "device": placement.device_name,
        "dtype": placement.dtype.name,
        "recurrent_state_dtype": placement.recurrent_state_dtype.name,
        "num_parameters": model_config.num_parameters(),
        "weight_bytes": engine.runner.weight_bytes,
        "cache_bytes": engine.runner.cache_bytes,
        "load_seconds": load_s,
        "startup_seconds": startup_s,
        "ceilings": asdict(ceilings),
    }
    return Loaded(name, engine, ModelCosts(model_config, placement, weight_bytes), ceilings, facts, config.num_threads)


def memory_facts(engine: Engine) -> dict[str, int]:
    """Return what an engine has taken of its GPU's memory so far and was planned to take, in bytes; {} on the CPU."""
    plan = engine.memory_plan
    if plan is None or not plan.placement.is_cuda:
        return {}
    now = device_memory(plan.placement)
    return {
        "taken": plan.memory.free_bytes - now.free_bytes,
        "planned": plan.usable_bytes - plan.left_bytes,
        "free": now.free_bytes,
        "total": now.total_bytes,
    }


def model_positions(model: str | None, load_format: str) -> int:
    """Return how many tokens a request of a model may have at most."""
    return _core.load_model_config(resolve_model(model, load_format)).max_position_embeddings


def seconds_since_start() -> float:
    """Return how long this process has lived."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")
