"""A small cache manager and a small runner with the interface of the core's: policy is tested without a model.

The runner keeps shadows of what device memory holds. K and V of a position are its token and everything before it, a
state slot is the tokens it has seen. Each step reads all that attention and recurrence would read and checks it, so a
lost, shared or recycled block or slot fails at once; a next token depends on all tokens of its request.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltaic import _core

Tokens = tuple[int, ...]
VOCAB_SIZE = 1000


def next_token(token_ids: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> int:
    """Return what the fake model says after `token_ids`."""
    text = f"{seed}:{','.join(map(str, token_ids))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") % vocab_size


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """Return what a request alone gives."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


@dataclass
class CachedRequest:
    tokens: list[int]
    salt: str
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    is_admitted: bool = False
    num_published: int = 0  # blocks
    reserved: dict[int, int] = field(default_factory=dict)  # token count -> slot
    output_snapshot: int = 0  # token count of the last one of its output


class FakeCacheManager:
    """deltaic._core.CacheManager in its contract; keys are the tokens themselves instead of hashes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        mamba_block_size: int = 0,
        num_snapshot_slots: int = 0,
        first_snapshot_slot: int = 0,
    ) -> None:
        self.block_size, self.mamba_block_size = block_size, mamba_block_size
        self.num_total_blocks = num_blocks - 1
        self.requests: dict[str, CachedRequest] = {}
        self.ref_count = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))  # LRU first
        self.block_of: dict[tuple[str, Tokens], int] = {}
        self.key_of: dict[int, tuple[str, Tokens]] = {}
        self.slot_of: OrderedDict[tuple[str, Tokens], int] = OrderedDict()  # published snapshots, LRU first
        self.free_slots = list(range(first_snapshot_slot, first_snapshot_slot + num_snapshot_slots))
        self.stats = _core.CacheStats()

    @property
    def num_free_blocks(self) -> int:
        return len(self.free)

    def add_request(self, req_id: str, token_ids: Sequence[int], cache_salt: str = "") -> None:
        assert req_id not in self.requests
        self.requests[req_id] = CachedRequest(list(token_ids), cache_salt, len(token_ids))

    def append_tokens(self, req_id: str, token_ids: Sequence[int]) -> None:
        self.requests[req_id].tokens += token_ids

    def remove_request(self, req_id: str) -> None:
        if req_id in self.requests:
            self.release(req_id)
            del self.requests[req_id]

    def find_prefix(self, req_id: str) -> _core.PrefixHit:
        request = self.requests[req_id]
        num_tokens, num_attention, slot = 0, 0, -1
        for end in range(self.block_size, len(request.tokens), self.block_size):
            key = (request.salt, tuple(request.tokens[:end]))
            if key not in self.block_of:
                break
            num_attention = end
            if not self.mamba_block_size:
                num_tokens = end
            elif key in self.slot_of:
                num_tokens, slot = end, self.slot_of[key]
        return _core.PrefixHit(num_tokens=num_tokens, num_attention_tokens=num_attention, snapshot_slot=slot)

    def admit(self, req_id: str, hit: _core.PrefixHit, num_tokens: int) -> list[int] | None:
        request = self.requests[req_id]
        assert not request.is_admitted
        ends = range(self.block_size, hit.num_tokens + 1, self.block_size)
        hits = [self.block_of[request.salt, tuple(request.tokens[:end])] for end in ends]
        num_new = self._num_blocks(num_tokens) - len(hits)
        if num_new + sum(block in self.free for block in hits) > len(self.free):
            return None
        for block in hits:
            self.ref_count[block] += 1
            self.free.pop(block, None)
        if hit.snapshot_slot >= 0:
            key = (request.salt, tuple(request.tokens[: hit.num_tokens]))
            assert self.slot_of[key] == hit.snapshot_slot
            self.slot_of.move_to_end(key)
        request.blocks = hits + [self._allocate() for _ in range(num_new)]
        request.is_admitted, request.num_published = True, len(hits)
        self.stats.num_queries += 1
        self.stats.num_query_tokens += len(request.tokens)
        self.stats.num_hit_tokens += hit.num_tokens
        return list(request.blocks)

    def extend(self, req_id: str, num_tokens: int) -> list[int] | None:
        request = self.requests[req_id]
        assert request.is_admitted
        num_new = max(self._num_blocks(num_tokens) - len(request.blocks), 0)
        if num_new > len(self.free):
            return None
        added = [self._allocate() for _ in range(num_new)]
        request.blocks += added
        return added

    def publish(self, req_id: str, num_computed_tokens: int) -> None:
        request = self.requests[req_id]
        assert self._num_blocks(num_computed_tokens) <= len(request.blocks)
        num_full = min(num_computed_tokens, len(request.tokens)) // self.block_size
        for i in range(request.num_published, num_full):
            key = (request.salt, tuple(request.tokens[: (i + 1) * self.block_size]))
            if key not in self.block_of:
                self.block_of[key] = request.blocks[i]
                self.key_of[request.blocks[i]] = key
        request.num_published = max(request.num_published, num_full)

    def release(self, req_id: str) -> None:
        request = self.requests[req_id]
        self.free_slots += request.reserved.values()
        request.reserved = {}
        for block in reversed(request.blocks):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.free[block] = None
                if block not in self.key_of:
                    self.free.move_to_end(block, last=False)
        request.blocks, request.is_admitted, request.num_published = [], False, 0

    def reserve_snapshot(self, req_id: str, num_tokens: int) -> int | None:
        request = self.requests[req_id]
        assert num_tokens % self.mamba_block_size == 0
        assert num_tokens <= len(request.blocks) * self.block_size
        if num_tokens <= len(request.tokens) and (request.salt, tuple(request.tokens[:num_tokens])) in self.slot_of:
            return None
        if num_tokens > request.num_prompt and request.output_snapshot:
            key = (request.salt, tuple(request.tokens[: request.output_snapshot]))
            if key in self.slot_of:
                self.free_slots.append(self.slot_of.pop(key))
            request.output_snapshot = 0
        if num_tokens in request.reserved:
            return request.reserved[num_tokens]
        if not self.free_slots:
            if not self.slot_of:
                return None
            self.free_slots.append(self.slot_of.popitem(last=False)[1])
            self.stats.num_evicted_snapshots += 1
        request.reserved[num_tokens] = self.free_slots.pop(0)
        return request.reserved[num_tokens]

    def publish_snapshot(self, req_id: str, num_tokens: int) -> None:
        request = self.requests[req_id]
        slot = request.reserved.pop(num_tokens)
        assert num_tokens <= min(len(request.tokens), request.num_published * self.block_size)
        key = (request.salt, tuple(request.tokens[:num_tokens]))
        if key in self.slot_of or key not in self.block_of:
            self.free_slots.append(slot)
            return
        self.slot_of[key] = slot
        self.stats.num_snapshots += 1
        if num_tokens > request.num_prompt:
            request.output_snapshot = num_tokens

    def cancel_snapshot(self, req_id: str, num_tokens: int) -> None:
        slot = self.requests[req_id].reserved.pop(num_tokens, None)
        if slot is not None:
            self.free_slots.append(slot)

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self._num_blocks(num_tokens) <= self.num_total_blocks

    def reset_prefix_cache(self) -> bool:
        if any(self.ref_count):
            return False
        for block in list(self.key_of):
            self._forget(block)
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _allocate(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.stats.num_evicted_blocks += self._forget(block)
        self.ref_count[block] = 1
        return block

    def _forget(self, block: int) -> bool:
        """Take a block, and the snapshot at its end, out of the index."""
        key = self.key_of.pop(block, None)
        if key is None:
            return False
        del self.block_of[key]
        if key in self.slot_of:
            self.free_slots.append(self.slot_of.pop(key))
        return True


@dataclass
class Row:
    seed: int
    tokens: list[int]  # prefill, then what was sampled since
    num_prefill: int
    blocks: list[int]
    last_sampled: int = -1
    state: Tokens = ()
    wants_prompt_logprobs: bool = False
    num_prompt: int = 0
    wants_logprobs: bool = False
    drafts: list[int] = field(default_factory=list)  # made by its last step
    step_drafts: list[int] = field(default_factory=list)  # that the current step verifies
    step_start: int = 0
    verifies: bool = False  # the current step is a decode with speculation
    step_tokens: Tokens = ()  # what its states and blocks hold after the current step


@dataclass
class FakeOutput:
    """AsyncModelRunnerOutput; `error` is raised when the tokens are asked for."""

    output: _core.ModelRunnerOutput
    error: Exception | None = None

    def get_output(self) -> _core.ModelRunnerOutput:
        if self.error is not None:
            raise self.error
        return self.output


class FakeRunner:
    """deltaic._core.ModelRunner for a model whose next token is a hash of all tokens so far."""

    def __init__(
        self,
        block_size: int = 4,
        max_num_reqs: int = 8,
        max_num_batched_tokens: int = 1 << 30,
        is_hybrid: bool = False,
        async_input_combine: bool = True,
        num_speculative_tokens: int = 0,
        draft_accuracy: float = 0.6,
    ) -> None:
        self.block_size, self.max_num_reqs, self.is_hybrid = block_size, max_num_reqs, is_hybrid
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_accuracy = draft_accuracy
        self.num_accepted: list[int] = []  # of each verification with drafts
        self.max_num_batched_tokens = max_num_batched_tokens
        self.async_input_combine = async_input_combine
        self.rows: dict[str, Row] = {}
        self.kv: dict[int, list[Tokens | None]] = {}  # block -> a prefix a token
        self.snapshots: dict[int, Tokens] = {}
        self.num_computed_tokens = 0
        self.steps: list[dict[str, int]] = []  # num_scheduled_tokens of each
        self.copies: list[tuple[str, str, int]] = []  # (req_id, kind, num_tokens) of all steps
        self.preempted: set[str] = set()
        self.fail_check: set[int] = set()  # steps that raise before anything is changed
        self.fail_execute: set[int] = set()  # steps whose forward raises
        self.fail_output: set[int] = set()  # steps whose get_output raises
        self.not_finite: set[str] = set()  # requests whose logits are not finite
        self.gives_no_token: set[str] = set()  # requests that the runner forgets: a defect
        self._output: _core.ModelRunnerOutput | None = None

    @property
    def may_hear_of_unknown_ids(self) -> bool:
        """After a step that raised, the scheduler repeats what the step had said."""
        return bool(self.fail_check | self.fail_execute | self.fail_output)

    def execute_model(self, step: _core.SchedulerOutput) -> None:
        number = len(self.steps)
        scheduled = dict(step.num_scheduled_tokens)
        self.steps.append(scheduled)
        assert step.total_num_scheduled_tokens == sum(scheduled.values()) <= self.max_num_batched_tokens
        if number in self.fail_check:
            raise RuntimeError(f"step {number} failed")
        for req_id in step.finished_req_ids:
            is_known = req_id in self.rows or req_id in self.preempted
            assert is_known or self.may_hear_of_unknown_ids, f"the runner does not know {req_id}"
            self.rows.pop(req_id, None)
            self.preempted.discard(req_id)
        for req_id in step.preempted_req_ids:
            if self.rows.pop(req_id, None) is not None:
                self.preempted.add(req_id)
        computed = self._apply_cached(step)
        computed |= self._apply_new(step)
        assert scheduled.keys() == computed.keys()
        assert len(self.rows) <= self.max_num_reqs
        if number in self.fail_execute:
            raise RuntimeError(f"step {number} failed")
        self._hit_copies(step)
        num_drafts = step.num_drafts if step.num_drafts is not None else self.num_speculative_tokens
        assert 0 <= num_drafts <= self.num_speculative_tokens
        self._output = self._forward(scheduled, computed, num_drafts)
        self._snapshot_copies(step)

    def sample_tokens_async(self) -> FakeOutput:
        assert self._output is not None
        output, self._output = self._output, None
        number = len(self.steps) - 1
        error = RuntimeError(f"step {number} failed") if number in self.fail_output else None
        return FakeOutput(output, error)

    def _apply_cached(self, step: _core.SchedulerOutput) -> dict[str, int]:
        cached = step.scheduled_cached_reqs
        counts = cached.num_computed_tokens
        outputs = cached.num_output_tokens
        blocks = cached.new_block_ids
        for i, req_id in enumerate(cached.req_ids):
            row = self.rows[req_id]
            if blocks[i] is not None:
                assert len(blocks[i]) == 1 + self.is_hybrid
                row.blocks += blocks[i][0]
            known = len(row.tokens) - row.num_prompt
            # A scheduler that is ahead counts all drafts in flight.
            is_right = known <= outputs[i] <= known + 3 * self.num_speculative_tokens
            assert is_right or req_id in self.not_finite | self.gives_no_token
            row.step_drafts = self._step_drafts(row, step.scheduled_spec_decode_tokens.get(req_id, []))
            if row.verifies and req_id not in self.not_finite | self.gives_no_token:
                assert len(row.tokens) - 1 <= counts[i] <= len(row.tokens) - 1 + 3 * self.num_speculative_tokens
                counts[i] = len(row.tokens) - 1
        return dict(zip(cached.req_ids, counts, strict=True))

    def _step_drafts(self, row: Row, scheduled: list[int]) -> list[int]:
        """Return the drafts of a step; a placeholder stands for what the row's last step made."""
        assert len(scheduled) <= self.num_speculative_tokens
        own = row.drafts if self.async_input_combine else []
        row.drafts = []
        return [own[j] if draft < 0 and j < len(own) else draft for j, draft in enumerate(scheduled)]

    def _make_drafts(self, row: Row, count: int) -> list[int]:
        """Return right tokens, and from some place on wrong ones."""
        drafts: list[int] = []
        is_right = True
        for j in range(count):
            luck = next_token([*row.tokens, j], seed=row.seed + 1) / VOCAB_SIZE
            is_right = is_right and luck < self.draft_accuracy
            token = next_token([*row.tokens, *drafts], row.seed)
            drafts.append(token if is_right else (token + 1) % VOCAB_SIZE)
        return drafts

    def _apply_new(self, step: _core.SchedulerOutput) -> dict[str, int]:
        computed = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.rows
            params = new.sampling_params
            assert len(new.block_ids) == 1 + self.is_hybrid
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.rows[new.req_id] = Row(
                seed=params.seed or 0,
                tokens=list(tokens),
                num_prefill=len(tokens),
                blocks=list(new.block_ids[0]),
                num_prompt=len(new.prompt_token_ids),
                wants_prompt_logprobs=params.prompt_logprobs is not None,
                wants_logprobs=params.logprobs is not None,
            )
            computed[new.req_id] = new.num_computed_tokens
            self.preempted.discard(new.req_id)
        return computed

    def _hit_copies(self, step: _core.SchedulerOutput) -> None:
        for copy in step.state_copies:
            if copy.kind == _core.StateCopyKind.hit:
                state = self.snapshots[copy.snapshot_slot]
                assert len(state) == copy.num_tokens, "a snapshot under a wrong token count"
                self.rows[copy.req_id].state = state
                self.copies.append((copy.req_id, "hit", copy.num_tokens))

    def _snapshot_copies(self, step: _core.SchedulerOutput) -> None:
        slots = [copy.snapshot_slot for copy in step.state_copies if copy.kind == _core.StateCopyKind.snapshot]
        assert len(slots) == len(set(slots)), "two snapshots of a step share a slot"
        for copy in step.state_copies:
            if copy.kind == _core.StateCopyKind.snapshot:
                row = self.rows[copy.req_id]
                seen = row.step_tokens
                if row.verifies and not row.step_start < copy.num_tokens <= len(seen):
                    continue  # another step's
                assert row.verifies or len(seen) == copy.num_tokens, "a snapshot under a wrong token count"
                self.snapshots[copy.snapshot_slot] = seen[: copy.num_tokens]
                self.copies.append((copy.req_id, "snapshot", copy.num_tokens))

    def _forward(self, scheduled: dict[str, int], computed: dict[str, int], num_drafts: int) -> _core.ModelRunnerOutput:
        written: set[tuple[int, int]] = set()
        for req_id, num_new in scheduled.items():
            self._write(self.rows[req_id], computed[req_id], num_new, written)
        sampled, logprobs, prompt_logprobs = [], {}, {}
        drafts: list[list[int]] = []
        for req_id, num_new in scheduled.items():
            row, start = self.rows[req_id], computed[req_id]
            end = start + num_new
            self._check_reads(row, end)
            self.num_computed_tokens += num_new
            if row.wants_prompt_logprobs and start < row.num_prompt - 1:
                positions = range(start + 1, min(end, row.num_prompt - 1) + 1)
                prompt_logprobs[req_id] = [_core.TokenLogprobs(token_ids=[row.tokens[i]], rank=i) for i in positions]
            drafts.append([])
            if end < len(row.tokens):
                sampled.append([])
                continue
            if req_id in self.not_finite or req_id in self.gives_no_token:
                sampled.append([])
                continue
            tokens: list[int] = []
            for draft in [*row.step_drafts, None]:
                tokens.append(next_token(row.tokens, row.seed))
                row.tokens.append(tokens[-1])
                if draft != tokens[-1]:
                    break
            if row.step_drafts:
                self.num_accepted.append(len(tokens) - 1)
            if row.verifies:
                row.state = tuple(row.tokens[: start + len(tokens)]) if self.is_hybrid else ()
            sampled.append(tokens)
            row.drafts = drafts[-1] = self._make_drafts(row, num_drafts)
            if row.wants_logprobs:
                logprobs[req_id] = [_core.TokenLogprobs(token_ids=[token]) for token in tokens]
        return _core.ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={req_id: i for i, req_id in enumerate(scheduled)},
            sampled_token_ids=sampled,
            draft_token_ids=drafts if self.num_speculative_tokens else [],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed_req_ids=[req_id for req_id in scheduled if req_id in self.not_finite],
        )

    def _write(self, row: Row, start: int, num_new: int, written: set[tuple[int, int]]) -> None:
        end = start + num_new
        assert num_new > 0
        if end == len(row.tokens) + 1 and num_new == 1:  # the sample before failed: what runs now is for nobody
            row.tokens.append(0)
        row.verifies = self.num_speculative_tokens > 0 and start >= row.num_prefill
        row.step_start = start
        assert not row.step_drafts or (row.verifies and num_new == 1 + len(row.step_drafts))
        assert end <= len(row.tokens) + len(row.step_drafts), "a step past the known tokens"
        row.step_tokens = (*row.tokens, *row.step_drafts)[:end]
        assert len(row.blocks) == len(set(row.blocks))
        assert 0 not in row.blocks
        for position in range(start, end):
            block, offset = row.blocks[position // self.block_size], position % self.block_size
            assert (block, offset) not in written, "two requests write one place"
            written.add((block, offset))
            self.kv.setdefault(block, [None] * self.block_size)[offset] = row.step_tokens[: position + 1]
        if self.is_hybrid:
            assert row.state == row.step_tokens[:start], "the state is not that of the computed tokens"
            row.state = row.step_tokens

    def _check_reads(self, row: Row, end: int) -> None:
        for position in range(end):
            held = self.kv[row.blocks[position // self.block_size]][position % self.block_size]
            assert held == row.step_tokens[: position + 1], "a block does not hold what the request computed"
