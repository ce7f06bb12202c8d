"""What a load was to a server: vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltaic.bench.load import Answer
from deltaic.bench.report import summary, table

METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
_WIDTH = 50


def measure_answers(
    answers: Sequence[Answer],
    duration: float,
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return counts, throughputs and times; goodput: the most ms that a good request's ttft, tpot, e2el may take."""
    good = [answer for answer in answers if answer.succeeded]
    num_output = sum(answer.output_len for answer in good)
    num_input = sum(answer.prompt_len for answer in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "request_goodput": None if not goodput else sum(_is_good(a, goodput) for a in good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": _most_tokens_in_a_second(good),
        "max_concurrent_requests": _most_at_once(good),
        **summary("ttft", [answer.ttft for answer in good], percentiles),
        **summary("tpot", [answer.tpot for answer in good if answer.tpot is not None], percentiles),
        **summary("itl", [itl for answer in good for itl in answer.itls], percentiles),
        **summary("e2el", [answer.latency for answer in good], percentiles),
    }
    return result


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the lists that --save-detailed adds."""
    return {
        "input_lens": [answer.prompt_len for answer in answers],
        "output_lens": [answer.output_len for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itls for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def describe(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Return the table that vLLM prints."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]

    def add(label: str, value: float | int | None) -> None:
        if value is not None:
            lines.append(
                f"{label + ':':<40} {value:<9.2f}" if isinstance(value, float) else f"{label + ':':<40} {value:<9}"
            )

    add("Successful requests", result["completed"])
    add("Failed requests", result["failed"])
    add("Maximum request concurrency", result.get("max_concurrency"))
    rate = result.get("request_rate")
    add("Request rate configured (RPS)", None if rate in (None, "inf") else rate)
    add("Benchmark duration (s)", result["duration"])
    add("Total input tokens", result["total_input_tokens"])
    add("Total generated tokens", result["total_output_tokens"])
    add("Request throughput (req/s)", result["request_throughput"])
    add("Request goodput (req/s)", result["request_goodput"])
    add("Output token throughput (tok/s)", result["output_throughput"])
    add("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    add("Peak concurrent requests", result["max_concurrent_requests"])
    add("Total token throughput (tok/s)", result["total_token_throughput"])
    add("Share of the bound, whole load (%)", _percent(result.get("share_of_bound")))
    for name in metrics:
        title, short = METRICS[name]
        lines.append(title.center(_WIDTH, "-"))
        add(f"Mean {short} (ms)", result[f"mean_{name}_ms"])
        add(f"Median {short} (ms)", result[f"median_{name}_ms"])
        for share in percentiles:
            add(f"P{share:g} {short} (ms)", result[f"p{share:g}_{name}_ms"])
        add(f"Bound of {short} (ms)", result.get(f"bound_{name}_ms"))
        add(f"Share of the bound, median {short} (%)", _percent(result.get(f"{name}_share_of_bound")))
    lines.append("=" * _WIDTH)
    return "\n".join(line.rstrip() for line in lines)


def sweep_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a line a load."""
    head = ["requests/s asked", "at once", "requests/s", "tokens/s", "TTFT ms", "TPOT ms", "E2EL ms", "share of bound"]

    def row(result: Mapping[str, Any]) -> list[str]:
        percent = _percent(result.get("share_of_bound"))
        return [
            str(result["request_rate"]),
            str(result["max_concurrency"] or "all"),
            f"{result['request_throughput']:.2f}",
            f"{result['output_throughput']:,.1f}",
            *(f"{result[f'median_{name}_ms']:.2f}" for name in ("ttft", "tpot", "e2el")),
            "-" if percent is None else f"{percent:.0f} %",
        ]

    return table(head, [row(result) for result in results])


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _is_good(answer: Answer, goodput: Mapping[str, float]) -> bool:
    times = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.latency}
    return all(1e3 * times[name] <= limit for name, limit in goodput.items())


def _most_tokens_in_a_second(answers: Sequence[Answer]) -> float:
    """Return the tokens of the best second since the first request; those of an answer come evenly with its pieces."""
    if not answers:
        return 0.0
    begin = min(answer.started for answer in answers)
    seconds: dict[int, float] = {}
    for answer in answers:
        at = answer.started - begin + answer.ttft
        for itl in (0.0, *answer.itls):
            at += itl
            seconds[int(at)] = seconds.get(int(at), 0.0) + answer.output_len / (1 + len(answer.itls))
    return max(seconds.values())


def _most_at_once(answers: Sequence[Answer]) -> int:
    """Return how many requests ran at once at most; one that ends as another starts does not count with it."""
    events = sorted([(a.started, 1) for a in answers] + [(a.started + a.latency, -1) for a in answers])
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
