"""What a caller may ask of an utterance."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field, replace
from typing import Any

from deltaic import _core
from deltaic.sampling_params import SamplingParams
from deltaic.stages.speech.prompt import Voice


def _check_number(name: str, value: object, *, is_int: bool = False) -> None:
    kind = numbers.Integral if is_int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name} must be {'an integer' if is_int else 'a number'}, got {value!r:.60}")
    if not is_int and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


@dataclass(frozen=True, slots=True)
class SpeechParams:
    """How an utterance is made. Raises ValueError naming the field and the number.

    The same seed gives the same codes and samples, alone, in any batch and in any chunks; without one each utterance
    is drawn anew. A frame is 1 / SpeechConfig.frames_per_second seconds of sound.
    """

    voice: Voice = field(default_factory=Voice)
    language: str = "auto"  # or one of SpeechConfig.languages
    instruct: str = ""  # how to speak, in words
    whole_text_first: bool = False  # all text in the prompt, instead of a token a frame
    do_sample: bool = True  # the first code of a frame; False: the likeliest
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    min_frames: int = 2  # no end before
    max_frames: int = 4096
    codes_do_sample: bool = True  # the residual codes
    codes_temperature: float = 0.9
    codes_top_k: int = 50
    codes_top_p: float = 1.0
    seed: int | None = None  # -1: none, as in SamplingParams
    max_leading_silence_s: float | None = None  # None: what the model gives
    timeout_s: float | None = None  # None: that of the pipeline
    max_text_tokens: int = 256  # of an answer that a thinker writes
    wants_sound: bool = True  # False: the thinker's text alone, the stages behind it are left out

    def __post_init__(self) -> None:
        for name in ("max_frames", "min_frames", "top_k", "codes_top_k", "max_text_tokens", "seed"):
            if getattr(self, name) is not None or name != "seed":
                _check_number(name, getattr(self, name), is_int=True)
        for name in ("temperature", "top_p", "repetition_penalty", "codes_temperature", "codes_top_p"):
            _check_number(name, getattr(self, name))
        for name in ("max_leading_silence_s", "timeout_s"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name))
        for name in ("language", "instruct"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r:.60}")
        if not isinstance(self.voice, Voice):
            raise ValueError(f"voice must be a Voice, got {self.voice!r:.60}")
        if not self.max_frames >= 1:
            raise ValueError(f"max_frames must be at least 1, got {self.max_frames}")
        if not 0 <= self.min_frames <= self.max_frames:
            raise ValueError(f"min_frames must be in [0, {self.max_frames}], got {self.min_frames}")
        if self.max_leading_silence_s is not None and self.max_leading_silence_s < 0:
            raise ValueError(f"max_leading_silence_s must be at least 0, got {self.max_leading_silence_s}")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")
        if self.max_text_tokens < 1:
            raise ValueError(f"max_text_tokens must be at least 1, got {self.max_text_tokens}")
        if not 0 <= self.codes_top_k < 1 << 31:
            raise ValueError(f"codes_top_k must be in [0, 2^31), got {self.codes_top_k}")
        if not self.codes_temperature > 0:
            raise ValueError(f"codes_temperature must be above 0, got {self.codes_temperature}")
        if not 0 < self.codes_top_p <= 1:
            raise ValueError(f"codes_top_p must be in (0, 1], got {self.codes_top_p}")
        self.talker_params(codebook_size=1, eos_id=1)  # refuses the others

    def check_thinker_knows(self) -> None:
        """Raise ValueError for what only text that is spoken as it is can have: of an answer a speaker is all."""
        voice = self.voice
        given = {
            "language": self.language != "auto",
            "instruct": bool(self.instruct),
            "whole_text_first": self.whole_text_first,
            "voice.x_vector": voice.x_vector is not None,
            "voice.codes": voice.codes is not None,
            "voice.text_ids": len(voice.text_ids) > 0,
        }
        for name, is_given in given.items():
            if is_given:
                raise ValueError(f"{name} is given, but a pipeline with a thinker takes a speaker alone")

    def with_fields(self, **fields: Any) -> SpeechParams:
        """Return the same with some fields changed."""
        return replace(self, **fields)

    def talker_params(self, codebook_size: int, eos_id: int) -> SamplingParams:
        """Return how the first code of a frame is chosen: a code or the end, nothing else."""
        return SamplingParams(
            temperature=self.temperature if self.do_sample else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            allowed_token_ids=[*range(codebook_size), eos_id],
            stop_token_ids=[eos_id],
            ignore_eos=True,
            min_tokens=self.min_frames,
            max_tokens=self.max_frames,
            seed=self.seed,
        )

    def code_sampling(self) -> _core.CodeSampling:
        """Return how the residual codes of a frame are chosen."""
        return _core.CodeSampling(
            do_sample=self.codes_do_sample,
            temperature=self.codes_temperature,
            top_k=self.codes_top_k,
            top_p=self.codes_top_p,
        )
