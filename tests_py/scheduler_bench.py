"""A scheduler with a fake cache and a fake runner, stepped by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from deltaic import _core
from deltaic.request import EngineOutput, Request
from deltaic.sampling_params import SamplingParams
from deltaic.scheduler import Scheduler
from deltaic.scheduler_config import SchedulerConfig
from fakes import FakeCacheManager, FakeRunner, expected_tokens, next_token


def make_core_cache(
    num_blocks: int, block_size: int, mamba_block_size: int, num_snapshot_slots: int, first_snapshot_slot: int
) -> _core.CacheManager:
    return _core.CacheManager(
        _core.CacheManagerOptions(
            num_blocks=num_blocks,
            block_size=block_size,
            mamba_block_size=mamba_block_size,
            num_snapshot_slots=num_snapshot_slots,
            first_snapshot_slot=first_snapshot_slot,
        )
    )


class Bench:
    """A scheduler with a fake cache and a fake runner, stepped by hand."""

    def __init__(
        self,
        num_blocks: int = 100,
        num_snapshot_slots: int = 8,
        *,
        core_cache: bool = False,
        draft_accuracy: float = 0.6,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 200,
            "block_size": 4,
        }
        self.config = SchedulerConfig(**{**defaults, **config})
        is_hybrid = self.config.mamba_block_size > 0
        if is_hybrid:
            self.config = dataclasses.replace(self.config, num_kv_cache_groups=2)
        make_cache = make_core_cache if core_cache else FakeCacheManager
        self.cache: Any = make_cache(
            num_blocks,
            self.config.block_size,
            self.config.mamba_block_size,
            num_snapshot_slots if is_hybrid else 0,
            self.config.max_num_seqs,
        )
        self.runner = FakeRunner(
            self.config.block_size,
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            is_hybrid,
            num_speculative_tokens=self.config.num_speculative_tokens,
            draft_accuracy=draft_accuracy,
        )
        self.scheduler = Scheduler(self.config, self.cache)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, EngineOutput] = {}
        self.in_flight: list[tuple[_core.SchedulerOutput, Any]] = []
        self.last = _core.SchedulerOutput()

    def add(self, req_id: str, prompt: int | list[int], max_tokens: int = 4, **options: Any) -> Request:
        """Queue a request; a number stands for a prompt of so many tokens that only this request has."""
        priority = options.pop("priority", 0)
        eos = options.pop("eos_token_ids", ())
        salt = options.pop("cache_salt", "")
        if isinstance(prompt, int):
            prompt = [next_token([len(self.requests), i]) for i in range(prompt)]
        request = Request.make(
            req_id,
            prompt,
            SamplingParams(temperature=0.0, max_tokens=max_tokens, **options),
            max_model_len=self.config.max_model_len,
            eos_token_ids=eos,
            priority=priority,
            cache_salt=salt,
        )
        self.scheduler.add_request(request)
        self.requests[req_id] = request
        self.tokens[req_id] = []
        return request

    def schedule(self) -> dict[str, int]:
        """Schedule and execute a step, leave it in flight; return its tokens by request."""
        step = self.scheduler.schedule()
        if step.total_num_scheduled_tokens:
            self.runner.execute_model(step)
            self.in_flight.append((step, self.runner.sample_tokens_async()))
        self.last = step
        return dict(step.num_scheduled_tokens)

    def update(self) -> list[EngineOutput]:
        """Read the oldest step in flight back."""
        step, pending = self.in_flight.pop(0)
        outputs = self.scheduler.update(step, pending.get_output())
        self.collect(outputs)
        return outputs

    def collect(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.req_id not in self.finished
            self.tokens[output.req_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.finished[output.req_id] = output

    def step_until_preempted(self) -> dict[str, int]:
        for _ in range(100):
            scheduled = self.step()
            if self.last.preempted_req_ids:
                return scheduled
        raise AssertionError("nobody was preempted")

    def step(self) -> dict[str, int]:
        scheduled = self.schedule()
        if self.in_flight:
            self.update()
        return scheduled

    def advance(self, depth: int) -> list[EngineOutput]:
        """Schedule a step and leave so many in flight, none when nothing can be scheduled."""
        scheduled = self.schedule()
        assert scheduled or self.in_flight or not self.scheduler.has_unfinished_requests(), "the scheduler is stuck"
        outputs = []
        while len(self.in_flight) > (depth if scheduled else 0):
            outputs += self.update()
        if isinstance(self.cache, FakeCacheManager):  # no slot is kept for a snapshot that cannot come any more
            for req_id, cached in self.cache.requests.items():
                assert cached.reserved.keys() == self.scheduler._requests[req_id].reserved_snapshots.keys()
        return outputs

    def run(self, depth: int = 0) -> None:
        """Run to the end, with so many steps scheduled ahead; then everything must be given back."""
        for _ in range(5000):
            self.advance(depth)
            if not self.scheduler.has_unfinished_requests() and not self.in_flight:
                break
        assert not self.scheduler.has_unfinished_requests()
        self.check_idle()

    def check_idle(self) -> None:
        assert self.cache.num_free_blocks == self.cache.num_total_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def check_tokens(self) -> None:
        """Each request has what it would have alone."""
        for req_id, request in self.requests.items():
            prompt = request.token_ids[: request.num_prompt_tokens]
            num_new = request.max_total_tokens - request.num_prompt_tokens
            assert self.tokens[req_id] == expected_tokens(prompt, num_new)
            assert self.finished[req_id].finish_reason == "length"


def step_budgets(prompt: list[int], interval: int, budgets: list[int]) -> dict[int, int]:
    """Prefill a prompt in steps of the given budgets; return the tokens computed when each snapshot was taken.

    Then the prompt is sent again and must hit the last snapshot. Uses the core's cache, and no runner.
    """
    size = len(prompt) + 10
    cache = make_core_cache(-(-2 * size // 16) + 1, 16, interval, 8, 1)
    config = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=size,
        max_model_len=size,
        mamba_block_size=interval,
        num_kv_cache_groups=2,
    )
    scheduler = Scheduler(config, cache)
    published: dict[int, int] = {}
    for req_id in ("first", "second"):
        request = Request.make(req_id, prompt, SamplingParams(max_tokens=1), max_model_len=size)
        scheduler.add_request(request)
        remaining = list(budgets) if req_id == "first" else []
        while scheduler.has_unfinished_requests():
            budget = remaining.pop(0) if remaining else size
            scheduler.config = dataclasses.replace(config, max_num_batched_tokens=budget)
            step = scheduler.schedule()
            assert 0 < step.total_num_scheduled_tokens <= budget
            for copy in step.state_copies:
                if copy.kind == _core.StateCopyKind.snapshot:
                    published[copy.num_tokens] = request.num_computed_tokens
                else:
                    assert (req_id, copy.num_tokens) == ("second", max(published))
            sampled = [[1] if request.num_computed_tokens == len(prompt) else []]
            output = _core.ModelRunnerOutput(req_ids=[req_id], req_id_to_index={req_id: 0}, sampled_token_ids=sampled)
            scheduler.update(step, output)
    assert request.num_cached_tokens == (len(prompt) - 1) // interval * interval
    return published
