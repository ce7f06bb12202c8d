"""One request on its way through the scheduler, and what a step says about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from deltaic import _core

if TYPE_CHECKING:
    from deltaic.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(Enum):
    WAITING = "waiting"  # never ran
    RUNNING = "running"  # holds blocks and a row of the runner
    PREEMPTED = "preempted"  # ran, gave everything back, waits again
    FINISHED = "finished"


@dataclass(slots=True)  # not frozen: a step makes one for each request, and frozen costs four times as much
class EngineOutput:
    """What a step produced for one request."""

    req_id: str
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id that ended it; None for an end-of-sequence token
    logprobs: list[_core.TokenLogprobs] | None = None  # one a new token
    prompt_logprobs: list[_core.TokenLogprobs | None] | None = None  # once, complete: None, then one a prompt token
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    error: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what was generated for it. Only the scheduler changes it.

    Of the tokens in flight it knows the number, not the ids: token_ids holds what has been read back.
    """

    req_id: str
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    core_params: _core.SamplingParams
    max_total_tokens: int  # prompt and output at most
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    stop_token_ids: frozenset[int] = frozenset()
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    reads_prefix_cache: bool = True
    priority: int = 0  # the lowest number runs first
    cache_salt: str = ""

    status: RequestStatus = RequestStatus.WAITING
    arrival: int = 0  # order of add_request
    num_preemptions: int = 0
    num_computed_tokens: int = 0  # tokens whose K and V the scheduled steps have written, steps in flight included
    num_ready_tokens: int | None = None  # tokens whose inputs exist; None: all
    num_placeholders: int = 0  # sampled tokens in flight, as many as there can be: with all drafts
    num_sampling: int = 0  # steps in flight that sample
    num_sampling_steps: int = 0  # all that were scheduled
    draft_token_ids: list[int] = field(default_factory=list)  # behind token_ids, when nothing is in flight
    num_drafts_made: int = 0  # by the last step whose output was read
    num_drafts_coming: int = 0  # asked of the last step in flight
    num_prefill_tokens: int = 0  # tokens known at the last admission
    num_cached_tokens: int | None = None  # of the first admission
    snapshot_stops: tuple[int, ...] = ()  # ascending token counts at which the prefill pauses for a snapshot
    num_blocks: int = 0  # attention blocks held
    num_published_blocks: int = 0
    # Token counts of snapshots whose last token is in flight: of each, the first and the last sampling step that may
    # take it.
    reserved_snapshots: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_registered_tokens: int = 0  # of token_ids, those that the CacheManager has
    prompt_logprobs: list[_core.TokenLogprobs | None] | None = None  # gathered so far; None once delivered
    ending_token_ids: frozenset[int] = field(init=False)  # the two sets above together

    def __post_init__(self) -> None:
        self.ending_token_ids = self.eos_token_ids | self.stop_token_ids

    @classmethod
    def make(
        cls,
        req_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Take the token-level rules out of `params`. The prompt must be shorter than max_model_len."""
        num_prompt_tokens = len(prompt_token_ids)
        max_tokens = params.max_tokens if params.max_tokens is not None else max_model_len
        eos = () if params.ignore_eos else eos_token_ids
        wants_prompt_logprobs = params.prompt_logprobs is not None
        skip = params.skip_reading_prefix_cache
        return cls(
            req_id=req_id,
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            core_params=params.to_core(eos, bad_words_token_ids),
            max_total_tokens=min(num_prompt_tokens + max_tokens, max_model_len),
            min_tokens=params.min_tokens,
            eos_token_ids=frozenset(eos),
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            wants_logprobs=params.logprobs is not None,
            wants_prompt_logprobs=wants_prompt_logprobs,
            # A prefix hit skips positions whose logits prompt_logprobs needs.
            reads_prefix_cache=not (skip or wants_prompt_logprobs),
            priority=priority,
            cache_salt=cache_salt,
            prompt_logprobs=[None] if wants_prompt_logprobs else None,
        )

    @property
    def num_output_tokens(self) -> int:
        """Return the number of generated tokens that have been read back."""
        return len(self.token_ids) - self.num_prompt_tokens

    def preempt(self) -> None:
        """Forget all that was computed, which is given back; its tokens are kept."""
        self.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        self.num_sampling = 0
        self.draft_token_ids = []
        self.num_drafts_made = self.num_drafts_coming = 0
        self.num_blocks = 0
        self.num_published_blocks = 0
        self.reserved_snapshots.clear()
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def append(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """Append sampled tokens up to the first that ends the request; return them, finish and stop reason.

        The rules in order: nothing stops before min_tokens; end of sequence; a stop token id; the lengths. The
        context's end holds even before min_tokens.
        """
        known = self.token_ids
        for count, token_id in enumerate(token_ids, start=1):
            known.append(token_id)
            if token_id in self.ending_token_ids and len(known) - self.num_prompt_tokens >= self.min_tokens:
                return token_ids[:count], "stop", None if token_id in self.eos_token_ids else token_id
            if len(known) >= self.max_total_tokens:
                return token_ids[:count], "length", None
        return token_ids, None, None
