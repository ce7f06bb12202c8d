"""Random streams of requests. A number depends on the seed, the frame and the codebook alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class RngStream:
    """The random numbers of one seeded request."""

    seed: int
    frame: int = 0  # that the next call of the predictor draws for

    def uniform(self, codebook: int, count: int) -> npt.NDArray[np.float64]:
        """Return `count` numbers in [0, 1) of one codebook of this frame; the same whenever asked."""
        bits = np.random.Philox(key=self.seed % 2**64, counter=[0, 0, codebook, self.frame])
        return np.random.Generator(bits).random(count)


class RngStreams:
    """One stream a seeded request, kept until the request is gone."""

    def __init__(self) -> None:
        self._streams: dict[str, RngStream] = {}

    def get(self, req_id: str, seed: int | None) -> RngStream | None:
        """Return a request's stream, always the same object; None without a seed of its own."""
        if seed is None:
            return None
        return self._streams.setdefault(req_id, RngStream(seed))

    def remove(self, req_id: str) -> None:
        self._streams.pop(req_id, None)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._streams
