"""The scheduler with drafts, without a model: what it schedules, counts and keeps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from deltaic.draft_policy import MeasuredDrafts
from deltaic.draft_stats import DraftStats
from fakes import expected_tokens
from scheduler_bench import Bench


def make_bench(drafts: int = 3, accuracy: float = 1.0, **options: Any) -> Bench:
    return Bench(num_speculative_tokens=drafts, draft_accuracy=accuracy, **options)


def test_a_decode_runs_its_newest_token_and_the_drafts_of_the_step_before() -> None:
    bench = make_bench()
    bench.add("a", 5, max_tokens=20)
    assert [bench.step() for _ in range(3)] == [{"a": 5}, {"a": 4}, {"a": 4}]
    assert bench.last.scheduled_spec_decode_tokens == {"a": expected_tokens(bench.requests["a"].token_ids[:5], 8)[5:]}
    bench.run()
    bench.check_tokens()


def test_ahead_of_the_output_drafts_are_placeholders() -> None:
    bench = make_bench()
    bench.add("a", 5, max_tokens=20)
    assert [bench.schedule() for _ in range(2)] == [{"a": 5}, {"a": 4}]
    assert bench.last.scheduled_spec_decode_tokens == {"a": [-1, -1, -1]}
    assert bench.requests["a"].num_placeholders == 1 + 4
    bench.update(), bench.update()
    assert bench.requests["a"].num_placeholders == bench.requests["a"].num_sampling == 0
    assert bench.requests["a"].num_computed_tokens == len(bench.requests["a"].token_ids) - 1 == 9


class CountedOutput:
    """An output of the runner that counts how often each field is read, and with that converted to Python."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self.reads: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.reads[name] += 1
        return getattr(self._output, name)


def test_an_output_is_converted_once_however_many_requests_it_has() -> None:
    bench = make_bench()
    for name in "abcd":
        bench.add(name, 5, max_tokens=20)
    bench.step(), bench.schedule()
    step, pending = bench.in_flight.pop()
    output: Any = CountedOutput(pending.get_output())
    assert len(bench.scheduler.update(step, output)) == 4
    assert output.reads["draft_token_ids"] == output.reads["sampled_token_ids"] == 1
    assert max(output.reads.values()) == 1


def test_rejected_drafts_are_not_computed() -> None:
    bench = make_bench(accuracy=0.0)
    bench.add("a", 5, max_tokens=9)
    bench.step(), bench.step()
    assert bench.requests["a"].num_computed_tokens == 6
    bench.run()
    bench.check_tokens()
    stats = bench.scheduler.draft_stats
    assert stats.num_accepted_tokens == 0
    assert stats.mean_accepted_length == 1


def test_no_draft_is_beyond_the_length_of_a_request() -> None:
    for max_tokens in range(1, 12):
        bench = make_bench(max_model_len=14)
        bench.add("a", 5, max_tokens=max_tokens)
        while bench.scheduler.has_unfinished_requests():
            begin = bench.requests["a"].num_computed_tokens
            count = bench.step().get("a", 0)
            assert begin + count < bench.requests["a"].max_total_tokens
        bench.check_tokens()


def test_drafts_count_against_the_budget() -> None:
    bench = make_bench(max_num_batched_tokens=10)
    for req_id in "abc":
        bench.add(req_id, 2, max_tokens=30)
    bench.step()
    assert bench.step() == {"a": 4, "b": 4, "c": 2}
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize(("max_tokens", "num_blocks_each"), [(4, 2), (8, 3)])
def test_all_short_requests_run_in_a_pool_that_holds_them(max_tokens: int, num_blocks_each: int) -> None:
    """D59: room for drafts is not taken from what other requests need."""
    bench = make_bench(num_blocks=1 + 8 * num_blocks_each, max_num_seqs=8, accuracy=0.5)
    for i in range(8):
        bench.add(str(i), 5, max_tokens=max_tokens)  # the blocks are full when it ends
    bench.step()
    while bench.scheduler.has_unfinished_requests():
        assert bench.scheduler.num_waiting == 0
        bench.step()
    assert bench.scheduler.num_preemptions == 0
    bench.check_tokens()


def test_a_request_drops_its_drafts_before_anyone_is_preempted() -> None:
    bench = make_bench(num_blocks=1 + 4, max_num_seqs=2)
    bench.add("a", 7, max_tokens=2)
    bench.add("b", 7, max_tokens=2)
    bench.step()
    assert bench.step() == {"a": 1, "b": 1}  # both hold 8 tokens: the pool is full, and their drafts need no room
    bench.check_tokens()
    bench = make_bench(num_blocks=1 + 5, max_num_seqs=2)
    bench.add("a", 6, max_tokens=8)
    bench.add("b", 6, max_tokens=8)
    bench.step()
    assert bench.step() == {"a": 4, "b": 1}
    assert bench.scheduler.num_preemptions == 0
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_request_comes_back_without_its_drafts(depth: int) -> None:
    """D60"""
    bench = make_bench(num_blocks=1 + 9, accuracy=0.7)
    bench.add("a", 9, max_tokens=20)
    bench.add("b", 9, max_tokens=20)
    for _ in range(100):
        bench.advance(depth)
        for new in bench.last.scheduled_new_reqs:
            assert new.req_id not in bench.last.scheduled_spec_decode_tokens
        if not bench.scheduler.has_unfinished_requests():
            break
    assert bench.scheduler.num_preemptions > 0
    bench.run(depth)
    bench.check_tokens()


def test_the_last_token_of_a_resumed_prefill_runs_without_the_drafts_of_before() -> None:
    """D60: a part of one token looks like a decode, and the drafts that were pending at the preemption are gone."""
    bench = make_bench(max_num_batched_tokens=5)
    bench.add("a", 5, max_tokens=20)
    bench.step()
    assert len(bench.requests["a"].draft_token_ids) == 3
    bench.scheduler.reset_prefix_cache(preempt_running=True)
    assert [bench.step(), bench.step()] == [{"a": 5}, {"a": 1}]
    assert bench.last.scheduled_spec_decode_tokens == {}
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_counters_survive_a_preemption_while_verified_steps_are_in_flight(num_in_flight: int) -> None:
    """D70: placeholders never fall below 0, and the number of tokens is exact."""
    bench = make_bench(accuracy=0.7)
    request = bench.add("a", 5, max_tokens=30)
    for _ in range(4):
        for _ in range(num_in_flight):
            bench.schedule()
        bench.scheduler.reset_prefix_cache(preempt_running=True)
        while bench.in_flight:
            bench.update()
            assert request.num_placeholders >= 0
            assert request.num_sampling >= 0
        assert request.num_computed_tokens == 0
        bench.step(), bench.step()
    bench.run(1)
    bench.check_tokens()
    assert len(bench.tokens["a"]) == 30


def test_a_resumed_request_takes_no_token_of_its_earlier_life() -> None:
    """D72: preempted, and back in the next step, with outputs of before still to come."""
    bench = make_bench(accuracy=0.7)
    bench.add("a", 5, max_tokens=30)
    for _ in range(5):
        bench.advance(2)
        bench.advance(2)
        bench.scheduler.reset_prefix_cache(preempt_running=True)
        assert bench.schedule()["a"] >= 5
    bench.run(2)
    bench.check_tokens()


def test_nothing_stays_behind_the_token_that_stops_a_request() -> None:
    """D91: tokens and log probabilities that were accepted in the same step are dropped."""
    prompt = [1, 2, 3]
    expected = expected_tokens(prompt, 8)
    for position in range(8):
        bench = make_bench()
        bench.add("a", prompt, max_tokens=8, eos_token_ids=(expected[position],), logprobs=0)
        logprobs = []
        while bench.scheduler.has_unfinished_requests():
            bench.schedule()
            for output in bench.update():
                logprobs += output.logprobs or []
        end = expected.index(expected[position]) + 1
        assert bench.tokens["a"] == expected[:end]
        assert bench.finished["a"].finish_reason == ("stop" if end <= 8 else "length")
        assert [entry.token_ids[0] for entry in logprobs] == expected[:end]


@pytest.mark.parametrize("core_cache", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("accuracy", [0.3, 0.8, 1.0])
def test_snapshots_of_output_can_be_hit_by_the_next_turn(accuracy: float, depth: int, core_cache: bool) -> None:
    bench = make_bench(accuracy=accuracy, mamba_block_size=8, core_cache=core_cache)
    bench.add("a", 5, max_tokens=32)
    bench.run(depth)
    turn = [*bench.requests["a"].token_ids, 1, 2, 3]
    request = bench.add("b", turn, max_tokens=4)
    bench.run(depth)
    bench.check_tokens()
    assert request.num_cached_tokens == 32  # of 36 computed ones


@pytest.mark.parametrize("core_cache", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9, 1.0])
def test_conversations_that_cross_a_boundary_with_drafts(accuracy: float, depth: int, core_cache: bool) -> None:
    """D27: prompts end 1 to 5 tokens below a boundary, decode crosses it with any acceptance, eight at a time."""
    bench = make_bench(
        accuracy=accuracy, mamba_block_size=8, core_cache=core_cache, num_blocks=400, num_snapshot_slots=60
    )
    first = [bench.add(str(i), 8 * (1 + i % 3) - 1 - i % 5, max_tokens=9 + i % 23) for i in range(20)]
    bench.run(depth)
    num_reused = 0
    for i, request in enumerate(first):
        bench.add(f"{i} again", [*request.token_ids, i, *range(1 + i % 7)], max_tokens=4 + i % 9)
        num_reused += (len(request.token_ids) - 1) // 8 * 8
        if i % 8 == 7 or request is first[-1]:
            bench.run(depth)
    bench.check_tokens()
    assert sum(request.num_cached_tokens or 0 for request in bench.requests.values()) == num_reused


def test_counters_of_drafts() -> None:
    stats = DraftStats(3)
    for num_accepted in (0, 3, 1):
        stats.count(3, num_accepted)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 4)
    assert stats.num_accepted_at == [2, 1, 1]
    assert stats.mean_accepted_length == pytest.approx(1 + 4 / 3)


@pytest.mark.parametrize("depth", [0, 1])
def test_counters_count_no_placeholder_that_was_not_drafted(depth: int) -> None:
    bench = make_bench(accuracy=0.6)
    for i in range(4):
        bench.add(str(i), 5 + i, max_tokens=25)
    bench.run(depth)
    stats = bench.scheduler.draft_stats
    assert stats.num_accepted_tokens == sum(bench.runner.num_accepted)
    assert stats.num_drafts <= len(bench.runner.num_accepted)
    assert stats.num_accepted_at == sorted(stats.num_accepted_at, reverse=True)
    assert sum(stats.num_accepted_at) == stats.num_accepted_tokens <= stats.num_draft_tokens


# ---- "auto" --------------------------------------------------------------------------------------------------------


def settle(policy: MeasuredDrafts, num_running: int, seconds: dict[int, float], accepted: int, steps: int = 200) -> int:
    """Run steps that take `seconds` by number of drafts and accept so many; return the number chosen last."""
    for _ in range(steps):
        num_drafts = policy.choose(num_running)
        policy.observe_step(num_running, num_drafts, seconds[num_drafts])
        if num_drafts:
            policy.observe_acceptance(num_drafts, min(accepted, num_drafts))
    return policy.choose(num_running)


def test_auto_takes_the_drafts_that_give_the_most_tokens_a_second() -> None:
    cheap = {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}
    assert settle(MeasuredDrafts(3), 1, cheap, accepted=3) == 3
    assert settle(MeasuredDrafts(3), 1, cheap, accepted=1) == 1
    assert settle(MeasuredDrafts(3), 1, cheap, accepted=0) == 0
    dear = {0: 1.0, 1: 2.1, 2: 3.1, 3: 4.1}
    assert settle(MeasuredDrafts(3), 1, dear, accepted=3) == 0


def test_auto_chooses_by_batch_size_and_notices_when_times_change() -> None:
    policy = MeasuredDrafts(2)
    cheap, dear = {0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.0, 1: 2.1, 2: 3.1}
    assert settle(policy, 1, cheap, accepted=2) == 2
    assert settle(policy, 16, dear, accepted=2) == 0
    assert policy.choose(1) == 2
    assert settle(policy, 1, dear, accepted=2, steps=50) == 0
    assert settle(policy, 1, cheap, accepted=2, steps=2000) == 2


def test_auto_changes_no_token() -> None:
    for depth in (0, 1):
        bench = make_bench(accuracy=0.7)
        bench.scheduler.drafts = MeasuredDrafts(3)
        for i in range(4):
            bench.add(str(i), 5 + i, max_tokens=60)
        clock = 0
        while bench.scheduler.has_unfinished_requests() or bench.in_flight:
            bench.advance(depth)
            clock += 1
            if steady := bench.scheduler.steady:
                bench.scheduler.drafts.observe_step(steady.num_requests, steady.num_drafts, 1.0 + clock % 7)
        bench.check_tokens()
        lengths = {len(drafts) for step in [bench.last] for drafts in step.scheduled_spec_decode_tokens.values()}
        assert lengths <= {1, 2, 3}
