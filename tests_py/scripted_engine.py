"""An engine that says what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from deltaic import _core
from deltaic.draft_stats import DraftStats
from deltaic.engine import EngineStats
from deltaic.request import EngineOutput
from deltaic.sampling_params import SamplingParams


@dataclass
class Running:
    prompt_token_ids: list[int]
    params: SamplingParams
    options: dict[str, Any]
    tokens: list[int]  # still to be said
    num_said: int = 0


@dataclass
class ScriptedEngine:
    """Say `script(req_id, prompt_token_ids)`, `step_size` tokens a step, ending as a real engine would."""

    script: Callable[[str, list[int]], Sequence[int]]
    step_size: int = 1
    vocab_size: int = 4096
    max_model_len: int = 4096
    max_num_seqs: int = 8
    failing: dict[str, str] = field(default_factory=dict)  # req_id -> error of its first step
    on_step: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.running: dict[str, Running] = {}
        self.seen: dict[str, Running] = {}  # all requests there ever were
        self.aborted: list[str] = []
        self.num_steps = 0

    @property
    def scheduler_config(self) -> SimpleNamespace:
        return SimpleNamespace(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            block_size=16,
            mamba_block_size=64,
            enable_prefix_caching=True,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            num_preemptions=0,
            num_prompt_tokens=sum(len(request.prompt_token_ids) for request in self.seen.values()),
            num_generated_tokens=sum(request.num_said for request in self.seen.values()),
            num_free_blocks=99 - len(self.running),
            num_total_blocks=99,
            cache=_core.CacheStats(),
            drafts=DraftStats(0),
        )

    def add_request(
        self, req_id: str, prompt_token_ids: Sequence[int], sampling_params: SamplingParams, **options: Any
    ) -> None:
        assert req_id not in self.seen
        tokens = list(self.script(req_id, list(prompt_token_ids)))
        self.running[req_id] = Running(list(prompt_token_ids), sampling_params, options, tokens)
        self.seen[req_id] = self.running[req_id]

    def abort(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            if self.running.pop(req_id, None) is not None:
                self.aborted.append(req_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[EngineOutput]:
        assert self.running, "a step with nothing to do never ends"
        self.num_steps += 1
        self.on_step()
        outputs = [self._advance(req_id, request) for req_id, request in self.running.items()]
        for output in outputs:
            if output.finish_reason is not None:
                del self.running[output.req_id]
        return outputs

    def _advance(self, req_id: str, request: Running) -> EngineOutput:
        if req_id in self.failing:
            return EngineOutput(req_id, finish_reason="error", error=self.failing[req_id])
        params = request.params
        new, finish_reason, stop_reason = [], None, None
        while request.tokens and len(new) < self.step_size and finish_reason is None:
            token = request.tokens.pop(0)
            new.append(token)
            num_said = request.num_said + len(new)
            if num_said >= params.min_tokens:
                if token in request.options["eos_token_ids"] and not params.ignore_eos:
                    finish_reason = "stop"
                elif token in (params.stop_token_ids or ()):
                    finish_reason, stop_reason = "stop", token
            if finish_reason is None and num_said == params.max_tokens:
                finish_reason = "length"
        if not request.tokens and finish_reason is None:
            finish_reason = "length"
        first = request.num_said == 0
        request.num_said += len(new)
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(logprobs(token) for token in request.prompt_token_ids[1:])]
        return EngineOutput(
            req_id,
            new_token_ids=new,
            finish_reason=finish_reason,  # type: ignore[arg-type]
            stop_reason=stop_reason,
            logprobs=None if params.logprobs is None else [logprobs(token) for token in new],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=3,
        )


def logprobs(token: int) -> _core.TokenLogprobs:
    """Say that the token is the second best, after the one before it, and ahead of the one behind it."""
    return _core.TokenLogprobs(
        token_ids=[token, token - 1, token, token + 1], logprobs=[-2.0, -1.0, -2.0, -3.0], rank=2
    )
