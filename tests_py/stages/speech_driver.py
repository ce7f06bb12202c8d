"""Running utterances of a pipeline to their end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from deltaic.stages.speech import AudioChunk, SpeechParams, SpeechPipeline

TEXT = "Once upon a time there was a little dog who liked to run"


class Clock:
    """Tells the time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Spoken:
    """What came of an utterance."""

    chunks: list[AudioChunk] = field(default_factory=list)
    codes: list[Any] = field(default_factory=list)

    @property
    def samples(self) -> Any:
        return np.concatenate([chunk.samples for chunk in self.chunks])

    @property
    def frames(self) -> list[list[int]]:
        return [frame for part in self.codes for frame in part.tolist()]

    @property
    def final(self) -> AudioChunk:
        (final,) = [chunk for chunk in self.chunks if chunk.is_final]
        assert self.chunks[-1] is final
        return final


def make_pipeline(folder: Path, **options: Any) -> SpeechPipeline:
    sizes = {"max_num_seqs": 8, "max_frames": 96, "max_prompt_len": 160, "num_threads": 2, "poison_caches": True}
    return SpeechPipeline(folder, **(sizes | options))


def params(num_frames: int = 30, **fields: Any) -> SpeechParams:
    """Return parameters of an utterance of a known length."""
    lengths = {"min_frames": num_frames, "max_frames": num_frames}
    return SpeechParams(**(lengths | {"seed": 7, "max_text_tokens": 10} | fields))


def run(pipeline: SpeechPipeline, spoken: dict[str, Spoken] | None = None, max_steps: int = 2000) -> dict[str, Spoken]:
    """Step until nothing is left; return what came, by request."""
    spoken = {} if spoken is None else spoken

    def on_codes(request_id: str, codes: Any) -> None:
        spoken.setdefault(request_id, Spoken()).codes.append(codes)

    pipeline.on_codes = on_codes
    for _ in range(max_steps):
        if not pipeline.has_unfinished_requests():
            return spoken
        for chunk in pipeline.step():
            spoken.setdefault(chunk.request_id, Spoken()).chunks.append(chunk)
    raise AssertionError(f"not done after {max_steps} steps")


def speak(
    pipeline: SpeechPipeline, requests: Mapping[str, SpeechParams] | None = None, text: str = TEXT
) -> dict[str, Spoken]:
    for request_id, one in (requests or {"a": params()}).items():
        pipeline.add(request_id, text, one)
    return run(pipeline)


def same(one: Spoken, other: Spoken) -> bool:
    """Return whether two utterances have the same codes and, bit for bit, the same samples."""
    return one.frames == other.frames and np.array_equal(one.samples, other.samples)
