"""Draw latency against load."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from deltaic.bench.report import check_writable
from deltaic.extras import how_to_install


def plot_library() -> Any:
    """Return matplotlib, drawing to files; ValueError says what to install."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        raise ValueError(f"plots need matplotlib: {how_to_install('plot')}") from None
    matplotlib.use("Agg")
    return import_module("matplotlib.pyplot")


def check_plot(path: Path) -> None:
    """Raise ValueError where no plot could be written to this file."""
    pyplot = plot_library()
    check_writable(path)
    figure = pyplot.figure()
    kinds = figure.canvas.get_supported_filetypes()
    pyplot.close(figure)
    kind = path.suffix.removeprefix(".").lower()
    if kind and kind not in kinds:
        raise ValueError(
            f"plot must end in one of {', '.join(f'.{known}' for known in sorted(kinds))}, got {path.name!r}"
        )


def plot_latency(path: Path, title: str, results: Sequence[dict[str, Any]]) -> None:
    """Draw the time of a step against the batch size, a line for each prompt length, the bound dashed."""
    pyplot = plot_library()
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for length in sorted({result["input_len"] for result in results}):
        chosen = sorted((r for r in results if r["input_len"] == length), key=lambda result: result["batch_size"])
        sizes = [result["batch_size"] for result in chosen]
        (line,) = axes.plot(sizes, [r["median_step_ms"] for r in chosen], marker="o", label=f"{length} prompt tokens")
        if all("bound_step_ms" in result for result in chosen):
            bounds = [result["bound_step_ms"] for result in chosen]
            axes.plot(sizes, bounds, linestyle="--", color=line.get_color(), label=f"{length}, bound")
    sizes = sorted({result["batch_size"] for result in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels=[str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    _finish(pyplot, figure, axes, path, title, "requests at once", "ms a step")


def plot_serving(path: Path, title: str, results: Sequence[dict[str, Any]]) -> None:
    """Draw the times of requests against the requests that the server answered a second."""
    pyplot = plot_library()
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    chosen = sorted(results, key=lambda result: result["request_throughput"])
    loads = [result["request_throughput"] for result in chosen]
    for name, label in (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2el", "whole request")):
        axes.plot(loads, [result[f"median_{name}_ms"] for result in chosen], marker="o", label=f"{label}, median")
    axes.set_yscale("log")
    _finish(pyplot, figure, axes, path, title, "requests a second", "ms")


def _finish(pyplot: Any, figure: Any, axes: Any, path: Path, title: str, x_label: str, y_label: str) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
