"""Prefix hits, and where snapshots of recurrent states are taken, without a model.

Of the bugs of docs/known_bugs.md four have no test. D24 and D39 cannot happen: a state is cached at the boundaries
where a step ends, not at all of them, and in slots of its own, not in pages of the K/V pool. D37 and D71 are about
sleep and pause, which do not exist.
"""

from __future__ import annotations

import pytest
from fakes import expected_tokens
from scheduler_bench import Bench, step_budgets

PROMPT = list(range(100, 200))


def test_a_hit_leaves_only_the_rest_to_compute() -> None:
    bench = Bench()
    bench.add("a", PROMPT[:20])
    bench.run()
    request = bench.add("b", PROMPT[:30])
    assert bench.step() == {"b": 10}
    assert request.num_cached_tokens == 20
    bench.run()
    bench.check_tokens()


def test_at_least_one_token_is_computed() -> None:
    bench = Bench()
    for req_id, num_new in (("a", 20), ("b", 4)):
        bench.add(req_id, PROMPT[:20], max_tokens=1)
        assert bench.step() == {req_id: num_new}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("mamba_block_size", "num_first", "num_rest"), [(0, 21, 1), (8, 16, 5)])
def test_two_equal_prompts_in_one_step_are_both_right(
    mamba_block_size: int, num_first: int, num_rest: int, depth: int
) -> None:
    """D25: the second does not hit blocks that the first fills in the same step."""
    bench = Bench(mamba_block_size=mamba_block_size)
    for req_id in "ab":
        bench.add(req_id, PROMPT[:21])
    assert bench.schedule() == {"a": num_first, "b": num_first}
    bench.run(depth)
    bench.check_tokens()
    bench.add("c", PROMPT[:21])
    assert bench.schedule() == {"c": num_rest}


def test_a_prefill_pauses_at_the_last_boundary_and_a_snapshot_is_taken_there() -> None:
    bench = Bench(mamba_block_size=8)
    bench.add("a", PROMPT[:29])
    assert [bench.step(), bench.step()] == [{"a": 24}, {"a": 5}]
    assert bench.runner.copies == [("a", "snapshot", 24)]
    request = bench.add("b", PROMPT[:30])
    assert bench.step()["b"] == 6
    assert request.num_cached_tokens == 24
    assert ("b", "hit", 24) in bench.runner.copies
    bench.run()
    bench.check_tokens()


def test_a_prompt_that_ends_on_a_boundary_pauses_where_a_hit_can_use_it() -> None:
    """D26: the state after all of a prompt serves longer prompts, never the prompt itself."""
    bench = Bench(mamba_block_size=8)
    bench.add("a", PROMPT[:24])
    bench.run()
    assert bench.runner.copies == [("a", "snapshot", 16), ("a", "snapshot", 24)]
    for req_id, length, num_cached in (("b", 24, 16), ("c", 25, 24)):
        request = bench.add(req_id, PROMPT[:length])
        bench.run()
        assert request.num_cached_tokens == num_cached
    bench.check_tokens()


@pytest.mark.parametrize("rest", [0, 1, 7])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_sent_twice_gives_the_same(rest: int, depth: int) -> None:
    """D26: prompts of n boundaries and 0, 1 and all but one tokens more."""
    bench = Bench(mamba_block_size=8)
    for req_id in "ab":
        bench.add(req_id, PROMPT[: 32 + rest], max_tokens=20)
        bench.run(depth)
    assert bench.requests["b"].num_cached_tokens == (31 + rest) // 8 * 8
    bench.check_tokens()


def test_where_two_prompts_part_a_snapshot_is_taken_for_the_third() -> None:
    bench = Bench(mamba_block_size=16, max_num_batched_tokens=200)
    questions = [[1000 + 100 * i + j for j in range(30)] for i in range(3)]
    cached = []
    for i, question in enumerate(questions):
        request = bench.add(str(i), PROMPT[:55] + question)
        bench.run()
        cached.append(request.num_cached_tokens)
    # 52 tokens have K/V blocks, so the prompts part at 48.
    assert cached == [0, 0, 48]
    assert ("1", "snapshot", 48) in bench.runner.copies
    bench.check_tokens()


@pytest.mark.parametrize(("question", "first_hit"), [(12, 1), (50, 2)])
def test_a_shared_system_prompt_is_hit(question: int, first_hit: int) -> None:
    """D33: 3 boundaries shared by 20 questions; the only snapshot is not in the part that is one request's own.

    Where the questions reach the next boundary, the second one shows where they part, and the third hits that.
    """
    bench = Bench(num_blocks=400, mamba_block_size=16, num_snapshot_slots=60)
    cached = []
    for i in range(20):
        request = bench.add(str(i), PROMPT[:48] + [2000 + 50 * i + j for j in range(question)], max_tokens=2)
        bench.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0] * first_hit + [48] * (20 - first_hit)
    bench.check_tokens()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_second_turn_computes_only_what_is_new_and_at_most_one_boundary_more(depth: int) -> None:
    bench = Bench(num_blocks=200, mamba_block_size=16, max_model_len=400)
    first = bench.add("turn 1", PROMPT[:50], max_tokens=60)
    bench.run(depth)
    request = bench.add("turn 2", first.token_ids + [7] * 10, max_tokens=5)
    bench.run(depth)
    assert request.num_cached_tokens is not None
    assert request.num_prompt_tokens - request.num_cached_tokens <= 10 + 16
    bench.check_tokens()


def test_a_snapshot_in_decode_replaces_the_one_before() -> None:
    bench = Bench(num_blocks=200, mamba_block_size=8, max_model_len=400)
    bench.add("a", PROMPT[:10], max_tokens=50)
    bench.run(depth=1)
    assert [copy[2] for copy in bench.runner.copies] == [8, 16, 24, 32, 40, 48, 56]
    assert [len(key[1]) for key in bench.cache.slot_of] == [8, 56]


def test_no_slot_for_a_snapshot_is_no_reason_to_wait() -> None:
    """D80: nothing is taken half, and the request runs."""
    bench = Bench(mamba_block_size=8, num_snapshot_slots=0)
    for i in range(4):
        bench.add(str(i), PROMPT[:29])
    bench.run(depth=1)
    assert bench.runner.copies == []
    bench.check_tokens()


def test_a_request_starts_when_cached_states_must_be_evicted_for_it() -> None:
    """D76: a fourth prefix, all slots taken by cached states of other prefixes, while three requests decode."""
    bench = Bench(mamba_block_size=8, num_snapshot_slots=3, max_num_seqs=4)
    for i in range(3):
        bench.add(str(i), [i * 50 + j for j in range(12)], max_tokens=20)
    bench.step()
    bench.add("3", [900 + j for j in range(12)], max_tokens=20)
    assert bench.step()["3"] == 8
    bench.run()
    assert bench.cache.stats.num_evicted_snapshots > 0
    bench.check_tokens()


def test_a_preempted_request_hits_what_it_published() -> None:
    bench = Bench(mamba_block_size=8)
    bench.add("a", PROMPT[:20], max_tokens=20)
    for _ in range(5):
        bench.step()
    request = bench.requests["a"]
    bench.scheduler._preempt(bench.scheduler._running.pop())
    bench.step()
    assert request.num_preemptions == 1
    assert ("a", "hit", 16) in bench.runner.copies
    assert request.num_cached_tokens == 0  # of its first admission
    bench.run()
    bench.check_tokens()


def test_a_cache_salt_keeps_prefixes_apart() -> None:
    bench = Bench()
    for req_id, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        bench.add(req_id, PROMPT[:20], cache_salt=salt)
        bench.run()
    assert [bench.requests[i].num_cached_tokens for i in "abc"] == [0, 0, 16]


def test_without_prefix_caching_nothing_is_cut_looked_up_or_kept() -> None:
    bench = Bench(mamba_block_size=8, enable_prefix_caching=False)
    for req_id in "ab":
        bench.add(req_id, PROMPT[:29])
        assert bench.step() == {req_id: 29}
        bench.run()
    assert bench.runner.copies == []
    bench.check_tokens()


def test_skip_reading_prefix_cache_computes_all() -> None:
    bench = Bench()
    bench.add("a", PROMPT[:20])
    bench.run()
    bench.add("b", PROMPT[:20], skip_reading_prefix_cache=True)
    assert bench.step() == {"b": 20}


def test_a_snapshot_whose_last_token_is_in_flight_becomes_hittable_when_it_is_known() -> None:
    bench = Bench(mamba_block_size=8)
    request = bench.add("a", PROMPT[:12], max_tokens=20)
    while request.num_computed_tokens < 15:
        bench.advance(depth=1)
    bench.schedule()
    assert (request.num_computed_tokens, len(request.token_ids)) == (16, 15)
    assert ("a", "snapshot", 16) in bench.runner.copies
    assert [len(key[1]) for key in bench.cache.slot_of] == [8]
    bench.update()
    assert [len(key[1]) for key in bench.cache.slot_of] == [8, 16]
    bench.run(depth=1)
    bench.check_tokens()


def test_a_request_that_ends_with_a_snapshot_in_flight_gives_the_slot_back() -> None:
    bench = Bench(mamba_block_size=8, num_snapshot_slots=2)
    tokens = expected_tokens(PROMPT[:12], 3)
    request = bench.add("a", PROMPT[:12], max_tokens=20, eos_token_ids=(tokens[2],))
    bench.run(depth=1)
    assert len(request.token_ids) == 15
    assert len(bench.cache.free_slots) + len(bench.cache.slot_of) == 2


def test_a_preemption_cancels_a_snapshot_whose_last_token_is_in_flight() -> None:
    bench = Bench(mamba_block_size=8)
    request = bench.add("a", PROMPT[:12], max_tokens=20)
    while request.num_computed_tokens < 15:
        bench.advance(depth=1)
    bench.schedule()
    bench.scheduler._preempt(bench.scheduler._running.pop())
    bench.run()
    assert request.num_preemptions == 1
    bench.check_tokens()


@pytest.mark.parametrize(
    ("interval", "length", "budgets"),
    [
        (1600, 2002, [364, 2002]),
        (1600, 3602, [1600, 1000, 3602]),
        *[(1600, 3602, [first, 3602]) for first in (800, 900, 1599, 1601, 2000)],
        *[(1600, 3602, [start, 3602]) for start in (331, 1599, 1601, 2531, 3011)],
        (1536, 30000, [27648, 1024, 30000]),
        (12288, 30000, [12288, 4000, 30000]),
        (12288, 41000, [24576, 8000, 41000]),
    ],
)
def test_a_snapshot_is_the_state_after_exactly_its_tokens(interval: int, length: int, budgets: list[int]) -> None:
    """D23: whatever the chunks of a step's budget, what is published under a token count was computed to that count."""
    prompt = [i % 997 for i in range(length)]
    published = step_budgets(prompt, interval, budgets)
    last = (length - 1) // interval * interval
    assert last in published
    assert all(count % interval == 0 and count == computed for count, computed in published.items())
