"""What a caller asks of the tokens: how they are chosen, when they end, what is reported of them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from deltaic import _core

MAX_N = 16384
MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 0.01  # below it, logits / temperature overflows before it changes a choice
MAX_LOGIT_BIAS = 100.0
_INT32_MAX = 2**31 - 1
MAX_TOKENS = _INT32_MAX  # no context is longer
_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the core samples in float32
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class RequestOutputKind(Enum):
    """What the outputs of one request hold."""

    CUMULATIVE = 0  # everything so far, each time
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # one output, at the end


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Say how a request's tokens are chosen and when it ends.

    Every value is checked here, once: TypeError for a wrong type, ValueError for NaN, infinity or a number out of
    range, Unsupported for a field of another engine that deltaic does not have. What depends on a model (token ids
    against its vocabulary, logprobs against max_logprobs) is checked when a request is made of it.
    """

    n: int = 1  # completions of a prompt; greedy ones would all be the same, so n must be 1 then
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # > 0; 1: off
    temperature: float = 1.0  # 0: greedy, and top_p, top_k and min_p are reset; below 0.01 becomes 0.01; at most 2
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off; larger than the vocabulary: off; below 2^31, as all counts
    min_p: float = 0.0  # [0, 1]
    seed: int | None = None  # None or -1: fresh entropy
    stop: str | Sequence[str] | None = None  # becomes a list; text, reasoning too, ends before the first completed
    stop_token_ids: Sequence[int] | None = None  # becomes a list
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context
    min_tokens: int = 0  # no stop of any kind within so many output tokens
    logprobs: int | None = None  # so many of the best at each output token, and the chosen one; -1: all
    prompt_logprobs: int | None = None  # the same for prompt tokens
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # accepted; byte-level tokenizers put no spaces between tokens
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None  # token id -> bias, clamped to [-100, 100]
    allowed_token_ids: Sequence[int] | None = None  # None: all
    bad_words: Sequence[str] | None = None  # becomes a list; words whose last token is never chosen
    skip_reading_prefix_cache: bool | None = None  # None: only when prompt_logprobs needs every position computed
    extra_args: Mapping[str, Any] | None = None  # kept as they are, for the caller's own use
    # Of other engines; anything but None is refused by name.
    structured_outputs: Any = field(default=None, repr=False)
    thinking_token_budget: Any = field(default=None, repr=False)
    repetition_detection: Any = field(default=None, repr=False)
    logprob_token_ids: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("structured_outputs", "thinking_token_budget", "repetition_detection", "logprob_token_ids"):
            if getattr(self, name) is not None:
                raise _core.Unsupported(f"{name} is not supported by this version of deltaic; leave it out")
        self._check_sampling()
        self._check_ends()
        self._check_output()

    def _check_sampling(self) -> None:
        self._set("n", _int("n", self.n, 1, MAX_N))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _float(name, getattr(self, name), "[-2, 2]", lambda x: -2 <= x <= 2))
        self._set(
            "repetition_penalty",
            _float(
                "repetition_penalty",
                self.repetition_penalty,
                "(0, inf) of float32",
                lambda x: _FLOAT32_MIN <= x <= _FLOAT32_MAX,
            ),
        )
        temperature = _float(
            "temperature", self.temperature, f"[0, {MAX_TEMPERATURE:g}]", lambda x: 0 <= x <= MAX_TEMPERATURE
        )
        self._set("temperature", max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0)
        top_p = _float("top_p", self.top_p, "(0, 1]", lambda x: 0 < x <= 1)
        self._set("top_p", max(top_p, _FLOAT32_MIN))  # any so small keeps the likeliest token alone
        self._set("top_k", max(_int("top_k", self.top_k, -1, _INT32_MAX), 0))
        self._set("min_p", _float("min_p", self.min_p, "[0, 1]", lambda x: 0 <= x <= 1))
        if self.seed is not None:
            seed = _int("seed", self.seed, _INT64_MIN, _INT64_MAX)
            self._set("seed", None if seed == -1 else seed)
        if self.is_greedy:
            if self.n > 1:
                raise ValueError(f"n must be 1 with temperature 0, where all completions are the same, got {self.n}")
            self._set("top_p", 1.0)
            self._set("top_k", 0)
            self._set("min_p", 0.0)
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids must hold at least 1 token id, got 0 (None allows all)")
            self._set("allowed_token_ids", allowed)
        self._set("bad_words", _strings("bad_words", self.bad_words))

    def _check_ends(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self._set("stop", _strings("stop", stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or []))
        _bool("ignore_eos", self.ignore_eos)
        if self.max_tokens is not None:
            self._set("max_tokens", _int("max_tokens", self.max_tokens, 1, MAX_TOKENS))
        self._set("min_tokens", _int("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}")
        _bool("detokenize", self.detokenize)
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize = True, got detokenize = False: use stop_token_ids instead")

    def _check_output(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _int(name, getattr(self, name), -1, _INT32_MAX))
        for name in ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"):
            _bool(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            _bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {_show(self.output_kind)}")
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise TypeError(f"extra_args must be a dict or None, got {_show(self.extra_args)}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is always chosen."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> list[str]:
        """Return `stop` as a list."""
        return [] if self.stop is None else list(self.stop)

    @classmethod
    def from_optional(cls, defaults: Mapping[str, Any] | None = None, **given: Any) -> SamplingParams:
        """Make parameters of what was given, then of `defaults`, then of the class; None means not given.

        TypeError names a keyword that is no field.
        """
        names = {f.name for f in fields(cls)}
        for name in (*given, *(defaults or {})):
            if name not in names:
                raise TypeError(f"SamplingParams has no field {name!r}")
        values = dict(defaults or {})
        values.update({name: value for name, value in given.items() if value is not None})
        return cls(**values)

    def to_core(
        self, eos_token_ids: Iterable[int] = (), bad_words_token_ids: Iterable[Sequence[int]] = ()
    ) -> _core.SamplingParams:
        """Return the part that the core samples by.

        `eos_token_ids` are the model's: with the request's own stop ids they are masked until min_tokens.
        `bad_words_token_ids` are what the tokenizer makes of bad_words.
        """
        return _core.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logit_bias=dict(self.logit_bias or {}),
            allowed_token_ids=list(self.allowed_token_ids or []),
            bad_words=[list(word) for word in bad_words_token_ids],
            min_tokens=self.min_tokens,
            stop_token_ids=sorted({*eos_token_ids, *(self.stop_token_ids or [])}),
        )


def _show(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _int(name: str, value: object, low: int, high: int) -> int:
    wanted = f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {wanted}, got {_show(value)}")
    number = int(value)
    if not low <= number <= high:
        # Python refuses to write very long numbers.
        shown = str(number) if number.bit_length() <= 256 else f"one of {number.bit_length()} bits"
        raise ValueError(f"{name} must be {wanted}, got {shown}")
    return number


def _float(name: str, value: object, interval: str, accepts: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number in {interval}, got {_show(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not accepts(number):
        raise ValueError(f"{name} must be a finite number in {interval}, got {number:g}")
    return number


def _bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_show(value)}")


def _items(name: str, of: str, values: object) -> list[Any]:
    """Return a copy as a list; a string or a mapping is no list of anything."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {of}, got {_show(values)}")
    return list(values)


def _strings(name: str, values: object) -> list[str]:
    strings = _items(name, "strings", values if values is not None else [])
    for i, value in enumerate(strings):
        if not isinstance(value, str):
            raise TypeError(f"{name}[{i}] must be a string, got {_show(value)}")
        if not value:
            raise ValueError(f"{name}[{i}] must not be empty, got ''")
    return strings


def _token_ids(name: str, values: object) -> list[int]:
    return [_int(f"{name}[{i}]", value, 0, _INT32_MAX) for i, value in enumerate(_items(name, "token ids", values))]


def _logit_bias(values: object) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise TypeError(f"logit_bias must be a dict from token id to bias, got {_show(values)}")
    bias = {}
    for key, value in values.items():
        token_id = _int("logit_bias key", key, 0, _INT32_MAX)
        number = _float(f"logit_bias[{token_id}]", value, "[-100, 100]", lambda _: True)
        bias[token_id] = min(max(number, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
    return bias
