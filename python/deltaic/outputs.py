"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural log probability of one token at one position, by the raw logits."""

    logprob: float
    rank: int | None = None  # 1: the likeliest
    decoded_token: str | None = None  # U+FFFD where the token holds only a part of a character
    token_bytes: bytes | None = None  # exactly the token's bytes


# Token id -> its log probability, at one position: the token that stands there and the likeliest ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt: all of it, or with DELTA what is new."""

    index: int  # which of the n
    text: str
    token_ids: list[int]  # a stop token is among them, though its text is not in `text`
    cumulative_logprob: float | None = None  # of all tokens so far; None unless logprobs were asked for
    logprobs: list[TokenLogprobs] | None = None  # one a token of token_ids
    finish_reason: str | None = None  # stop, length, abort or error; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for end-of-sequence
    error: str | None = None  # with finish_reason error: what went wrong

    @property
    def finished(self) -> bool:
        """Return whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of time.monotonic()."""

    arrival_time: float
    scheduled_time: float | None = None  # when the first of its steps was
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_generation_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Return the seconds from the arrival to the first token; None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tokens_per_second(self) -> float | None:
        """Return the rate after the first token; None before the second."""
        if self.first_token_time is None or self.last_token_time is None or self.num_generation_tokens < 2:
            return None
        seconds = self.last_token_time - self.first_token_time
        return (self.num_generation_tokens - 1) / seconds if seconds > 0 else None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions, by index."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one a prompt token, the first None
    num_cached_tokens: int | None = None  # prompt tokens that came from the prefix cache
    metrics: RequestMetrics | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """Return the text of the first completion."""
        return self.outputs[0].text if self.outputs else ""
