"""What a caller hands in, checked against the model, to what an engine takes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from deltaic.engine_config import check_integer
from deltaic.sampling_params import SamplingParams
from deltaic.tokenizer import Tokenizer

_INT63_MASK = 2**63 - 1
_LONG_TEXT_CHARS = 100_000


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


Prompt = str | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class EngineInput:
    """One prompt, ready to be added to an engine; its n completions are n requests there."""

    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    def completion_params(self, index: int) -> SamplingParams:
        """Return the parameters of completion `index`: seeds differ, and only the first reports the prompt."""
        params = self.sampling_params
        if index == 0:
            return params
        seed = None if params.seed is None else (params.seed + index) & _INT63_MASK
        return dataclasses.replace(params, seed=seed, prompt_logprobs=None)


class InputProcessor:
    """Check prompts and parameters against one model; every error is one line that names the field and the numbers."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int = 20,
        seed: int | None = None,
    ) -> None:
        """Take the model's sizes; max_logprobs -1 means no limit, `seed` makes unseeded requests repeatable."""
        check_integer("max_logprobs", max_logprobs, -1)
        if seed is not None:
            check_integer("seed", seed)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        self._seeds = None if seed is None else random.Random(seed)

    def process(self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True) -> EngineInput:
        """Return the request; ValueError or TypeError says what is wrong with it."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        text, token_ids = self._tokenize(prompt, add_special_tokens)
        self._check_length(token_ids)
        self._check_params(params)
        bad_words: list[list[int]] = []
        if params.bad_words:
            bad_words = self._need_tokenizer("bad_words").bad_words_token_ids(params.bad_words)
        if self._seeds is not None and params.seed is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(63))
        return EngineInput(text, token_ids, params, tuple(tuple(word) for word in bad_words))

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, add_special_tokens)
        if isinstance(prompt, Mapping):
            fields: Mapping[str, Any] = prompt
            unknown = sorted(set(fields) - {"prompt", "prompt_token_ids"})
            if unknown:
                raise TypeError(f"a prompt has the fields prompt or prompt_token_ids, got {unknown[0]!r}")
            if "prompt_token_ids" in fields:
                text = fields.get("prompt")
                if text is not None and not isinstance(text, str):
                    raise TypeError(f"prompt must be a string, got {type(text).__name__}")
                return text, self._check_token_ids(fields["prompt_token_ids"])
            if isinstance(fields.get("prompt"), str):
                return fields["prompt"], self._encode(fields["prompt"], add_special_tokens)
        raise TypeError(
            f"a prompt must be a string or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}"
            f"{'' if not isinstance(prompt, Mapping) else ' without either'}"
        )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._need_tokenizer("a prompt as text")
        self.check_text(text)
        token_ids = tokenizer.encode(text, add_special_tokens)
        # The tokenizer may know tokens for which a cut-down model has no row.
        return self._check_token_ids(token_ids)

    def check_text(self, text: str) -> None:
        """Raise ValueError for a text far too long for the model, before it costs seconds and memory."""
        if len(text) > _LONG_TEXT_CHARS:
            num_tokens = self._need_tokenizer("a text").min_num_tokens(text)
            if num_tokens >= self._max_model_len:
                raise self._too_long(f"at least {num_tokens}")

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and the model has no tokenizer.json: use token ids")
        return self._tokenizer

    def _check_token_ids(self, token_ids: object) -> list[int]:
        if isinstance(token_ids, (str, bytes, Mapping)) or not hasattr(token_ids, "__iter__"):
            raise TypeError(f"prompt_token_ids must be a list of token ids, got {type(token_ids).__name__}")
        if isinstance(token_ids, list):
            self._check_length(token_ids)
        checked = []
        for i, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
                raise TypeError(f"prompt_token_ids[{i}] must be an integer, got {token_id!r:.60}")
            self.check_token_id(f"prompt_token_ids[{i}]", int(token_id))
            checked.append(int(token_id))
        return checked

    def check_token_id(self, name: str, token_id: int) -> None:
        """Raise ValueError, naming the field, for an id outside the model's vocabulary."""
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"{name} must be in [0, vocab_size = {self._vocab_size}), got {token_id}")

    def _check_length(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("the prompt must hold at least 1 token, got 0")
        if len(token_ids) >= self._max_model_len:
            raise self._too_long(str(len(token_ids)))

    def _too_long(self, num_tokens: str) -> ValueError:
        return ValueError(
            f"the prompt has {num_tokens} tokens, and max_model_len = {self._max_model_len} has room for "
            f"{self._max_model_len - 1}: shorten the prompt or raise max_model_len"
        )

    def _check_params(self, params: SamplingParams) -> None:
        for i, token_id in enumerate(params.stop_token_ids or ()):
            self.check_token_id(f"stop_token_ids[{i}]", token_id)
        for i, token_id in enumerate(params.allowed_token_ids or ()):
            self.check_token_id(f"allowed_token_ids[{i}]", token_id)
        for token_id in params.logit_bias or ():
            self.check_token_id("logit_bias key", token_id)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and (self._vocab_size if wanted == -1 else wanted) > self.max_logprobs:
                asked = f"-1, the whole vocabulary of {self._vocab_size}" if wanted == -1 else str(wanted)
                raise ValueError(f"{name} must be at most max_logprobs = {self.max_logprobs}, got {asked}")
        if params.stop_strings and self._tokenizer is None:
            self._need_tokenizer("stop")
