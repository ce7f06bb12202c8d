"""What of a running request others can reuse: full blocks, and snapshots of the recurrent state."""

from __future__ import annotations

from collections.abc import Iterable

from deltaic import _core
from deltaic.request import Request
from deltaic.scheduler_config import SchedulerConfig


class PrefixPublisher:
    """Publish what the steps write, as soon as it is certain: a token in flight may turn out another."""

    def __init__(self, config: SchedulerConfig, cache: _core.CacheManager) -> None:
        self.is_enabled = config.enable_prefix_caching
        self.snapshot_interval = config.mamba_block_size if config.enable_prefix_caching else 0  # tokens; 0: none
        self._block_size = config.block_size
        self._cache = cache

    def register_tokens(self, request: Request) -> None:
        """Tell the CacheManager the tokens that it does not have yet."""
        if request.num_registered_tokens < len(request.token_ids):
            self._cache.append_tokens(request.req_id, request.token_ids[request.num_registered_tokens :])
            request.num_registered_tokens = len(request.token_ids)

    def snapshot_stops(self, num_known: int, hit: _core.PrefixHit) -> tuple[int, ...]:
        """Return where the prefill pauses: the last boundary that a hit can use, and where two prompts part."""
        interval = self.snapshot_interval
        if not interval:
            return ()
        last = (num_known - 1) // interval * interval
        junction = min(hit.num_attention_tokens // interval * interval, last)
        return tuple(sorted({stop for stop in (junction, last) if stop > hit.num_tokens}))

    def publish(self, requests: Iterable[tuple[Request, int]], copies: list[_core.StateCopy]) -> None:
        """Publish what the step will have written, and take the snapshots that are due.

        A decode leaves the state behind each of its tokens, so all boundaries that it may cross are due; a prefill
        leaves the last one. `requests`: those that have something, and the earliest token that the step may begin at.

        No request is admitted to this step any more, so only later steps can hit it. All slots are reserved before
        any becomes hittable, so that no two copies of a step share one.
        """
        block_size, interval = self._block_size, self.snapshot_interval
        complete: list[tuple[Request, int]] = []
        for request, earliest in requests:
            end = request.num_computed_tokens
            num_known = len(request.token_ids)
            if num_known > end:
                num_known = end
            if num_known // block_size > request.num_published_blocks:
                self._publish_blocks(request, num_known)
            if not interval or end // interval * interval <= earliest:
                continue
            due: tuple[int, ...] = ()
            if earliest >= request.num_prefill_tokens:
                due = tuple(range(earliest // interval * interval + interval, end + 1, interval))
            elif end % interval == 0 and (end == request.num_prefill_tokens or end in request.snapshot_stops):
                due = (end,)
            for num_tokens in due:
                slot = self._cache.reserve_snapshot(request.req_id, num_tokens)
                if slot is None:
                    continue
                copies.append(state_copy(request.req_id, _core.StateCopyKind.snapshot, slot, num_tokens))
                if num_tokens <= num_known:
                    complete.append((request, num_tokens))
                else:
                    number = request.num_sampling_steps
                    first, _ = request.reserved_snapshots.get(num_tokens, (number, number))
                    request.reserved_snapshots[num_tokens] = first, number
        for request, num_tokens in complete:
            self._cache.publish_snapshot(request.req_id, num_tokens)

    def settle_snapshots(self, request: Request, begin: int, num_computed: int) -> None:
        """Publish the snapshots that are certain now that a decode from `begin` was read back; give up the missed ones.

        The step that was read took those that it came to. The next one in flight begins at the newest token, so it
        takes the state behind that, whatever becomes of its drafts.
        """
        number = request.num_sampling_steps - request.num_sampling  # of the step that was read
        num_known = len(request.token_ids)
        for num_tokens, (first, last) in list(request.reserved_snapshots.items()):
            was_taken = first <= number and begin < num_tokens <= num_computed
            is_next = num_tokens == num_known and first <= number + 1 <= last
            if num_tokens <= num_known and (was_taken or is_next):
                self._publish_blocks(request, num_tokens)
                self._cache.publish_snapshot(request.req_id, num_tokens)
            elif number >= last:
                self._cache.cancel_snapshot(request.req_id, num_tokens)
            else:
                continue
            del request.reserved_snapshots[num_tokens]

    def _publish_blocks(self, request: Request, num_tokens: int) -> None:
        self.register_tokens(request)
        self._cache.publish(request.req_id, num_tokens)
        request.num_published_blocks = num_tokens // self._block_size


def state_copy(req_id: str, kind: _core.StateCopyKind, snapshot_slot: int, num_tokens: int) -> _core.StateCopy:
    return _core.StateCopy(req_id=req_id, kind=kind, snapshot_slot=snapshot_slot, num_tokens=num_tokens)
