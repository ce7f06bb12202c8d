"""What must hold whatever arrives: each request gives the tokens that it gives alone, and everything comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from fakes import expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import Bench


@dataclass(frozen=True)
class Arrival:
    step: int
    prefix: int  # which of the shared prefixes
    num_shared: int  # tokens of it
    num_own: int
    max_tokens: int
    priority: int
    abort_step: int | None
    seed: int
    prompt_logprobs: bool

    def prompt(self, number: int) -> list[int]:
        shared = [100 * self.prefix + j for j in range(self.num_shared)]
        return shared + [500 + (31 * number + j) % 400 for j in range(self.num_own)]


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prefix=st.integers(0, 1),
    num_shared=st.integers(0, 24),
    num_own=st.integers(1, 12),
    max_tokens=st.integers(1, 20),
    priority=st.integers(0, 2),
    abort_step=st.one_of(st.none(), st.none(), st.integers(0, 60)),
    seed=st.integers(0, 1),
    prompt_logprobs=st.sampled_from([False, False, True]),
)
configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(15, 40),
        "num_snapshot_slots": st.integers(0, 4),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 40),
        "mamba_block_size": st.sampled_from([0, 4, 8, 12]),
        "enable_prefix_caching": st.booleans(),
        "core_cache": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
        "num_speculative_tokens": st.sampled_from([0, 0, 1, 2, 3]),
        "draft_accuracy": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    }
)


def run(requests: list[Arrival], config: dict[str, Any], depth: int, resets: list[int]) -> Bench:
    bench = Bench(**config)
    num_steps = 0
    while num_steps <= 60 or bench.scheduler.has_unfinished_requests() or bench.in_flight:
        for number, request in enumerate(requests):
            if request.step == num_steps:
                options: dict[str, Any] = {"prompt_logprobs": 1} if request.prompt_logprobs else {}
                bench.add(
                    str(number),
                    request.prompt(number),
                    request.max_tokens,
                    priority=request.priority,
                    seed=request.seed,
                    **options,
                )
            if request.abort_step == num_steps:
                bench.collect(bench.scheduler.abort([str(number)]))
        if num_steps in resets:
            bench.scheduler.reset_prefix_cache(preempt_running=True)
        bench.advance(depth)
        num_steps += 1
        assert num_steps < 5000
    bench.check_idle()
    return bench


def check(requests: list[Arrival], bench: Bench) -> None:
    for number, request in enumerate(requests):
        req_id = str(number)
        expected = expected_tokens(request.prompt(number), request.max_tokens, request.seed)
        output = bench.finished[req_id]
        if output.finish_reason == "abort":
            assert bench.tokens[req_id] == expected[: len(bench.tokens[req_id])]
        else:
            assert output.finish_reason == "length"
            assert bench.tokens[req_id] == expected


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=12),
    config=configs,
    depth=st.integers(0, 2),
    resets=st.lists(st.integers(0, 40), max_size=2),
)
def test_each_request_gives_the_tokens_that_it_gives_alone(
    requests: list[Arrival], config: dict[str, Any], depth: int, resets: list[int]
) -> None:
    check(requests, run(requests, config, depth, resets))


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=20),
    config=configs,
    depth=st.integers(0, 3),
    resets=st.lists(st.integers(0, 60), max_size=3),
)
def test_each_request_gives_the_tokens_that_it_gives_alone_at_length(
    requests: list[Arrival], config: dict[str, Any], depth: int, resets: list[int]
) -> None:
    check(requests, run(requests, config, depth, resets))
