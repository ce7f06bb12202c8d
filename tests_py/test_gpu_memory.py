"""On a GPU: what an engine takes of its memory is what was planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from deltaic import _core

CONFIGS = Path(__file__).parent.parent / "bench" / "configs"

pytestmark = pytest.mark.skipif(_core.num_cuda_devices() == 0, reason="no CUDA device in this build or machine")


@pytest.mark.parametrize("name", ["qwen3_5_0_8b", "qwen3_5_4b"])
def test_engine_takes_no_more_than_planned(name: str, tmp_path: Path) -> None:
    """With the default sizes, all graphs of a small batch and a long prompt; measured in a process of its own."""
    result = tmp_path / "result.json"
    command = [
        *(sys.executable, "-m", "deltaic", "bench", "latency", "--model", str(CONFIGS / f"{name}.json")),
        *("--load-format", "dummy", "--device", "cuda", "--batch-size", "1", "256", "--input-len", "512"),
        *("--output-len", "8", "--num-iters", "1", "--num-iters-warmup", "1", "--output-json", str(result)),
    ]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads(result.read_text())
    memory = found["device_memory"]
    assert memory["taken"] <= memory["planned"]
    assert memory["free"] > 0
    assert all(row["num_steps"] == 7 and row["step_share_of_bound"] <= 1.05 for row in found["results"])
