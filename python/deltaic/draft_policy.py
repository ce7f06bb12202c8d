"""How many drafts a step verifies and makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_DECAY = 0.98  # weight of what was known of the acceptance, at each verification
_TIME_DRIFT = 1.05  # a step's time rises by so much at most: what else a machine does only ever adds to it
_NUM_TRIALS = 5  # measured steps of each choice before any is trusted
_MAX_TRIAL_STEPS = 20  # after which a trial ends unmeasured: no step verified and made as many drafts
_TRIAL_INTERVAL = 300  # steps between two looks at a choice that was not the best


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """A step whose requests all verify and make the same number of drafts: one whose time means something."""

    num_requests: int
    num_drafts: int


class DraftPolicy(Protocol):
    """Chooses the drafts of each step. What is chosen changes the speed alone, never a token."""

    def choose(self, num_running: int) -> int:
        """Return how many drafts each request runs in the next step, and how many are made behind it."""
        ...

    def observe_step(self, num_running: int, num_drafts: int, seconds: float) -> None:
        """Take the time of a step of so many requests that all verified and made num_drafts drafts."""
        ...

    def observe_acceptance(self, num_drafts: int, num_accepted: int) -> None:
        """Take what became of the drafts of one request."""
        ...


class FixedDrafts:
    """The same number in every step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self, num_running: int) -> int:
        return self._num_drafts

    def observe_step(self, num_running: int, num_drafts: int, seconds: float) -> None:
        pass

    def observe_acceptance(self, num_drafts: int, num_accepted: int) -> None:
        pass


class MeasuredDrafts:
    """The number that gives the most tokens a second: expected tokens of a step over its measured time.

    The acceptance is one for all batch sizes, the time of a step one for each, by powers of two.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._accepted = [0.7 ** (position + 1) for position in range(max_drafts)]  # share, at each draft position
        self._sizes: dict[int, _Choices] = {}

    def choose(self, num_running: int) -> int:
        return self._choices(num_running).choose(self._tokens_per_step)

    def observe_step(self, num_running: int, num_drafts: int, seconds: float) -> None:
        self._choices(num_running).observe(num_drafts, seconds / num_running)

    def observe_acceptance(self, num_drafts: int, num_accepted: int) -> None:
        for position in range(num_drafts):
            share = self._accepted[position] * _DECAY
            self._accepted[position] = share + (1 - _DECAY) * (position < num_accepted)

    def _tokens_per_step(self, num_drafts: int) -> float:
        return 1 + sum(self._accepted[:num_drafts])

    def _choices(self, num_running: int) -> _Choices:
        size = max(num_running - 1, 0).bit_length()
        if size not in self._sizes:
            self._sizes[size] = _Choices(self._max_drafts)
        return self._sizes[size]


class _Choices:
    """What is known of the steps of one batch size."""

    def __init__(self, max_drafts: int) -> None:
        self._seconds = [0.0] * (max_drafts + 1)  # a request, by number of drafts
        self._num_trials_left = [_NUM_TRIALS] * (max_drafts + 1)
        self._num_trial_steps = 0  # of the trial that runs
        self._num_steps = 0
        self._next_trial = max_drafts

    def choose(self, tokens_per_step: Callable[[int], float]) -> int:
        """Return the most drafts that still need a trial, else the best number."""
        self._num_steps += 1
        for num_drafts in reversed(range(len(self._seconds))):
            if not self._num_trials_left[num_drafts]:
                continue
            self._num_trial_steps += 1
            if self._num_trial_steps <= _MAX_TRIAL_STEPS:
                return num_drafts
            self._num_trials_left[num_drafts] = self._num_trial_steps = 0
        if self._num_steps % _TRIAL_INTERVAL == 0:
            self._num_trials_left[self._next_trial] = _NUM_TRIALS
            self._next_trial = (self._next_trial - 1) % len(self._seconds)
        measured = [num_drafts for num_drafts, seconds in enumerate(self._seconds) if seconds]
        return max(measured, key=lambda n: tokens_per_step(n) / self._seconds[n], default=0)

    def observe(self, num_drafts: int, seconds: float) -> None:
        known = self._seconds[num_drafts]
        self._seconds[num_drafts] = min(seconds, known * _TIME_DRIFT) if known else seconds
        if self._num_trials_left[num_drafts]:
            self._num_trials_left[num_drafts] -= 1
            self._num_trial_steps = 0
