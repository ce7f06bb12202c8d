from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest
from deltaic.interrupts import deferred_interrupt, ignored_interrupt


def test_interrupt_is_raised_when_the_block_has_ended() -> None:
    ended: list[bool] = []

    def work() -> None:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert ended == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_of_a_block_that_has_none_is_forgotten() -> None:
    ended: list[bool] = []
    with ignored_interrupt():
        signal.raise_signal(signal.SIGINT)
        ended.append(True)
    assert ended == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_error_of_the_block_is_its_own() -> None:
    with pytest.raises(ValueError, match="mine"), deferred_interrupt():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_program_that_handles_interrupts_keeps_its_handler() -> None:
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, handler)
    try:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_touch_no_handler() -> None:
    handlers: list[object] = []

    def work() -> None:
        with deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
