"""Requests that wait for room."""

from __future__ import annotations

import heapq

from deltaic.request import Request, RequestStatus


class WaitingQueue:
    """Requests by (priority, arrival), the lowest first; without priorities by arrival alone.

    A preempted request arrived before all that never ran, so by arrival it is first again. A request that ends while
    it waits stays until it comes up.
    """

    def __init__(self, uses_priority: bool) -> None:
        self._uses_priority = uses_priority
        self._heap: list[tuple[int, int, Request]] = []
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_ended

    def push(self, request: Request) -> None:
        priority = request.priority if self._uses_priority else 0
        heapq.heappush(self._heap, (priority, request.arrival, request))

    def first(self) -> Request | None:
        while self._heap:
            request = self._heap[0][2]
            if request.status is not RequestStatus.FINISHED:
                return request
            heapq.heappop(self._heap)
            self._num_ended -= 1
        return None

    def pop_first(self) -> None:
        """Take out what first() has just returned."""
        heapq.heappop(self._heap)

    def end_one(self) -> None:
        """Account for a waiting request whose status has become FINISHED."""
        self._num_ended += 1
