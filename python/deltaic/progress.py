"""How far a list of prompts has come."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """A progress bar on a terminal, for more than one prompt; elsewhere nothing."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        self._total = total
        self._wanted = (total > 1 and sys.stderr.isatty()) if wanted is None else wanted
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        if self._wanted:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("generating", total=self._total)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, count: int) -> None:
        if self._progress is not None and self._task is not None and count:
            self._progress.advance(self._task, count)
