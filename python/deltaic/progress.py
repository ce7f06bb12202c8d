"""How far a list of things to do has come."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """A progress bar on a terminal, for more than one thing to do; elsewhere nothing."""

    def __init__(self, total: int, wanted: bool | None, label: str = "generating") -> None:
        self._label = label
        self._total = total
        self._wanted = (total > 1 and sys.stderr.isatty()) if wanted is None else wanted
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        if self._wanted:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(self._label, total=self._total)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, count: int) -> None:
        if self._progress is not None and self._task is not None and count:
            self._progress.advance(self._task, count)
