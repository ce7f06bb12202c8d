"""The loop: schedule a step, run it, take its tokens. Owns the scheduler, the caches' bookkeeping and the runner."""

from __future__ import annotations

import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltaic import _core
from deltaic.device import place
from deltaic.draft_policy import DraftPolicy, SteadyStep
from deltaic.draft_stats import DraftStats
from deltaic.engine_config import EngineConfig
from deltaic.memory_plan import MemoryPlan, plan_memory
from deltaic.request import EngineOutput, Request
from deltaic.scheduler import Scheduler
from deltaic.scheduler_config import SchedulerConfig
from deltaic.speculation import plan_speculation

if TYPE_CHECKING:
    from deltaic.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of now, counters since the engine was made."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_prompt_tokens: int  # of admitted requests, prefix hits included
    num_generated_tokens: int
    num_free_blocks: int  # free or evictable
    num_total_blocks: int
    cache: _core.CacheStats
    drafts: DraftStats

    @property
    def cache_usage(self) -> float:
        """Return the share of attention blocks that live requests hold."""
        return 1.0 - self.num_free_blocks / self.num_total_blocks


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step whose tokens were not read yet."""

    step: _core.SchedulerOutput
    pending: _core.AsyncModelRunnerOutput
    steady: SteadyStep | None
    started: float  # when it was enqueued


class Engine:
    """Run requests on one model. Not thread-safe.

    With async scheduling a step is scheduled and enqueued before the tokens of the one before it are read.
    """

    def __init__(
        self,
        runner: _core.ModelRunner,
        cache: _core.CacheManager,
        scheduler_config: SchedulerConfig,
        *,
        vocab_size: int,
        async_scheduling: bool = True,
        memory_plan: MemoryPlan | None = None,
        drafts: DraftPolicy | None = None,
        runs_ahead: bool = False,  # the runner's steps still run when sample_tokens_async() returns
    ) -> None:
        self.runner = runner
        self.memory_plan = memory_plan
        self.scheduler_config = scheduler_config
        self.vocab_size = vocab_size
        self.async_scheduling = async_scheduling
        self.on_schedule: Callable[[_core.SchedulerOutput], None] | None = None  # called with each step before it runs
        self._cache = cache
        self._scheduler = Scheduler(scheduler_config, cache, drafts)
        self._in_flight: deque[_InFlight] = deque()
        self._runs_ahead = runs_ahead
        self._last_read = 0.0  # when the tokens of a step were read
        self._aborted: list[EngineOutput] = []  # to be returned by the next step

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, config: EngineConfig | None = None, *, scripted_draft_acceptance: float | None = None
    ) -> Engine:
        """Load a checkpoint folder, or make random weights for a config.json, and divide the memory for its caches.

        scripted_draft_acceptance is for benches on CUDA alone: each draft is then accepted with this probability,
        whatever it is, and the tokens mean nothing.
        Raises ValueError or MemoryError with the numbers for a size that the user set and that does not fit.
        """
        config = config or EngineConfig()
        model = _core.load_model_config(path)
        placement = place(model, config)
        speculation = plan_speculation(path, config, placement.device.type)
        plan = plan_memory(model, config, placement=placement, num_speculative_tokens=speculation.num_tokens)
        sizes, kv_cache = plan.sizes, plan.kv_cache
        options = _core.RunnerOptions(
            device=placement.device,
            dtype=placement.dtype,
            max_num_reqs=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            num_speculative_tokens=speculation.num_tokens,
            num_threads=config.num_threads,
            async_input_combine=config.async_scheduling,
            poison_caches=config.poison_caches,
            enforce_eager=config.enforce_eager,
            dummy_weights=config.load_format == "dummy",
            scripted_draft_acceptance=-1.0 if scripted_draft_acceptance is None else scripted_draft_acceptance,
        )
        try:
            runner = _core.ModelRunner(path, kv_cache, options)
        except _core.OutOfMemory as error:
            raise _core.OutOfMemory(f"{error} (planned: {plan.describe()})") from error
        num_running_slots = kv_cache.num_running_slots
        cache = _core.CacheManager(
            _core.CacheManagerOptions(
                num_blocks=kv_cache.num_blocks,
                block_size=sizes.block_size,
                mamba_block_size=sizes.mamba_block_size,
                num_snapshot_slots=kv_cache.num_snapshot_slots,
                first_snapshot_slot=sizes.max_num_seqs if num_running_slots is None else num_running_slots,
                enable_prefix_caching=config.enable_prefix_caching,
            )
        )
        return cls(
            runner,
            cache,
            sizes,
            vocab_size=model.vocab_size,
            async_scheduling=config.async_scheduling,
            memory_plan=plan,
            drafts=speculation.policy,
            runs_ahead=placement.is_cuda,
        )

    # ---- requests -------------------------------------------------------------------------------------------------

    def add_request(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        eos_token_ids: Iterable[int] = (),
        bad_words_token_ids: Iterable[Sequence[int]] = (),
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue a request. Raises ValueError, alone and at once, for what can never run; step() gives its tokens."""
        token_ids = [operator.index(token_id) for token_id in prompt_token_ids]
        max_model_len = self.scheduler_config.max_model_len
        if not token_ids:
            raise ValueError("the prompt must hold at least 1 token, got 0")
        if len(token_ids) >= max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, max_model_len {max_model_len} leaves room for at most "
                f"{max_model_len - 1}"
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"prompt token id {bad} is outside the vocabulary [0, {self.vocab_size})")
        request = Request.make(
            req_id,
            token_ids,
            sampling_params,
            max_model_len=max_model_len,
            eos_token_ids=tuple(eos_token_ids),
            bad_words_token_ids=tuple(tuple(word) for word in bad_words_token_ids),
            priority=priority,
            cache_salt=cache_salt,
        )
        _core.validate_sampling_params(request.core_params, self.vocab_size)
        self._scheduler.add_request(request)

    def abort(self, req_ids: Iterable[str]) -> None:
        """End requests in whatever state they are; the next step() returns an output "abort" for each.

        Unknown and finished ids are ignored.
        """
        self._aborted += self._scheduler.abort(req_ids)

    def has_request(self, req_id: str) -> bool:
        """Return whether a request is queued or runs."""
        return self._scheduler.has_request(req_id)

    def set_num_ready_tokens(self, num_tokens: Mapping[str, int]) -> None:
        """Hold requests at their first tokens, whose inputs exist; -1: let one run. Unknown ids are ignored."""
        self._scheduler.set_num_ready_tokens(num_tokens)

    def has_unfinished_requests(self) -> bool:
        """Return whether step() has something to run or to return."""
        return self._scheduler.has_unfinished_requests() or bool(self._aborted)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes. Return False, changing nothing, while requests run and may not be preempted."""
        return self._scheduler.reset_prefix_cache(preempt_running=preempt_running)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Run one step; return what is new, of the step before with async scheduling. Waits for at most one step.

        An exception of the runner fails the requests of the steps in flight, and the engine goes on.
        """
        outputs, self._aborted = self._aborted, []
        scheduler = self._scheduler
        step = scheduler.schedule()
        if step.total_num_scheduled_tokens:
            if self.on_schedule is not None:
                self.on_schedule(step)
            started = time.perf_counter()
            try:
                self.runner.execute_model(step)
                pending = self.runner.sample_tokens_async()
            except Exception as error:
                outputs += self._read_until(0)  # the steps before it are good
                return outputs + self._fail(error)
            ended = time.perf_counter()
            self._in_flight.append(_InFlight(step, pending, scheduler.steady, started))
            if not self._runs_ahead:
                self._observe(scheduler.steady, ended - started)
            outputs += self._read_until(1 if self.async_scheduling else 0)
        elif self._in_flight:
            outputs += self._read_until(0)
        elif (scheduler.num_running or scheduler.num_waiting) and not scheduler.holds_requests:
            # Cannot happen: whatever is queued fits an empty cache. A caller must not wait for ever if it does.
            outputs += scheduler.fail_stalled("the request cannot be scheduled although nothing else runs")
        if not scheduler.has_unfinished_requests():
            outputs += self._read_until(0)  # only rows of ended requests; leave nothing in flight
        return outputs

    def _read_until(self, num_in_flight: int) -> list[EngineOutput]:
        """Take the outputs of the oldest steps until so many are left in flight."""
        outputs: list[EngineOutput] = []
        while len(self._in_flight) > num_in_flight:
            flight = self._in_flight.popleft()
            try:
                output = flight.pending.get_output()
                if self._runs_ahead:
                    # The device took it up when it was there, and the step before had ended.
                    now = time.perf_counter()
                    self._observe(flight.steady, now - max(flight.started, self._last_read))
                    self._last_read = now
                outputs += self._scheduler.update(flight.step, output)
            except Exception as error:
                return outputs + self._fail(error)
        return outputs

    def _observe(self, steady: SteadyStep | None, seconds: float) -> None:
        if steady is not None:
            self._scheduler.drafts.observe_step(steady.num_requests, steady.num_drafts, seconds)

    def _fail(self, error: Exception) -> list[EngineOutput]:
        logger.error("a step failed; its requests end with an error, the engine goes on", exc_info=error)
        self._in_flight.clear()
        return self._scheduler.fail_in_flight(f"{type(error).__name__}: {error}")

    def stats(self) -> EngineStats:
        scheduler, cache = self._scheduler, self._cache
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_free_blocks=cache.num_free_blocks,
            num_total_blocks=cache.num_total_blocks,
            cache=cache.stats,
            drafts=scheduler.draft_stats,
        )
