"""Run the programs of bench/kernels that are built."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

BUILD_FOLDERS = ("build/cuda", "build/ci", "build/dev")
HOW_TO_BUILD = (
    "in a clone of deltaic: cmake --preset cuda && ninja -C build/cuda benches; without a GPU: "
    "cmake --preset dev && ninja -C build/dev benches"
)


def find_kernel_benches(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the programs by name, without bench_; of two builds of one program the first."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("bench_*")):
            if path.is_file() and os.access(path, os.X_OK):
                found.setdefault(path.name.removeprefix("bench_"), path)
    return found


def run_kernel_bench(path: Path) -> int:
    """Run one program; its table goes to stdout. Return its exit code."""
    return subprocess.run([path], check=False).returncode
