"""The rows that a talker is prompted with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaic import _core
from deltaic.stages.model import FloatArray
from deltaic.stages.speech.config import SpeechConfig

NUM_ROLE_TOKENS = 3  # of Qwen's chat template, before the text
NUM_END_TOKENS = 5  # behind it


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a talker's request begins with: rows [n, hidden_size]."""

    rows: FloatArray
    text: FloatArray  # a row a frame
    pad: FloatArray  # [hidden_size]: of frames behind the text


@dataclass(frozen=True, slots=True)
class Voice:
    """Who speaks: a speaker of the checkpoint, or a reference to clone.

    A reference is an x-vector [hidden_size], the codes [n, num_codebooks] of what it says, or both; its codes need
    their text.
    """

    speaker: str | None = None
    x_vector: Any = None
    codes: Any = None
    text_ids: Sequence[int] = ()


class PromptBuilder:
    """Builds the prompts of one talker. ValueError names what the checkpoint does not have."""

    def __init__(self, config: SpeechConfig, talker: _core.Talker) -> None:
        self._config = config
        self._talker = talker

    def of_text(
        self,
        role_ids: Sequence[int],
        text_ids: Sequence[int],
        voice: Voice,
        *,
        language: str = "auto",
        instruct_ids: Sequence[int] = (),
        whole_text_first: bool = False,
    ) -> Prompt:
        """Return the prompt of a text behind the tokens of the role that speaks it.

        whole_text_first puts all text before the first frame instead of a row a frame.
        """
        text_ids = list(text_ids)
        if not text_ids:
            raise ValueError("the text to speak is empty")
        ids = self._config.ids
        bos, eos, pad = self._text([ids.tts_bos, ids.tts_eos, ids.tts_pad])
        speaker = self._speaker_row(voice)
        codec = self._codec(self._think_ids(language, voice.speaker))
        parts = [codec] if speaker is None else [codec, speaker]
        prefix = np.concatenate([*parts, self._codec([ids.codec_pad, ids.codec_bos])])
        beside = np.concatenate([np.repeat(pad[None], len(prefix) - 2, axis=0), bos[None]])
        rows = [self._text(list(instruct_ids))] if instruct_ids else []
        rows += [self._text(list(role_ids)), beside + prefix[:-1]]
        if voice.codes is not None:
            spoken, text = self._clone(voice, text_ids, eos, pad, whole_text_first)
        elif whole_text_first:
            text_rows = np.concatenate([self._text(text_ids), eos[None]])
            spoken = np.concatenate([text_rows + self._codec([ids.codec_pad]), pad[None] + prefix[-1:]])
            text = np.zeros((0, len(pad)), np.float32)
        else:
            text_rows = self._text(text_ids)
            spoken = text_rows[:1] + prefix[-1:]
            text = np.concatenate([text_rows[1:], eos[None]])
        return Prompt(np.concatenate([*rows, spoken]), text, pad)

    def of_thinker(
        self, prompt_rows: FloatArray, first_text: FloatArray, speaker: str | None, bos: Any, pad: Any
    ) -> Any:
        """Return the prompt rows for an answer that a thinker writes.

        prompt_rows are the projected rows of the user's turns, first_text those of the answer's 3 role tokens and its
        first token.
        """
        ids = self._config.ids
        text = np.concatenate([first_text[:3], np.repeat(pad[None], 4, axis=0), bos[None], first_text[3:4]])
        speaker_id = ids.codec_pad if speaker is None else self._speaker_id(speaker)
        codec = self._codec(
            [ids.codec_nothink, ids.codec_think_bos, ids.codec_think_eos, speaker_id, ids.codec_pad, ids.codec_bos]
        )
        text[NUM_ROLE_TOKENS:] += codec
        return np.concatenate([prompt_rows, text])

    def check_speaker(self, speaker: str | None) -> None:
        if speaker is not None:
            self._speaker_id(speaker)

    def special_rows(self) -> FloatArray:
        """Return the rows of tts_bos, tts_eos and tts_pad."""
        ids = self._config.ids
        return self._text([ids.tts_bos, ids.tts_eos, ids.tts_pad])

    def _clone(self, voice: Voice, text_ids: list[int], eos: Any, pad: Any, whole_text_first: bool) -> tuple[Any, Any]:
        """Return the rows of a reference and its text, and the rows of text that are left for frames."""
        if not voice.text_ids:
            raise ValueError("a reference with codes needs the text that it says")
        ids = self._config.ids
        text = np.concatenate([self._text([*voice.text_ids, *text_ids]), eos[None]])
        codes = _integers("reference codes", voice.codes)
        if codes.ndim != 2 or codes.shape[1] != self._config.num_codebooks:
            raise ValueError(f"reference codes are {codes.shape}, wanted [frames, {self._config.num_codebooks}]")
        codec = np.concatenate([self._codec([ids.codec_bos]), self._talker.frame_rows(codes)])
        empty = np.zeros((0, len(pad)), np.float32)
        if whole_text_first:
            return np.concatenate([text + self._codec([ids.codec_pad]), codec + pad]), empty
        if len(text) > len(codec):
            return text[: len(codec)] + codec, text[len(codec) :]
        filled = np.concatenate([text, np.repeat(pad[None], len(codec) - len(text), axis=0)])
        return filled + codec, empty

    def _think_ids(self, language: str, speaker: str | None) -> list[int]:
        ids, languages = self._config.ids, self._config.languages
        name = language.lower()
        dialect = self._config.dialects.get((speaker or "").lower())
        if name in ("auto", "chinese") and dialect:
            name = dialect
        if name == "auto":
            return [ids.codec_nothink, ids.codec_think_bos, ids.codec_think_eos]
        if name not in languages:
            known = ", ".join(sorted(languages)) or "none"
            raise ValueError(f"language: the checkpoint does not speak {language!r}; it has auto, {known}")
        return [ids.codec_think, ids.codec_think_bos, languages[name], ids.codec_think_eos]

    def _speaker_row(self, voice: Voice) -> Any:
        if voice.x_vector is not None:
            row = np.asarray(voice.x_vector, np.float32).reshape(1, -1)
            if row.shape[1] != self._config.talker.hidden_size:
                raise ValueError(f"the x-vector has {row.shape[1]} values, wanted {self._config.talker.hidden_size}")
            return row
        return None if voice.speaker is None else self._codec([self._speaker_id(voice.speaker)])

    def _speaker_id(self, speaker: str) -> int:
        speakers = self._config.speakers
        if speaker.lower() not in speakers:
            known = ", ".join(sorted(speakers)) or "none"
            raise ValueError(f"voice.speaker: there is no speaker {speaker!r}; the checkpoint has {known}")
        return speakers[speaker.lower()]

    def _text(self, ids: list[int]) -> FloatArray:
        rows: FloatArray = self._talker.text_rows(_integers("token ids", ids))
        return rows

    def _codec(self, ids: list[int]) -> FloatArray:
        rows: FloatArray = self._talker.codec_rows(np.asarray(ids, np.int32))
        return rows


def _integers(what: str, values: Any) -> npt.NDArray[np.int32]:
    """Return values as int32. ValueError where a cast would change one."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers, got {array.dtype}")
    limit = np.iinfo(np.int32).max
    if array.size and (array.min() < -limit or array.max() > limit):
        raise ValueError(f"{what} must be below 2^31, got {array.min()} to {array.max()}")
    return array.astype(np.int32)
