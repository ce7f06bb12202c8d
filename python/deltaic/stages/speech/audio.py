"""Samples on their way to the caller."""

from __future__ import annotations

import sys
import wave
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from deltaic.stages.model import FloatArray


class SilenceTrimmer:
    """Cuts the silence in front of an utterance down to a length; later pauses stay."""

    def __init__(self, max_samples: int, *, threshold: float = 1e-3) -> None:
        self._max_samples = max_samples
        self._threshold = threshold
        self._held = np.zeros(0, np.float32)
        self._has_begun = False

    @classmethod
    def of_seconds(cls, seconds: float, sample_rate: int) -> SilenceTrimmer:
        """Return one that leaves so many seconds, however many they are."""
        return cls(int(min(seconds * sample_rate, sys.maxsize)))

    def push(self, samples: FloatArray, *, is_last: bool) -> FloatArray:
        """Return what may leave of the samples so far."""
        if self._has_begun:
            return samples
        self._held = np.concatenate([self._held, samples])
        loud = np.flatnonzero(np.abs(self._held) > self._threshold)
        if len(loud):
            self._has_begun = True
            begin = max(0, int(loud[0]) - self._max_samples)
            return self._held[begin:]
        self._held = self._held[-self._max_samples :] if self._max_samples else self._held[:0]
        return self._held if is_last else self._held[:0]


class WavWriter:
    """Writes mono samples as 16-bit PCM, a piece at a time."""

    def __init__(self, target: str | Path | Any, sample_rate: int) -> None:
        # Opened here: where it cannot be opened, wave would complain of its half-made writer too.
        self._owned = open(target, "wb") if isinstance(target, (str, Path)) else None  # noqa: SIM115
        file: Any = target if self._owned is None else self._owned
        self._file = wave.open(file, "wb")  # noqa: SIM115
        self._file.setnchannels(1)
        self._file.setsampwidth(2)
        self._file.setframerate(sample_rate)

    def write(self, samples: FloatArray) -> None:
        self._file.writeframes(to_pcm16(samples))

    def close(self) -> None:
        self._file.close()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def to_pcm16(samples: FloatArray) -> bytes:
    """Return samples in [-1, 1] as little-endian 16-bit integers."""
    data: bytes = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
    return data
