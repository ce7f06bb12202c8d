"""The loop of an engine, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The engine was shut down, died of an error, or is stuck in a step."""


class EngineThread:
    """Step an engine while it has work, and between steps run what other threads ask for.

    The thread calls `step` while `has_work`, and after commands; after a shutdown `on_stop`, to give all back.
    `on_end` is called once, by whoever ends the loop, with the reason: to tell those that wait.

    `lock` is held to let a request in, after check_open: so none comes in behind the end. A step or a command that
    takes longer than stall_timeout_s makes check_health fail. What the loop raises ends it, is logged, and is the
    reason.
    """

    def __init__(
        self,
        name: str,
        *,
        has_work: Callable[[], bool],
        step: Callable[[], None],
        on_end: Callable[[str], None],
        stall_timeout_s: float,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = threading.Lock()
        self._name = name
        self._has_work, self._step, self._on_end, self._on_stop = has_work, step, on_end, on_stop
        self._stall_timeout_s = stall_timeout_s
        self._ended: str | None = None  # why the loop runs no longer; under the lock
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"deltaic-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- any thread ----

    @property
    def is_idle(self) -> bool:
        return self._busy_since is None

    def check_open(self) -> None:
        """Raise EngineStopped when the loop has ended."""
        if self._ended is not None:
            raise EngineStopped(self._ended)

    def check_health(self) -> None:
        """Raise EngineStopped when no request would get an answer."""
        self.check_open()
        busy_since = self._busy_since
        if busy_since is not None and (seconds := time.monotonic() - busy_since) > self._stall_timeout_s:
            raise EngineStopped(f"the {self._name} is stuck: a step runs since {seconds:.0f} s")

    def call_soon(self, command: Callable[[], None]) -> None:
        """Run a command in the thread, between steps."""
        self._commands.put(command)

    def shutdown(self, timeout_s: float) -> bool:
        """End the loop after its step; return whether it ended in time."""
        self._end(f"the {self._name} was shut down")
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _end(self, reason: str) -> None:
        with self.lock:
            if self._ended is not None:
                return
            self._ended = reason
        self._on_end(reason)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
            self._on_stop()
        except BaseException as error:
            logger.critical("the %s's loop died", self._name, exc_info=error)
            self._end(f"the {self._name} died: {type(error).__name__}: {error}")
        finally:
            self._busy_since = None

    def _obey(self) -> bool:
        """Run the commands that there are, waiting for one while there is no step to run; False: stop."""
        block = not self._has_work()
        while True:
            if block:
                self._busy_since = None
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                self._busy_since = time.monotonic()
                return True
            self._busy_since, block = time.monotonic(), False
            if command is None:
                return False
            command()
