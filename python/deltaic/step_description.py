"""What a step says to the runner about the requests that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deltaic import _core
from deltaic.prefix_publisher import state_copy
from deltaic.request import Request

# A request that starts, its blocks, and what it found in the prefix cache.
Admission = tuple[Request, list[int], _core.PrefixHit]


def describe_step(
    scheduled: Mapping[Request, int],
    new_blocks: Mapping[Request, list[int]],
    admitted: Sequence[Admission],
    num_groups: int,
) -> _core.SchedulerOutput:
    """Describe a step before it is counted: its requests, those that start in it behind the others."""
    requests = list(scheduled)[: len(scheduled) - len(admitted)]
    req_ids = [request.req_id for request in scheduled]
    return _core.SchedulerOutput(
        scheduled_new_reqs=_describe_new(admitted, num_groups),
        scheduled_cached_reqs=_describe_cached(requests, req_ids[: len(requests)], new_blocks, num_groups),
        num_scheduled_tokens=dict(zip(req_ids, scheduled.values(), strict=True)),
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


def next_decodes(
    last: _core.SchedulerOutput, requests: Sequence[Request], new_blocks: Mapping[Request, list[int]], num_groups: int
) -> _core.SchedulerOutput:
    """Describe the step behind `last` that runs the same decodes again, in the same order, a token each."""
    other_groups: list[list[int]] = [[]] * (num_groups - 1)
    if not new_blocks:
        return last.next_decodes({})
    rows = {request: row for row, request in enumerate(requests) if request in new_blocks}
    return last.next_decodes({row: [new_blocks[request], *other_groups] for request, row in rows.items()})


def copies_of_hits(admitted: Iterable[Admission]) -> list[_core.StateCopy]:
    """Return the copies that give requests the recurrent state of the prefix that they found."""
    return [
        state_copy(request.req_id, _core.StateCopyKind.hit, hit.snapshot_slot, hit.num_tokens)
        for request, _, hit in admitted
        if hit.snapshot_slot >= 0
    ]


def _describe_new(admitted: Iterable[Admission], num_groups: int) -> list[_core.NewRequestData]:
    """Describe requests that the runner does not know, or no longer; only group 0 has a block table."""
    other_groups: list[list[int]] = [[]] * (num_groups - 1)
    return [
        _core.NewRequestData(
            req_id=request.req_id,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            sampling_params=request.core_params,
            block_ids=[blocks, *other_groups],
            num_computed_tokens=hit.num_tokens,
            prefill_token_ids=request.token_ids if request.num_output_tokens else [],
        )
        for request, blocks, hit in admitted
    ]


def _describe_cached(
    requests: Sequence[Request], req_ids: list[str], new_blocks: Mapping[Request, list[int]], num_groups: int
) -> _core.CachedRequestData:
    """Describe requests that the runner knows; req_ids are theirs."""
    other_groups: list[list[int]] = [[]] * (num_groups - 1)
    new_block_ids = {request: [blocks, *other_groups] for request, blocks in new_blocks.items()}
    return _core.CachedRequestData(
        req_ids=req_ids,
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[
            len(request.token_ids) + request.num_placeholders - request.num_prompt_tokens for request in requests
        ],
        new_block_ids=list(map(new_block_ids.get, requests)),
    )
