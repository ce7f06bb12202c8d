"""How many tokens an engine's steps had."""

from __future__ import annotations

from bisect import bisect_left

# Upper ends of the buckets; the last bucket has none.
BOUNDS = tuple(1 << i for i in range(15))


class StepSizes:
    """Counts of steps by their number of tokens. One thread adds, any may read."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.num_tokens = 0  # of all steps

    def add(self, num_tokens: int) -> None:
        self.counts[bisect_left(BOUNDS, num_tokens)] += 1
        self.num_tokens += num_tokens
