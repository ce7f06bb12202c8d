"""A step that repeats the decodes of the one before is described from that one; it must say the same as anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from deltaic import _core, scheduler
from deltaic.request import Request
from deltaic.step_description import describe_step, next_decodes
from scheduler_bench import Bench


def contents(step: _core.SchedulerOutput) -> list[object]:
    cached = step.scheduled_cached_reqs
    return [
        step.scheduled_new_reqs,
        cached.req_ids,
        cached.num_computed_tokens,
        cached.num_output_tokens,
        cached.new_block_ids,
        cached.resumed_req_ids,
        step.num_scheduled_tokens,
        step.total_num_scheduled_tokens,
        step.scheduled_spec_decode_tokens,
        step.finished_req_ids,
        step.preempted_req_ids,
        step.state_copies,
    ]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mamba_block_size", [0, 8])
@pytest.mark.parametrize("num_blocks", [100, 24])
def test_repeated_decodes_are_described_as_anew(
    depth: int, mamba_block_size: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_repeated, num_with_blocks = 0, 0

    def compared(
        last: _core.SchedulerOutput, requests: Sequence[Request], new_blocks: Mapping[Request, list[int]], groups: int
    ) -> _core.SchedulerOutput:
        nonlocal num_repeated, num_with_blocks
        step = next_decodes(last, requests, new_blocks, groups)
        assert contents(step) == contents(describe_step(dict.fromkeys(requests, 1), new_blocks, [], groups))
        num_repeated += 1
        num_with_blocks += bool(new_blocks)
        return step

    monkeypatch.setattr(scheduler, "next_decodes", compared)
    bench = Bench(num_blocks, core_cache=True, mamba_block_size=mamba_block_size)
    for i in range(10):
        bench.add(str(i), 5 + 3 * i, max_tokens=12 + 2 * i, stop_token_ids=[7])
    for step in range(200):
        bench.advance(depth)
        if step == 20:
            bench.collect(bench.scheduler.abort(["3"]))
        if not bench.scheduler.has_unfinished_requests() and not bench.in_flight:
            break
    assert num_repeated > 20
    assert num_with_blocks > 5
    assert (bench.scheduler.num_preemptions > 0) == (num_blocks < 100)
    bench.check_idle()
