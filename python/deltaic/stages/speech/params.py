"""What a caller may ask of an utterance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from deltaic import _core
from deltaic.sampling_params import SamplingParams
from deltaic.stages.speech.prompt import Voice


@dataclass(frozen=True, slots=True)
class SpeechParams:
    """How an utterance is made. Raises ValueError naming the field and the number.

    The same seed gives the same codes and samples, alone, in any batch and in any chunks; without one each utterance
    is drawn anew.
    """

    voice: Voice = field(default_factory=Voice)
    language: str = "auto"
    instruct: str = ""
    whole_text_first: bool = False  # all text in the prompt, instead of a token a frame
    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    min_frames: int = 2
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

    def with_fields(self, **fields: Any) -> SpeechParams:
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
        return _core.CodeSampling(
            do_sample=self.codes_do_sample,
            temperature=self.codes_temperature,
            top_k=self.codes_top_k,
            top_p=self.codes_top_p,
        )
