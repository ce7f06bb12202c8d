"""Numbers to names and tables, as vLLM's benchmarks name them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, between two values where it falls there; 0 of nothing."""
    return float(np.percentile(values, share)) if len(values) else 0.0


def summary(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles in ms: mean_ttft_ms, p99_ttft_ms, ..."""
    ms = [1e3 * value for value in seconds]
    found = {
        f"mean_{name}_ms": float(np.mean(ms)) if ms else 0.0,
        f"median_{name}_ms": percentile(ms, 50),
        f"std_{name}_ms": float(np.std(ms)) if ms else 0.0,
    }
    return found | {f"p{share:g}_{name}_ms": percentile(ms, share) for share in percentiles}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of columns that stand to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    )


def check_writable(path: Path) -> None:
    """Make a file's folder; ValueError where the file could not be written, before long work for it is done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from error
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: permission denied")


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
