"""Time batches of equal requests: first tokens, then steps in which every request gets a token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deltaic.bench.ceilings import Ceilings
from deltaic.bench.report import LATENCY_PERCENTILES, percentile, summary, table
from deltaic.engine import Engine
from deltaic.model_costs import ModelCosts
from deltaic.sampling_params import SamplingParams

_FEW_BATCHED_TOKENS = 2048  # no default is less
_MARGIN = 8  # steps that a batch may need beyond those that its prompt tokens fill


@dataclass(frozen=True, slots=True)
class Workload:
    """So many prompts of one length at once, until each has so many tokens."""

    batch_size: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a workload, in seconds."""

    ttfts: list[float]  # of each request, since all were queued
    steps: list[float]  # between tokens, while every request got some in every step
    num_step_tokens: int  # of all requests in these steps
    latency: float  # until the last request had output_len tokens

    @property
    def prefill(self) -> float:
        """Return the time until every request had its first token."""
        return max(self.ttfts)


def needed_model_len(
    workloads: Sequence[Workload], max_num_batched_tokens: int | None, max_model_len: int | None, num_positions: int
) -> int:
    """Return the max_model_len for workloads: the one that the user set, if it is enough (ValueError if not).

    The first request of a batch runs on while the prompts of the others are computed, a step for each
    max_num_batched_tokens of them; its tokens need room, as far as the model's num_positions go.
    """
    budget = max_num_batched_tokens or _FEW_BATCHED_TOKENS
    needed = 0
    for workload in workloads:
        least = workload.input_len + workload.output_len
        if least > min(num_positions, max_model_len or num_positions):
            limit = (
                f"the model's {num_positions} positions" if max_model_len is None else f"max_model_len {max_model_len}"
            )
            raise ValueError(
                f"input_len {workload.input_len} and output_len {workload.output_len} are together beyond {limit}"
            )
        num_prompt_tokens = workload.batch_size * workload.input_len
        needed = max(needed, least + -(-num_prompt_tokens // max(budget - workload.batch_size, 1)) + _MARGIN)
    return min(needed, num_positions) if max_model_len is None else max_model_len


def run_workload(engine: Engine, workload: Workload, seed: int) -> Sample:
    """Run random prompts. Requests that started early go on until the last one is done, so the batch stays full."""
    rng = random.Random(seed)
    max_tokens = engine.scheduler_config.max_model_len - workload.input_len
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    num_tokens: dict[str, int] = {}
    for i in range(workload.batch_size):
        prompt = [rng.randrange(engine.vocab_size) for _ in range(workload.input_len)]
        engine.add_request(f"{seed}-{i}", prompt, params)
    started = time.perf_counter()
    ttfts: dict[str, float] = {}
    steps: list[float] = []
    num_step_tokens = 0
    full_since: float | None = None  # when the last step with a token for everyone ended
    while len(num_tokens) < workload.batch_size or min(num_tokens.values()) < workload.output_len:
        outputs = engine.step()
        now = time.perf_counter()
        num_new_tokens = sum(len(output.new_token_ids) for output in outputs)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a request of batch {workload.batch_size} failed: {output.error}")
            if output.new_token_ids:
                ttfts.setdefault(output.req_id, now - started)
                num_tokens[output.req_id] = num_tokens.get(output.req_id, 0) + len(output.new_token_ids)
        if sum(bool(output.new_token_ids) for output in outputs) == workload.batch_size:
            if full_since is not None:
                steps.append(now - full_since)
                num_step_tokens += num_new_tokens
            full_since = now
        elif outputs:
            full_since = None
    latency = time.perf_counter() - started
    engine.abort(num_tokens)
    while engine.has_unfinished_requests():
        engine.step()
    return Sample(ttfts=list(ttfts.values()), steps=steps, num_step_tokens=num_step_tokens, latency=latency)


def measure(engine: Engine, workload: Workload, num_warmup: int, num_iters: int) -> Iterator[Sample]:
    """Yield one sample an iteration, after the warm-up."""
    for i in range(num_warmup + num_iters):
        sample = run_workload(engine, workload, seed=i)
        if i >= num_warmup:
            yield sample


def describe(workload: Workload, samples: Sequence[Sample], costs: ModelCosts, ceilings: Ceilings) -> dict[str, Any]:
    """Return the result of a workload: vLLM's names, and the shares of the bound."""
    latencies = [sample.latency for sample in samples]
    steps = [step for sample in samples for step in sample.steps]
    num_tokens = sum(sample.num_step_tokens for sample in samples)
    tokens_per_step = num_tokens / (len(steps) * workload.batch_size) if steps else 0.0  # more than 1 with drafts
    result: dict[str, Any] = {
        "batch_size": workload.batch_size,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": {str(share): percentile(latencies, share) for share in LATENCY_PERCENTILES},
        **summary("ttft", [ttft for sample in samples for ttft in sample.ttfts], (99,)),
        **summary("prefill", [sample.prefill for sample in samples], ()),
        **summary("step", steps, (10, 90, 99)),
        **summary("tpot", [step / tokens_per_step for step in steps], (10, 90, 99)),
        "num_steps": len(steps),
        "tokens_per_step": tokens_per_step,
        "output_throughput": num_tokens / sum(steps) if steps else 0.0,
    }
    limits = ceilings.bytes_per_second, ceilings.flops_per_second
    prefill = costs.prefill(workload.input_len, workload.batch_size).seconds(*limits)
    step = costs.decode_step(workload.batch_size, workload.input_len + workload.output_len / 2).seconds(*limits)
    result |= {"bound_prefill_ms": 1e3 * prefill, "bound_step_ms": 1e3 * step}
    result["prefill_share_of_bound"] = 1e3 * prefill / result["median_prefill_ms"]
    result["step_share_of_bound"] = 1e3 * step / result["median_step_ms"] if steps else 0.0
    return result


def vllm_names(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what vLLM's file has at its top: of the one workload, nothing of several."""
    if len(results) != 1:
        return {}
    return {name: results[0][name] for name in ("avg_latency", "latencies", "percentiles")}


def latency_table(results: Sequence[dict[str, Any]]) -> str:
    """Return one line a workload: prefill, steps, and their shares of the bound."""

    def row(result: dict[str, Any]) -> list[str]:
        def share(name: str) -> str:
            return f"{100 * result[name]:.0f} %" if result.get(name) else "-"

        def ms(name: str) -> str:
            return f"{result[name]:.2f}" if result.get(name) else "-"

        return [
            str(result["batch_size"]),
            str(result["input_len"]),
            str(result["output_len"]),
            ms("median_prefill_ms"),
            ms("bound_prefill_ms"),
            share("prefill_share_of_bound"),
            ms("median_step_ms"),
            ms("mean_step_ms"),
            ms("p99_step_ms"),
            ms("bound_step_ms"),
            share("step_share_of_bound"),
            f"{result['output_throughput']:,.1f}",
            f"{result['avg_latency']:.3f}",
        ]

    head = ["batch", "input", "output", "prefill ms", "bound", "share", "step ms", "mean", "p99", "bound", "share"]
    return table([*head, "tokens/s", "latency s"], [row(result) for result in results])
