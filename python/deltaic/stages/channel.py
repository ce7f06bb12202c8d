"""Ordered, bounded queues between stages: data, then exactly one end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

EndStatus = Literal["ok", "error", "cancelled"]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class End:
    """The last item of a channel."""

    status: EndStatus
    error: str | None = None


class Channel:
    """One request's way over one edge.

    Everything put before the end comes out before it, and the end comes out once. `deadline_s` is the longest wait for
    the next item; a wait that is longer ends the channel with an error.
    """

    def __init__(
        self, *, capacity: int = 1024, deadline_s: float | None = None, clock: Clock = time.monotonic, name: str = ""
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._items: deque[Any] = deque()
        self._capacity = capacity
        self._deadline_s = deadline_s
        self._clock = clock
        self._name = name
        self._end: End | None = None
        self._is_drained = False
        self._last_progress = clock()

    @property
    def is_full(self) -> bool:
        return len(self._items) >= self._capacity

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more can be put; items may still wait to be taken."""
        return self._end is not None

    def put(self, item: Any) -> bool:
        """Append an item; False when the channel is full or has ended, and then nothing has changed."""
        if self._end is not None or self.is_full:
            return False
        self._items.append(item)
        self._last_progress = self._clock()
        return True

    def end(self, status: EndStatus = "ok", error: str | None = None) -> bool:
        """Let the channel end behind what is in it; only the first end counts. A cancelled channel loses its items."""
        if self._end is not None:
            return False
        self._end = End(status, error)
        if status == "cancelled":
            self._items.clear()
        return True

    def get(self) -> Any | End | None:
        """Return the next item; None when there is none yet, or after the end was returned."""
        if self._items:
            self._last_progress = self._clock()
            return self._items.popleft()
        if self._end is None:
            waited = self._clock() - self._last_progress
            if self._deadline_s is None or waited < self._deadline_s:
                return None
            what = f" of {self._name}" if self._name else ""
            self.end("error", f"nothing came{what} for {waited:.1f} s, the deadline is {self._deadline_s:.1f} s")
        if self._is_drained:
            return None
        self._is_drained = True
        return self._end


class Channels:
    """The channels into one stage, by request and generation.

    What comes for a request that has not begun is parked; what comes for a dead generation is dropped.
    """

    def __init__(self, *, capacity: int = 1024, deadline_s: float | None = None, clock: Clock = time.monotonic) -> None:
        self._capacity = capacity
        self._deadline_s = deadline_s
        self._clock = clock
        self._live: dict[str, tuple[int, Channel]] = {}
        self._parked: dict[tuple[str, int], list[Any]] = {}
        self._newest_dead: dict[str, int] = {}

    def put(self, req_id: str, generation: int, item: Any) -> bool:
        """Deliver an item or an End; False when it was dropped, or when there is no room and it must be put again."""
        live = self._live.get(req_id)
        if live is not None and live[0] == generation:
            return live[1].end(item.status, item.error) if isinstance(item, End) else live[1].put(item)
        if generation <= self._newest_dead.get(req_id, -1) or (live is not None and generation < live[0]):
            return False
        parked = self._parked.setdefault((req_id, generation), [])
        if len(parked) > self._capacity:
            return False
        parked.append(item)
        return True

    def open(self, req_id: str, generation: int) -> Channel:
        """Begin a request's generation; what was parked for it is in the channel, older generations are dead."""
        self.close(req_id)
        channel = Channel(capacity=self._capacity, deadline_s=self._deadline_s, clock=self._clock, name=req_id)
        self._live[req_id] = (generation, channel)
        self._newest_dead[req_id] = max(self._newest_dead.get(req_id, -1), generation - 1)
        for item in self._parked.pop((req_id, generation), ()):
            self.put(req_id, generation, item)
        return channel

    def close(self, req_id: str) -> None:
        """End a request's live generation; what still comes for it is dropped."""
        live = self._live.pop(req_id, None)
        if live is not None:
            self._newest_dead[req_id] = max(self._newest_dead.get(req_id, -1), live[0])
            live[1].end("cancelled")

    def forget(self, req_id: str) -> None:
        """Drop all that is known of a request, whose id may then be used anew."""
        self.close(req_id)
        self._newest_dead.pop(req_id, None)
        for key in [key for key in self._parked if key[0] == req_id]:
            del self._parked[key]

    def __len__(self) -> int:
        return len(self._live)
