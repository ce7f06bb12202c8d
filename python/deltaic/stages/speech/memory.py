"""Whether the stages of a pipeline fit one device together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageBudget:
    """What a stage takes, in bytes."""

    weight_bytes: int
    cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


def check_budgets(budgets: Mapping[str, StageBudget], memory_bytes: int) -> None:
    """Raise MemoryError with all the numbers, naming the first stage that no longer fits behind those before it."""
    used = 0
    for name, budget in budgets.items():
        if used + budget.total_bytes > memory_bytes:
            needs = ", ".join(f"{stage} {one.total_bytes}" for stage, one in budgets.items())
            raise MemoryError(
                f"stage {name!r} does not fit: it needs {budget.weight_bytes} bytes for weights and "
                f"{budget.cache_bytes} for caches, {memory_bytes - used} of {memory_bytes} are left; all stages need "
                f"{needs}"
            )
        used += budget.total_bytes
