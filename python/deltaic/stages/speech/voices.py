"""References to clone: prepared once for the same content, whatever they are called."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

from deltaic import _core
from deltaic.stages.model import IntArray


class ReferenceCache:
    """The state of a decoder that has just decoded a reference's codes, by their content."""

    def __init__(self, codec: _core.CodecDecoder, *, capacity: int = 16) -> None:
        self._codec = codec
        self._capacity = capacity
        self._streams: OrderedDict[str, _core.CodecStream] = OrderedDict()
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._streams)

    def start(self, codes: IntArray | None) -> _core.CodecStream:
        """Return a stream that goes on behind the reference; a fresh one without a reference."""
        if codes is None:
            return self._codec.start()
        codes = np.ascontiguousarray(codes, np.int32)
        key = hashlib.sha256(repr(codes.shape).encode() + codes.tobytes()).hexdigest()
        if key in self._streams:
            self.num_hits += 1
            self._streams.move_to_end(key)
        else:
            stream = self._codec.start()
            self._codec.decode(stream, codes)
            self._streams[key] = stream
            if len(self._streams) > self._capacity:
                self._streams.popitem(last=False)
        return self._streams[key].copy()
