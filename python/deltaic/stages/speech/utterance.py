"""One utterance on its way through the stages, and what the caller gets of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltaic import _core
from deltaic.detokenizer import IncrementalDecoder
from deltaic.stages.graph import Chunked, Edge, Full, Stage, StageGraph
from deltaic.stages.model import FloatArray
from deltaic.stages.payload import Key
from deltaic.stages.speech.audio import SilenceTrimmer
from deltaic.stages.speech.params import SpeechParams

TEXT: Key = ("hidden", "text")
CODES: Key = ("codes", "audio")
DEFAULT_CHUNK = Chunked(first=4, size=25)
AudioFinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(slots=True)  # not frozen: a step makes one for each request that writes, and frozen costs four times as much
class AudioChunk:
    """What is new of an utterance: samples, f32 in [-1, 1] at SpeechConfig.sample_rate, or text that the thinker wrote.

    Exactly one is final, the last; it may hold neither.

    finish_reason "length" says that max_frames was reached before the talker ended by itself.
    """

    request_id: str
    samples: FloatArray
    is_final: bool = False
    finish_reason: AudioFinishReason | None = None
    error: str | None = None
    num_frames: int = 0  # decoded so far
    text: str = ""
    token_ids: tuple[int, ...] = ()  # of the text


@dataclass(slots=True)
class Utterance:
    """One request on its way through the stages."""

    request_id: str
    key: str  # in the stages: an id that comes again is another request there
    params: SpeechParams
    expires_at: float
    stream: _core.CodecStream
    trimmer: SilenceTrimmer | None
    num_frames_decoded: int = 0
    finish_reason: AudioFinishReason | None = None
    text: IncrementalDecoder | None = None  # of what the thinker writes; none without a tokenizer
    num_prompt_tokens: int = 0  # of the thinker
    is_talking: bool = False  # has begun in the talker
    is_text_complete: bool = False  # the talker has all of its text


def speech_graph(*, has_thinker: bool, chunk: Chunked | Full) -> StageGraph:
    """Return the stages of a pipeline that speaks."""
    talker_inputs = (TEXT,) if has_thinker else ()
    stages = [
        Stage("talker", inputs=talker_inputs, outputs=(CODES,), has_sound=True),
        Stage("code2wav", inputs=(CODES,), answers_client=True, has_sound=True),
    ]
    edges = [Edge("talker", "code2wav", (CODES,), chunk)]
    if has_thinker:
        stages.insert(0, Stage("thinker", outputs=(TEXT,), answers_client=True))
        text_mode = Full() if isinstance(chunk, Full) else Chunked(first=1, size=1)
        edges.insert(0, Edge("thinker", "talker", (TEXT,), text_mode))
    return StageGraph(stages, edges)
