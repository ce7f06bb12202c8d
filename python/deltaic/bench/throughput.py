"""Time many requests of random lengths, all queued at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from deltaic.bench.ceilings import Ceilings
from deltaic.bench.lengths import RandomRequest
from deltaic.engine import Engine
from deltaic.model_costs import ModelCosts
from deltaic.sampling_params import SamplingParams


def run_requests(
    engine: Engine, requests: Sequence[RandomRequest], seed: int, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Run random prompts to their ends; return vLLM's names. `advance` hears of each that has ended."""
    rng = random.Random(seed)
    for i, request in enumerate(requests):
        prompt = [rng.randrange(engine.vocab_size) for _ in range(request.prompt_len)]
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
        engine.add_request(f"{seed}-{i}", prompt, params)
    started = time.perf_counter()
    num_output_tokens, num_steps = 0, 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        num_steps += 1
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.req_id} failed: {output.error}")
            num_output_tokens += len(output.new_token_ids)
        advance(sum(output.finish_reason is not None for output in outputs))
    elapsed = time.perf_counter() - started
    num_prompt_tokens = sum(request.prompt_len for request in requests)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": num_prompt_tokens + num_output_tokens,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (num_prompt_tokens + num_output_tokens) / elapsed,
        "output_tokens_per_second": num_output_tokens / elapsed,
        "num_steps": num_steps,
        "num_preemptions": engine.stats().num_preemptions,
    }


def bound_seconds(requests: Sequence[RandomRequest], max_num_seqs: int, costs: ModelCosts, ceilings: Ceilings) -> float:
    """Return the least time for the requests: all prompts at the peak, then decode steps with full batches."""
    limits = ceilings.bytes_per_second, ceilings.flops_per_second
    prefill = sum(costs.prefill(request.prompt_len).num_flops for request in requests) / ceilings.flops_per_second
    batch_size = min(max_num_seqs, len(requests))
    num_decode_tokens = sum(request.output_len - 1 for request in requests)
    context = sum(request.prompt_len + request.output_len / 2 for request in requests) / len(requests)
    return prefill + num_decode_tokens / batch_size * costs.decode_step(batch_size, context).seconds(*limits)
