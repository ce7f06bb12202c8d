"""Who runs in a step, and how many tokens each. Policy only: no tensor.

One rule: give each request tokens until num_computed_tokens has caught up with num_tokens. Chunked prefill, prefix
hits, preemption and async scheduling follow from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from deltaic import _core
from deltaic.draft_policy import DraftPolicy, FixedDrafts, SteadyStep
from deltaic.draft_stats import DraftStats
from deltaic.prefix_publisher import PrefixPublisher
from deltaic.request import EngineOutput, FinishReason, Request, RequestStatus
from deltaic.scheduler_config import SchedulerConfig
from deltaic.step_description import Admission, copies_of_hits, describe_step, next_decodes
from deltaic.waiting_queue import WaitingQueue

# A request in a step that was handed out; its num_preemptions then, as an output of an earlier life is discarded;
# whether it samples: no token comes of a part of the prefill; and its drafts.
_Row = tuple[Request, int, bool, int]


class Scheduler:
    """Decide what each step runs, and account for what it gave.

    schedule() may run ahead of update() by a step or more; update() takes the steps in their order. Freed blocks and
    snapshot slots are reused by later steps at the earliest, or within the step that no longer schedules their owner:
    the device runs steps in order, so what an earlier step still reads or writes there is done by then.

    Drafts: a request that decodes runs its newest token and the drafts that the step before it made; until that step's
    output is read their ids are -1, and num_computed_tokens counts all of them as accepted.
    """

    def __init__(self, config: SchedulerConfig, cache: _core.CacheManager, drafts: DraftPolicy | None = None) -> None:
        self.config = config
        self.drafts = drafts or FixedDrafts(config.num_speculative_tokens)
        self.draft_stats = DraftStats(config.num_speculative_tokens)
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.num_prompt_tokens = 0  # of admitted requests, prefix hits included
        self._cache = cache
        self._publisher = PrefixPublisher(config, cache)
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting = WaitingQueue(uses_priority=config.policy == "priority")
        self._num_arrivals = 0
        self._num_drafts = 0  # of the step that is being scheduled: verified, and made behind it
        self.steady: SteadyStep | None = None  # the step that was scheduled last, if it is one
        self._finished_ids: list[str] = []  # to be told to the runner with the next step that runs
        self._preempted_ids: list[str] = []  # likewise
        self._in_flight: deque[tuple[_core.SchedulerOutput, list[_Row]]] = deque()
        self._last_step = _core.SchedulerOutput()  # the one that was handed out last
        self._decodes: list[Request] = []  # its requests, if each decodes a token in it

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. ValueError for an id in use, or for one that no empty cache could hold."""
        if request.req_id in self._requests:
            raise ValueError(f"request id {request.req_id!r} is in use")
        # The last token is sampled, never computed.
        num_tokens = request.max_total_tokens - 1
        if not self._cache.can_ever_fit(num_tokens):
            block_size = self.config.block_size
            raise ValueError(
                f"request {request.req_id!r} can never fit: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} new ones need "
                f"{-(-num_tokens // block_size)} blocks of {block_size} tokens, the cache has "
                f"{self._cache.num_total_blocks}"
            )
        self._cache.add_request(request.req_id, request.token_ids, request.cache_salt)
        request.num_registered_tokens = len(request.token_ids)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.req_id] = request
        self._waiting.push(request)

    def abort(self, req_ids: Iterable[str]) -> list[EngineOutput]:
        """Finish requests in whatever state they are and free what they hold. Unknown ids are ignored."""
        return self._finish_all((self._requests[i] for i in req_ids if i in self._requests), "abort", None)

    def fail_in_flight(self, message: str) -> list[EngineOutput]:
        """Finish with an error the requests of all steps in flight, after one of them raised.

        What these steps published may never have been written, so the prefix cache is forgotten and every other
        request starts again.
        """
        rows = [row for _, step_rows in self._in_flight for row in step_rows]
        for step, _ in self._in_flight:  # the runner may not have come to these, and ignores ids that it does not know
            self._finished_ids += step.finished_req_ids
            self._preempted_ids += step.preempted_req_ids
        self._in_flight.clear()
        self._drop_finished()
        alive = [request for request, num_preemptions, *_ in rows if request.num_preemptions == num_preemptions]
        outputs = self._finish_all(alive, "error", message)
        self.reset_prefix_cache(preempt_running=True)
        return outputs

    def fail_stalled(self, message: str) -> list[EngineOutput]:
        """Finish with an error the request that is next in line, if there is one."""
        request = self._waiting.first()
        return self._finish_all([request] if request else [], "error", message)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes. Return False, changing nothing, while requests run and may not be preempted."""
        if self._running and not preempt_running:
            return False
        while self._running:
            self._preempt(self._running.pop())
        done: bool = self._cache.reset_prefix_cache()
        return done

    def set_num_ready_tokens(self, num_tokens: Mapping[str, int]) -> None:
        """Let requests run no further than their first tokens until told otherwise; -1: no limit.

        Their prompts are always ready. Unknown ids are ignored.
        """
        requests = self._requests
        for req_id, count in num_tokens.items():
            if req_id in requests:
                requests[req_id].num_ready_tokens = None if count < 0 else count

    @property
    def holds_requests(self) -> bool:
        """Return whether a running request waits for its inputs."""
        return any(request.num_ready_tokens is not None for request in self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_request(self, req_id: str) -> bool:
        return req_id in self._requests

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> _core.SchedulerOutput:
        """Return what the next step runs; nothing when no request can make progress before the next update()."""
        scheduled: dict[Request, int] = {}  # tokens of this step, in row order
        new_blocks: dict[Request, list[int]] = {}
        self._num_drafts = self.drafts.choose(len(self._running)) if self.config.num_speculative_tokens else 0
        budget, preempted = self._schedule_running(scheduled, new_blocks)
        admitted: list[Admission] = []
        if not preempted:  # a victim that came back at once would be preempted again
            admitted = self._admit(scheduled, budget)
        if not scheduled:
            return _core.SchedulerOutput()
        return self._hand_out(scheduled, new_blocks, admitted)

    def _schedule_running(
        self, scheduled: dict[Request, int], new_blocks: dict[Request, list[int]]
    ) -> tuple[int, bool]:
        """Give running requests their tokens, in order. Return what is left of the budget, and if any was preempted."""
        running = self._running
        block_size = self.config.block_size
        budget = self.config.max_num_batched_tokens
        preempted = False
        index = 0 if self._num_drafts else self._schedule_decodes(scheduled, new_blocks)
        budget -= len(scheduled)
        while index < len(running) and budget > 0:
            request = running[index]
            num_new = self._num_new_tokens(request, budget)
            if num_new == 0:
                index += 1
                continue
            end = request.num_computed_tokens + num_new
            if self._end_with_drafts(request, end) > request.num_blocks * block_size:
                blocks, end = self._extend_with_drafts(request, end)
                num_new = end - request.num_computed_tokens
                if blocks is None:
                    preempted = True
                    blocks, index = self._extend_by_preemption(index, end, scheduled, new_blocks)
                    budget = self.config.max_num_batched_tokens - sum(scheduled.values())
                    if blocks is None:
                        continue  # it was its own victim; the next request stands at its index
                if blocks:
                    new_blocks[request] = blocks
                    request.num_blocks += len(blocks)
            scheduled[request] = num_new
            budget -= num_new
            index += 1
        return budget, preempted

    def _schedule_decodes(self, scheduled: dict[Request, int], new_blocks: dict[Request, list[int]]) -> int:
        """Schedule the first of the running requests, as far as they decode and find room; return where it stopped.

        The same as the loop of _schedule_running, and less work for what nearly all requests are.
        """
        block_size = self.config.block_size
        running = self._running[: self.config.max_num_batched_tokens]
        for index, request in enumerate(running):
            end = request.num_computed_tokens + 1
            if end != len(request.token_ids) + request.num_placeholders:
                return index
            if end >= request.max_total_tokens:
                continue  # the token in flight certainly ends it
            if request.num_ready_tokens is not None and end > request.num_ready_tokens:
                continue  # it waits for its inputs
            if end > request.num_blocks * block_size:
                blocks = self._cache.extend(request.req_id, end)
                if blocks is None:
                    return index
                new_blocks[request] = blocks
                request.num_blocks += len(blocks)
            scheduled[request] = 1
        return len(running)

    def _end_with_drafts(self, request: Request, end: int) -> int:
        """Return how many tokens a request of `end` tokens needs blocks for when drafts are made behind them."""
        return max(end, min(end + self._num_drafts - 1, request.max_total_tokens - 1))

    def _extend_with_drafts(self, request: Request, end: int) -> tuple[list[int] | None, int]:
        """Extend a request to `end` tokens, and as far as its next drafts go; drafts never preempt anyone.

        Return the new blocks, and the tokens that it runs up to: without the drafts of this step where there is room
        for its own token alone. No blocks (None) where that one needs a block that cannot be had.
        """
        num_held = request.num_blocks * self.config.block_size
        own_end = request.num_computed_tokens + 1 if self._num_drafts_of(request, end) else end
        for wanted, result in ((self._end_with_drafts(request, end), end), (end, end), (own_end, own_end)):
            if wanted <= num_held:
                return [], result
            blocks = self._cache.extend(request.req_id, wanted)
            if blocks is not None:
                return blocks, result
        return None, own_end

    def _num_drafts_of(self, request: Request, end: int) -> int:
        """Return how many drafts a request runs in a step that takes it to `end` tokens."""
        return max(end - len(request.token_ids) - request.num_placeholders, 0)

    def _extend_by_preemption(
        self, index: int, end: int, scheduled: dict[Request, int], new_blocks: dict[Request, list[int]]
    ) -> tuple[list[int] | None, int]:
        """Preempt until the running request at `index` has blocks for `end` tokens, or is the victim itself (None).

        A victim's blocks can be had at once, so no more are preempted than need be. Return also where the request
        stands, or stood, by then.
        """
        request = self._running[index]
        blocks = None
        while blocks is None:
            victim_index = self._victim_index()
            victim = self._running.pop(victim_index)
            scheduled.pop(victim, None)
            new_blocks.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return None, index
            if victim_index < index:
                index -= 1
            blocks = self._cache.extend(request.req_id, end)
        return blocks, index

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        """Return how many tokens of a running request the step takes; 0 to leave it out."""
        num_tokens = len(request.token_ids) + request.num_placeholders
        if num_tokens >= request.max_total_tokens:
            return 0  # the token in flight certainly ends it
        computed = request.num_computed_tokens
        num_new = num_tokens - computed
        if request.num_ready_tokens is not None:
            num_new = max(0, min(num_new, request.num_ready_tokens - computed))
        if num_new > 1:
            return self._chunk(request, computed, num_new, budget)
        if num_new == 0 or self._num_drafts == 0 or request.num_ready_tokens is not None:
            return num_new
        num_there = request.num_drafts_coming if request.num_sampling else len(request.draft_token_ids)
        return num_new + min(self._num_drafts, num_there, budget - 1, request.max_total_tokens - num_tokens - 1)

    def _chunk(self, request: Request, computed: int, num_new: int, budget: int) -> int:
        """Cut a prefill to the budget, and where a snapshot must be taken."""
        threshold = self.config.long_prefill_token_threshold
        end = computed + min(num_new, budget, threshold or num_new)
        for stop in request.snapshot_stops:
            if computed < stop < end:
                return stop - computed
        return end - computed

    def _admit(self, scheduled: dict[Request, int], budget: int) -> list[Admission]:
        """Start waiting requests, first in line first; the first that finds no room holds up the others.

        A request takes blocks for all its known tokens and one more, so that a prefill never preempts anyone and
        each admission yields a token.
        """
        admitted: list[Admission] = []
        while budget > 0 and len(self._running) < self.config.max_num_seqs and (request := self._waiting.first()):
            self._publisher.register_tokens(request)
            reads = self._publisher.is_enabled and request.reads_prefix_cache
            hit = self._cache.find_prefix(request.req_id) if reads else _core.PrefixHit()
            num_known = len(request.token_ids)
            computed = hit.num_tokens
            if not self.config.enable_chunked_prefill and num_known - computed > budget:
                break
            blocks = self._cache.admit(request.req_id, hit, min(num_known + 1, request.max_total_tokens - 1))
            if blocks is None:
                break
            self._waiting.pop_first()
            if request.num_cached_tokens is None:
                request.num_cached_tokens = computed
                self.num_prompt_tokens += num_known
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = computed
            request.num_prefill_tokens = num_known
            request.num_blocks = len(blocks)
            request.num_published_blocks = computed // self.config.block_size
            request.snapshot_stops = self._publisher.snapshot_stops(num_known, hit)
            num_new = self._chunk(request, computed, num_known - computed, budget)
            if request.num_ready_tokens is not None:
                num_new = min(num_new, request.num_ready_tokens - computed)
            self._running.append(request)
            scheduled[request] = num_new
            budget -= num_new
            admitted.append((request, blocks, hit))
        return admitted

    def _hand_out(
        self,
        scheduled: dict[Request, int],
        new_blocks: dict[Request, list[int]],
        admitted: list[Admission],
    ) -> _core.SchedulerOutput:
        """Count the step's tokens as computed, publish what it will have written, and describe it to the runner."""
        num_groups = self.config.num_kv_cache_groups
        requests = list(scheduled)
        if not admitted and requests == self._decodes:  # a token each once more, as in nearly all steps
            step = next_decodes(self._last_step, requests, new_blocks, num_groups)
        else:
            step = describe_step(scheduled, new_blocks, admitted, num_groups)
        copies = copies_of_hits(admitted)
        drafts: dict[str, list[int]] = {}
        rows: list[_Row] = []
        to_publish: list[tuple[Request, int]] = []  # with the earliest token that the step may begin at
        publishes, interval = self._publisher.is_enabled, self._publisher.snapshot_interval
        block_size = self.config.block_size
        speculates = self.config.num_speculative_tokens > 0
        num_drafts = num_sampling = 0
        for request, num_new in scheduled.items():
            num_placeholders = request.num_placeholders
            num_known = len(request.token_ids)
            num_tokens = num_known + num_placeholders
            begin = request.num_computed_tokens
            request.num_computed_tokens = end = begin + num_new
            samples = end >= num_tokens
            if publishes:
                earliest = begin - num_placeholders + request.num_sampling  # by drafts in flight that turn out wrong
                if (end if end < num_known else num_known) // block_size > request.num_published_blocks or (
                    interval and end // interval * interval > earliest
                ):
                    to_publish.append((request, earliest))
            if speculates:
                num_drafts = max(end - num_tokens, 0)
                if num_drafts:
                    in_flight = request.num_sampling > 0
                    drafts[request.req_id] = [-1] * num_drafts if in_flight else request.draft_token_ids[:num_drafts]
                if samples:
                    request.num_drafts_coming = self._num_drafts
                    request.draft_token_ids = []
            if samples:
                request.num_placeholders = num_placeholders + 1 + num_drafts
                request.num_sampling += 1
                request.num_sampling_steps += 1
                num_sampling += 1
            rows.append((request, request.num_preemptions, samples, num_drafts))
        if to_publish:
            self._publisher.publish(to_publish, copies)

        if speculates:
            step.scheduled_spec_decode_tokens = drafts
        step.num_drafts = self._num_drafts
        step.finished_req_ids = self._finished_ids
        step.preempted_req_ids = self._preempted_ids
        step.state_copies = copies
        self._finished_ids = []
        self._preempted_ids = []
        self._in_flight.append((step, rows))
        are_decodes = num_sampling == step.total_num_scheduled_tokens and not admitted and not speculates
        self._decodes, self._last_step = requests if are_decodes else [], step
        if speculates:
            is_steady = not admitted and all(samples and n == self._num_drafts for _, _, samples, n in rows)
            self.steady = SteadyStep(len(rows), self._num_drafts) if is_steady else None
        return step

    # ---- what a step gave -----------------------------------------------------------------------------------------

    def update(self, step: _core.SchedulerOutput, output: _core.ModelRunnerOutput) -> list[EngineOutput]:
        """Take the tokens of the oldest step in flight; return what is new for each request."""
        if not self._in_flight or self._in_flight[0][0] is not step:
            raise ValueError("update() takes the steps in the order in which schedule() returned them")
        req_ids = output.req_ids  # each field is converted whenever it is read
        tokens_of = dict(zip(req_ids, output.sampled_token_ids, strict=True))
        failed = set(output.failed_req_ids)
        logprobs: dict[str, list[_core.TokenLogprobs]] | None = None  # converted when one is wanted
        prompt_logprobs: dict[str, list[_core.TokenLogprobs]] | None = None
        outputs: list[EngineOutput] = []
        any_finished = False
        running = RequestStatus.RUNNING
        speculates = self.config.num_speculative_tokens > 0
        made = output.draft_token_ids if speculates else []
        drafts_of = dict(zip(req_ids, made, strict=True)) if made else {}
        num_generated = 0
        for request, num_preemptions, samples, num_drafts in self._in_flight[0][1]:
            if request.status is not running or request.num_preemptions != num_preemptions:
                continue  # ended or preempted meanwhile: its token is computed again, or not wanted
            req_id = request.req_id
            tokens = tokens_of[req_id]
            if (failed and req_id in failed) or (samples and not tokens):
                message = f"the logits of request {req_id!r} are not finite"
                if req_id not in failed:
                    failed.add(req_id)
                    message = f"the runner gave no token for request {req_id!r}"
                outputs.append(EngineOutput(req_id, finish_reason="error", error=message))
                self._release(request)
                any_finished = True
                continue
            if request.prompt_logprobs is not None:
                if prompt_logprobs is None:
                    prompt_logprobs = output.prompt_logprobs
                request.prompt_logprobs += prompt_logprobs.get(req_id, ())
            if not samples:
                continue
            known = request.token_ids
            begin = len(known) - 1  # of the step, if it was a decode
            if len(tokens) == 1 and begin + 2 < request.max_total_tokens and tokens[0] not in request.ending_token_ids:
                known.append(tokens[0])  # which ends nothing, as nearly all
                result = EngineOutput(req_id, tokens)
            else:
                result = EngineOutput(req_id, *request.append(tokens))
            request.num_placeholders -= 1 + num_drafts
            request.num_sampling -= 1
            if speculates:
                request.num_computed_tokens -= 1 + num_drafts - len(tokens)  # what was rejected
            if request.reserved_snapshots:
                self._publisher.settle_snapshots(request, begin, begin + len(tokens))
            if speculates:
                self._take_drafts(request, num_drafts, len(tokens) - 1, drafts_of.get(req_id, []))
            num_generated += len(result.new_token_ids)
            if request.num_cached_tokens:
                result.num_cached_tokens = request.num_cached_tokens
            if request.wants_logprobs:
                if logprobs is None:
                    logprobs = output.logprobs
                result.logprobs = logprobs[req_id][: len(result.new_token_ids)]
            if request.prompt_logprobs is not None:
                result.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
            outputs.append(result)
            if result.finish_reason is not None:
                self._release(request)
                any_finished = True
        self.num_generated_tokens += num_generated
        self._in_flight.popleft()
        if any_finished:
            self._drop_finished()
        if failed:
            # What a failed request published must not spoil those that share its prefix.
            self.reset_prefix_cache(preempt_running=True)
        return outputs

    def _take_drafts(self, request: Request, num_drafts: int, num_accepted: int, drafts: list[int]) -> None:
        """Count what became of a request's drafts, and take its next ones if no step in flight has them already."""
        num_drafts = min(num_drafts, request.num_drafts_made)  # the others were placeholders
        if num_drafts:
            self.draft_stats.count(num_drafts, num_accepted)
            self.drafts.observe_acceptance(num_drafts, num_accepted)
        request.num_drafts_made = len(drafts)
        if not request.num_sampling:
            request.draft_token_ids = drafts

    # ---- bookkeeping ----------------------------------------------------------------------------------------------

    def _victim_index(self) -> int:
        """Return which running request gives way: the last, or the one with the worst (priority, arrival)."""
        running = self._running
        if self.config.policy == "fcfs":
            return len(running) - 1
        return max(range(len(running)), key=lambda i: (running[i].priority, running[i].arrival))

    def _preempt(self, request: Request) -> None:
        """Give back what a request holds and queue it again; the caller has taken it out of the running ones."""
        self._cache.release(request.req_id)
        request.preempt()
        self.num_preemptions += 1
        self._preempted_ids.append(request.req_id)
        self._waiting.push(request)

    def _finish_all(self, requests: Iterable[Request], reason: FinishReason, error: str | None) -> list[EngineOutput]:
        outputs = []
        for request in requests:
            if request.status is not RequestStatus.FINISHED:
                outputs.append(EngineOutput(request.req_id, finish_reason=reason, error=error))
                self._release(request)
        if outputs:
            self._drop_finished()
        return outputs

    def _release(self, request: Request) -> None:
        """End a request and free what it holds; _drop_finished() must follow."""
        if request.status is not RequestStatus.RUNNING:
            self._waiting.end_one()
        if request.status is not RequestStatus.WAITING:
            self._finished_ids.append(request.req_id)
        request.status = RequestStatus.FINISHED
        del self._requests[request.req_id]
        self._cache.remove_request(request.req_id)

    def _drop_finished(self) -> None:
        self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
