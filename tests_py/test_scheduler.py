"""Every rule of the scheduler, without a model."""

from __future__ import annotations

from typing import Any

import pytest
from deltaic import _core
from deltaic.request import RequestStatus
from fakes import expected_tokens
from scheduler_bench import Bench

# ---- the token budget ----------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_budget_runs_in_chunks() -> None:
    bench = Bench(max_num_batched_tokens=10)
    bench.add("a", 25)
    assert [bench.step() for _ in range(4)] == [{"a": 10}, {"a": 10}, {"a": 5}, {"a": 1}]
    bench.run()
    bench.check_tokens()


def test_running_requests_come_first_and_prompts_get_what_is_left() -> None:
    bench = Bench(max_num_batched_tokens=10)
    bench.add("a", 4)
    bench.step()
    bench.add("b", 30)
    assert bench.step() == {"a": 1, "b": 9}
    assert bench.step() == {"a": 1, "b": 9}
    bench.run()
    bench.check_tokens()


def test_a_step_takes_several_prompts_within_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=10)
    for req_id in "abc":
        bench.add(req_id, 4)
    assert bench.step() == {"a": 4, "b": 4, "c": 2}
    assert bench.step() == {"a": 1, "b": 1, "c": 2}


def test_a_long_prompt_is_held_to_the_threshold() -> None:
    bench = Bench(long_prefill_token_threshold=6)
    bench.add("a", 15)
    bench.add("b", 3)
    assert bench.step() == {"a": 6, "b": 3}
    assert bench.step() == {"a": 6, "b": 1}
    assert bench.step() == {"a": 3, "b": 1}


def test_no_more_requests_run_than_max_num_seqs() -> None:
    bench = Bench(max_num_seqs=2)
    for req_id in "abc":
        bench.add(req_id, 3, max_tokens=2)
    assert bench.step() == {"a": 3, "b": 3}
    assert bench.scheduler.num_waiting == 1
    bench.step()
    assert bench.step() == {"c": 3}
    bench.run()
    bench.check_tokens()


def test_without_chunked_prefill_a_prompt_waits_for_room_and_holds_up_the_others() -> None:
    bench = Bench(max_num_batched_tokens=20, max_model_len=20, enable_chunked_prefill=False)
    bench.add("a", 12)
    bench.add("b", 12)
    bench.add("c", 2)
    assert bench.step() == {"a": 12}
    assert bench.step() == {"a": 1, "b": 12, "c": 2}


# ---- memory --------------------------------------------------------------------------------------------------------


def test_the_first_request_that_finds_no_room_holds_up_the_others() -> None:
    bench = Bench(num_blocks=1 + 6)
    bench.add("a", 12, max_tokens=2)
    bench.add("b", 16, max_tokens=2)
    bench.add("c", 2, max_tokens=2)
    assert bench.step() == {"a": 12}
    bench.step()
    assert bench.step() == {"b": 16, "c": 2}
    bench.run()
    bench.check_tokens()


def test_the_last_running_request_gives_way_and_is_computed_again() -> None:
    bench = Bench(num_blocks=1 + 8)
    bench.add("a", 12, max_tokens=8)
    bench.add("b", 12, max_tokens=8)
    bench.step_until_preempted()
    assert bench.requests["b"].num_preemptions == 1
    assert bench.requests["a"].num_preemptions == 0
    assert bench.requests["b"].status is RequestStatus.PREEMPTED
    bench.run()
    bench.check_tokens()


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(policy="priority", num_blocks=1 + 8, max_num_seqs=2)
    bench.add("a", 12, max_tokens=8, priority=1)
    bench.add("b", 12, max_tokens=8, priority=1)
    bench.step()
    bench.add("c", 1, max_tokens=1)  # would find room in what the victim gives back
    assert bench.step_until_preempted().keys() == {"a"}
    assert bench.step().keys() == {"a", "c"}
    bench.run()
    bench.check_tokens()


def test_a_preempted_request_is_first_in_line_again() -> None:
    bench = Bench(num_blocks=1 + 8, max_num_seqs=2)
    bench.add("a", 12, max_tokens=12)
    bench.add("b", 12, max_tokens=12)
    bench.add("c", 12, max_tokens=2)
    order: list[str] = []
    while bench.scheduler.has_unfinished_requests():
        assert bench.step()
        order += [new.req_id for new in bench.last.scheduled_new_reqs]
    assert order[:2] == ["a", "b"]
    assert set(order[2:-1]) == {"b"}
    assert order[-1] == "c"
    bench.check_tokens()


def test_one_preemption_does_not_cascade() -> None:
    """D79: a block that a victim gives back can be had at once, so one victim is enough for one block."""
    bench = Bench(num_blocks=1 + 16, max_num_seqs=4)
    for req_id in "abcd":
        bench.add(req_id, 15, max_tokens=8)
    while bench.scheduler.has_unfinished_requests():
        bench.advance(depth=1)
        assert len(bench.last.preempted_req_ids) <= 1
    assert bench.scheduler.num_preemptions >= 1
    bench.check_tokens()


def test_all_requests_run_at_once_when_the_pool_just_holds_them() -> None:
    """D59: nothing is counted against the pool that a request does not use."""
    bench = Bench(num_blocks=1 + 8 * 2)
    for i in range(8):
        bench.add(str(i), 5, max_tokens=4)  # 8 computed tokens: 2 blocks
    assert len(bench.step()) == 8
    bench.run(depth=1)
    assert bench.scheduler.num_preemptions == 0
    bench.check_tokens()


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    """D73: it would wait for ever; the others go on."""
    bench = Bench(num_blocks=50, block_size=16, max_model_len=4096, max_num_batched_tokens=2048)
    bench.add("a", 40)
    with pytest.raises(ValueError, match=r"1002 prompt tokens.* need 63 blocks of 16 tokens, the cache has 49"):
        bench.add("b", 1002, max_tokens=1)
    bench.run()
    bench.check_tokens()


def test_block_0_is_not_part_of_the_capacity() -> None:
    """D74: 64 blocks of 16 tokens hold 1008 tokens, not 1024; 512 tokens need 33 blocks, not 32."""
    bench = Bench(num_blocks=64, block_size=16, max_model_len=4096, max_num_batched_tokens=4096)
    bench.add("fits", 1000, max_tokens=9)  # the last token is never computed
    bench.run()
    bench.check_tokens()
    with pytest.raises(ValueError, match="the cache has 63"):
        bench.add("too long", 1000, max_tokens=10)
    for num_blocks, fits in ((32, False), (33, True)):
        bench = Bench(num_blocks=num_blocks, block_size=16, max_model_len=4096, max_num_batched_tokens=4096)
        if fits:
            bench.add("a", 500, max_tokens=13)
            bench.run()
        else:
            with pytest.raises(ValueError, match="the cache has 31"):
                bench.add("a", 500, max_tokens=13)


def test_a_request_holds_no_block_past_its_last_computed_token() -> None:
    """D75: a request of the greatest length uses ceil((length - 1) / block_size) blocks at most."""
    bench = Bench(num_blocks=1 + 12, max_model_len=41)
    request = bench.add("a", 21, max_tokens=100)
    most = 0
    while bench.scheduler.has_unfinished_requests():
        bench.advance(depth=1)
        most = max(most, request.num_blocks)
    assert len(request.token_ids) == 41
    assert most == 10


# ---- priority ------------------------------------------------------------------------------------------------------


def test_the_lowest_priority_number_is_admitted_first_and_ties_go_by_arrival() -> None:
    bench = Bench(policy="priority", max_num_seqs=1)
    for req_id, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        bench.add(req_id, 3, max_tokens=1, priority=priority)
    order = []
    while bench.scheduler.has_unfinished_requests():
        scheduled = bench.step()
        assert scheduled
        order += scheduled
    assert order == ["d", "b", "c", "a"]


def test_the_worst_priority_gives_way_even_if_it_was_scheduled_already() -> None:
    bench = Bench(policy="priority", num_blocks=1 + 8)
    bench.add("low", 11, max_tokens=8, priority=5)
    bench.step()
    bench.add("high", 12, max_tokens=8, priority=0)
    scheduled = bench.step_until_preempted()
    assert scheduled == {"high": 1}
    assert bench.requests["low"].num_preemptions == 1
    bench.run()
    bench.check_tokens()


def test_the_tokens_of_a_victim_that_was_scheduled_already_go_to_others() -> None:
    bench = Bench(policy="priority", num_blocks=1 + 17, max_num_batched_tokens=10)
    bench.add("low", 3, max_tokens=12, priority=5)
    bench.step()
    bench.add("high", 5, max_tokens=12, priority=0)
    bench.step()
    bench.add("middle", 50, max_tokens=1, priority=1)
    scheduled = bench.step_until_preempted()
    assert bench.last.preempted_req_ids == ["low"]
    assert scheduled == {"high": 1, "middle": 9}
    bench.run()
    bench.check_tokens()


def test_the_others_run_in_a_step_in_which_a_request_is_its_own_victim() -> None:
    bench = Bench(policy="priority", num_blocks=1 + 8)
    bench.add("low", 12, max_tokens=8, priority=5)
    bench.step()
    bench.add("high", 11, max_tokens=9, priority=0)
    assert bench.step_until_preempted() == {"high": 1}
    assert bench.last.preempted_req_ids == ["low"]
    bench.run()
    bench.check_tokens()


def test_fcfs_ignores_priority() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", 3, max_tokens=1, priority=1)
    bench.add("b", 3, max_tokens=1, priority=0)
    assert [bench.step(), bench.step()] == [{"a": 3}, {"b": 3}]


# ---- finish rules --------------------------------------------------------------------------------------------------


def stop_at(prompt: list[int], position: int) -> int:
    """Return the output token at a position."""
    return expected_tokens(prompt, position + 1)[position]


@pytest.mark.parametrize("depth", [0, 1])
def test_end_of_sequence_stops_without_a_reason(depth: int) -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=9, eos_token_ids=(stop_at([1, 2, 3], 4),))
    bench.run(depth)
    assert bench.tokens["a"] == expected_tokens([1, 2, 3], 5)
    assert (bench.finished["a"].finish_reason, bench.finished["a"].stop_reason) == ("stop", None)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_token_id_is_the_reason(depth: int) -> None:
    bench = Bench()
    stop = stop_at([1, 2, 3], 2)
    bench.add("a", [1, 2, 3], max_tokens=9, stop_token_ids=[stop])
    bench.run(depth)
    assert bench.tokens["a"] == expected_tokens([1, 2, 3], 3)
    assert (bench.finished["a"].finish_reason, bench.finished["a"].stop_reason) == ("stop", stop)


def test_ignore_eos_goes_on() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=9, eos_token_ids=(stop_at([1, 2, 3], 4),), ignore_eos=True)
    bench.run()
    bench.check_tokens()


def test_nothing_stops_before_min_tokens() -> None:
    """D84, D85: stop ids, of which two end a sequence, are ignored until min_tokens output tokens exist."""
    bench = Bench()
    prompt = [1, 2, 3]
    eos = (stop_at(prompt, 0), stop_at(prompt, 1))
    bench.add("a", prompt, max_tokens=10, min_tokens=3, eos_token_ids=eos, stop_token_ids=[stop_at(prompt, 2)])
    bench.add("b", prompt, max_tokens=10, min_tokens=4, eos_token_ids=eos, stop_token_ids=[stop_at(prompt, 2)])
    bench.run()
    assert bench.tokens["a"] == expected_tokens(prompt, 3)
    assert bench.tokens["b"] == expected_tokens(prompt, 10)
    # The core masks all of them until then.
    assert set(bench.requests["a"].core_params.stop_token_ids) == {*eos, stop_at(prompt, 2)}
    assert bench.requests["a"].core_params.min_tokens == 3


def test_end_of_sequence_comes_before_the_stop_ids_and_both_before_the_length() -> None:
    prompt = [1, 2, 3]
    last = stop_at(prompt, 2)
    bench = Bench()
    bench.add("eos", prompt, max_tokens=3, eos_token_ids=(last,), stop_token_ids=[last])
    bench.add("stop", prompt, max_tokens=3, stop_token_ids=[last])
    bench.run()
    assert (bench.finished["eos"].finish_reason, bench.finished["eos"].stop_reason) == ("stop", None)
    assert (bench.finished["stop"].finish_reason, bench.finished["stop"].stop_reason) == ("stop", last)


def test_the_context_ends_a_request_even_before_min_tokens() -> None:
    bench = Bench(max_model_len=10)
    bench.add("a", 7, max_tokens=50, min_tokens=20)
    bench.add("b", 9, max_tokens=None)
    bench.run()
    assert [len(bench.tokens[i]) for i in "ab"] == [3, 1]
    assert {output.finish_reason for output in bench.finished.values()} == {"length"}


def test_tokens_after_the_stop_are_dropped_with_their_logprobs() -> None:
    """D91: of [a, EOS, b] in one step, b is neither in the tokens nor in the logprobs."""
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=9, logprobs=0, eos_token_ids=(77,))
    step = bench.scheduler.schedule()
    entries = [_core.TokenLogprobs(token_ids=[token]) for token in (5, 77, 6)]
    output = _core.ModelRunnerOutput(
        req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[5, 77, 6]], logprobs={"a": entries}
    )
    (result,) = bench.scheduler.update(step, output)
    assert result.new_token_ids == [5, 77]
    assert [entry.token_ids for entry in result.logprobs] == [[5], [77]]
    assert result.finish_reason == "stop"


def test_a_request_with_bad_logits_fails_alone() -> None:
    bench = Bench()
    bench.add("a", 5)
    bench.add("b", 5)
    bench.step()
    bench.runner.not_finite = {"a"}
    bench.step()
    assert bench.finished["a"].finish_reason == "error"
    assert "not finite" in str(bench.finished["a"].error)
    bench.run()
    assert bench.tokens["b"] == expected_tokens(bench.requests["b"].token_ids[:5], 4)


def test_what_a_request_with_bad_logits_published_is_not_hit() -> None:
    bench = Bench()
    prompt = list(range(20))
    bench.add("a", prompt)
    bench.runner.not_finite = {"a"}
    bench.run()
    bench.add("b", prompt)
    assert bench.step() == {"b": 20}


# ---- logprobs ------------------------------------------------------------------------------------------------------


def test_each_new_token_has_its_logprobs() -> None:
    bench = Bench()
    bench.add("a", 5, logprobs=1)
    bench.add("b", 5)
    outputs = []
    while bench.scheduler.has_unfinished_requests():
        bench.schedule()
        outputs += bench.update()
    for output in outputs:
        if output.req_id == "b":
            assert output.logprobs is None
        else:
            assert [entry.token_ids for entry in output.logprobs] == [[token] for token in output.new_token_ids]


@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_logprobs_survive_chunks_and_a_preemption(depth: int) -> None:
    """D89: an entry a prompt token, the first None, no duplicates, delivered once."""
    bench = Bench(max_num_batched_tokens=8)
    prompt = list(range(100, 130))
    request = bench.add("a", prompt, max_tokens=3, prompt_logprobs=1)
    while request.num_computed_tokens < 16:
        bench.advance(depth)
    bench.scheduler.reset_prefix_cache(preempt_running=True)
    delivered: list[Any] = []
    while bench.scheduler.has_unfinished_requests():
        delivered += [output.prompt_logprobs for output in bench.advance(depth)]
    assert request.num_preemptions == 1
    first, *rest = delivered
    assert len(first) == 30
    assert first[0] is None
    assert [entry.token_ids for entry in first[1:]] == [[token] for token in prompt[1:]]
    assert rest == [None, None]
    bench.check_tokens()


def test_prompt_logprobs_do_not_read_the_prefix_cache() -> None:
    """D36: a hit would skip the positions whose logits are asked for; the second time gives as many entries."""
    bench = Bench()
    prompt = list(range(33))
    for req_id in "ab":
        bench.add(req_id, prompt, prompt_logprobs=1)
        step = bench.scheduler.schedule()
        bench.runner.execute_model(step)
        (output,) = bench.scheduler.update(step, bench.runner.sample_tokens_async().get_output())
        assert len(output.prompt_logprobs) == 33
        assert output.num_cached_tokens == 0
        bench.scheduler.abort([req_id])
    bench.add("c", prompt)
    assert bench.schedule() == {"c": 1}


# ---- abort ---------------------------------------------------------------------------------------------------------


def test_abort_works_in_every_state() -> None:
    """D77: waiting, prefill chunk 2 of 3, decode with a step in flight, preempted, finished, unknown."""
    bench = Bench(max_num_batched_tokens=10)
    bench.add("decode", 2, max_tokens=50)
    bench.step()
    bench.add("prefill", 27)
    bench.add("waiting", 4)
    bench.step()
    bench.schedule()
    assert bench.requests["prefill"].num_computed_tokens == 18
    outputs = bench.scheduler.abort(["decode", "prefill", "waiting", "unknown", "decode"])
    assert {(output.req_id, output.finish_reason) for output in outputs} == {
        (req_id, "abort") for req_id in ("decode", "prefill", "waiting")
    }
    bench.check_idle()
    assert bench.update() == []
    assert bench.scheduler.abort(["decode"]) == []

    bench.add("later", 4)
    bench.schedule()
    assert set(bench.last.finished_req_ids) == {"decode", "prefill"}  # the runner never saw the waiting one
    bench.scheduler.reset_prefix_cache(preempt_running=True)
    bench.scheduler.abort(["later"])
    bench.check_idle()


def test_the_runner_hears_of_a_request_that_is_aborted_while_it_is_preempted() -> None:
    bench = Bench(num_blocks=1 + 8)
    for req_id in "ab":
        bench.add(req_id, 12, max_tokens=8)
    bench.step_until_preempted()
    assert bench.runner.preempted == {"b"}
    bench.scheduler.abort(["b"])
    bench.step()
    assert bench.last.finished_req_ids == ["b"]
    assert bench.runner.preempted == set()


def test_an_aborted_id_can_be_used_again_at_once() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=9)
    bench.step()
    bench.schedule()
    bench.scheduler.abort(["a"])
    bench.add("a", [4, 5, 6], max_tokens=4)
    bench.schedule()
    assert bench.update() == []  # of the first life
    bench.run(depth=1)
    assert bench.tokens["a"] == expected_tokens([4, 5, 6], 4)


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add("a", 3)
    with pytest.raises(ValueError, match="'a' is in use"):
        bench.add("a", 3)


# ---- async scheduling ----------------------------------------------------------------------------------------------


def test_a_row_that_certainly_ends_is_not_scheduled_ahead() -> None:
    bench = Bench()
    bench.add("a", 3, max_tokens=2)
    assert [bench.schedule(), bench.schedule(), bench.schedule()] == [{"a": 3}, {"a": 1}, {}]


def test_steps_are_read_back_in_their_order() -> None:
    bench = Bench()
    bench.add("a", 3)
    bench.schedule()
    bench.schedule()
    step, pending = bench.in_flight[1]
    with pytest.raises(ValueError, match="in the order"):
        bench.scheduler.update(step, pending.get_output())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_outputs_in_flight_at_a_preemption_are_discarded_once(depth: int) -> None:
    """D69, D70, D72: no token is lost or given twice, and the counts of tokens in flight stay at or above 0."""
    bench = Bench(num_blocks=1 + 12, max_num_seqs=4, max_num_batched_tokens=12)
    for i in range(16):
        bench.add(str(i), 3 + i % 7, max_tokens=30)
    while bench.scheduler.has_unfinished_requests():
        bench.advance(depth)
        assert all(request.num_placeholders >= 0 for request in bench.requests.values())
    assert bench.scheduler.num_preemptions > 10
    bench.check_idle()
    bench.check_tokens()


def test_a_request_resumes_before_its_stale_output_is_read() -> None:
    """D72: preempted with a step in flight and admitted again in the next one."""
    bench = Bench()
    bench.add("a", 5, max_tokens=6)
    bench.step()
    bench.schedule()
    bench.scheduler.reset_prefix_cache(preempt_running=True)
    assert bench.schedule() == {"a": 6}
    assert bench.last.preempted_req_ids == ["a"]
    assert bench.update() == []
    bench.run(depth=1)
    bench.check_tokens()


def test_blocks_freed_with_a_step_in_flight_go_to_later_steps() -> None:
    """D35: whoever gets them writes after the step that still reads them; the runner's shadows would show it."""
    bench = Bench(num_blocks=1 + 4)
    prompt = [1, 2, 3]
    bench.add("a", prompt, max_tokens=14, eos_token_ids=(stop_at(prompt, 5),))
    while bench.scheduler.has_unfinished_requests():
        bench.advance(depth=1)
    assert len(bench.in_flight) == 1  # still writes to blocks that are free by now
    bench.add("b", 13, max_tokens=3)
    bench.schedule()
    assert bench.update() == []
    bench.run(depth=1)
    assert bench.tokens["b"] == expected_tokens(bench.requests["b"].token_ids[:13], 3)
