"""The loop that AsyncLLM and the server of speech run on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deltaic.engine_thread import EngineStopped, EngineThread


class Counter:
    """Work of so many steps."""

    def __init__(self) -> None:
        self.num_steps = self.left = 0
        self.on_step: Callable[[], Any] = lambda: None
        self.told: list[str] = []
        self.num_stops = 0

    def step(self) -> None:
        if self.left:
            self.on_step()
            self.left -= 1
            self.num_steps += 1

    def stop(self) -> None:
        self.num_stops += 1


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def thread(counter: Counter) -> Iterator[EngineThread]:
    made = EngineThread(
        "thing",
        has_work=lambda: counter.left > 0,
        step=counter.step,
        on_end=counter.told.append,
        on_stop=counter.stop,
        stall_timeout_s=0.05,
    )
    made.start()
    yield made
    made.shutdown(5)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_steps_while_there_is_work_and_then_waits(counter: Counter, thread: EngineThread) -> None:
    thread.call_soon(lambda: setattr(counter, "left", 3))
    until(lambda: counter.num_steps == 3)
    until(lambda: thread.is_idle)
    thread.call_soon(lambda: setattr(counter, "left", 5))
    until(lambda: counter.num_steps == 8)
    until(lambda: thread.is_idle)
    thread.check_health()


def test_commands_run_between_steps_in_order(counter: Counter, thread: EngineThread) -> None:
    seen: list[int] = []
    counter.on_step = lambda: time.sleep(0.001)
    thread.call_soon(lambda: setattr(counter, "left", 1000))
    for i in range(5):
        thread.call_soon(lambda i=i: seen.append(i))  # type: ignore[misc]
    until(lambda: len(seen) == 5)
    assert seen == [0, 1, 2, 3, 4]
    assert counter.left > 0


def test_shutdown_is_told_once_and_lets_nothing_in(counter: Counter, thread: EngineThread) -> None:
    assert thread.shutdown(5)
    assert thread.shutdown(5)
    assert (counter.told, counter.num_stops) == (["the thing was shut down"], 1)
    for check in (thread.check_open, thread.check_health):
        with pytest.raises(EngineStopped, match="the thing was shut down"):
            check()


def test_stuck_step_fails_the_health_and_the_shutdown(counter: Counter, thread: EngineThread) -> None:
    go_on = threading.Event()
    counter.on_step = go_on.wait
    thread.call_soon(lambda: setattr(counter, "left", 1))
    until(lambda: not thread.is_idle)
    time.sleep(0.06)
    thread.check_open()
    with pytest.raises(EngineStopped, match="the thing is stuck: a step runs since 0 s"):
        thread.check_health()
    assert not thread.shutdown(0.01)
    go_on.set()
    assert thread.shutdown(5)
    assert counter.num_stops == 1


def test_what_a_step_raises_ends_the_loop(
    counter: Counter, thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    counter.on_step = lambda: 1 / 0
    thread.call_soon(lambda: setattr(counter, "left", 1))
    until(lambda: bool(counter.told))
    assert counter.told == ["the thing died: ZeroDivisionError: division by zero"]
    with pytest.raises(EngineStopped, match="the thing died"):
        thread.check_health()
    assert thread.shutdown(5)
    assert counter.num_stops == 0
    assert "the thing's loop died" in caplog.text
