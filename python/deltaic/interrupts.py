"""Ctrl-C between steps, never within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ignored_interrupt() -> Iterator[None]:
    """Let no Ctrl-C into the block, as far as deferred_interrupt would hold one back."""
    try:
        with deferred_interrupt():
            yield
    except KeyboardInterrupt:
        pass


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C when the block has ended.

    An exception in the middle of a step would leave the scheduler half changed. Outside the main thread, and where
    the program handles SIGINT itself, nothing changes.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if caught:
        raise KeyboardInterrupt
