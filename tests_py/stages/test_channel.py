from __future__ import annotations

import pytest
from deltaic.stages import Channel, Channels, End


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drain(channel: Channel) -> list[object]:
    items = []
    while (item := channel.get()) is not None:
        items.append(item)
    return items


@pytest.mark.parametrize("status", ["ok", "error"])
def test_row_27_all_data_comes_before_the_end_and_the_end_once(status: str) -> None:
    channel = Channel()
    assert channel.put(1)
    assert channel.put(2)
    assert channel.end(status)
    assert not channel.end("error", "late")
    assert not channel.put(3)
    assert drain(channel) == [1, 2, End(status)]
    assert channel.get() is None


def test_an_end_without_data_is_delivered_too() -> None:
    channel = Channel()
    channel.end()
    assert drain(channel) == [End("ok")]


def test_row_8_a_chunk_that_never_comes_is_an_error_at_the_deadline() -> None:
    clock = Clock()
    channel = Channel(deadline_s=5.0, clock=clock, name="talker -> code2wav")
    channel.put(1)
    clock.now = 4.0
    assert channel.get() == 1
    clock.now = 8.9
    assert channel.get() is None
    clock.now = 9.0
    end = channel.get()
    assert isinstance(end, End)
    assert end.status == "error"
    assert "nothing came of talker -> code2wav for 5.0 s" in (end.error or "")
    assert not channel.put(2)
    assert channel.get() is None


def test_a_channel_is_bounded() -> None:
    channel = Channel(capacity=2)
    assert [channel.put(i) for i in range(3)] == [True, True, False]
    assert channel.get() == 0
    assert channel.put(2)
    assert drain(channel) == [1, 2]


def test_row_24_what_comes_for_a_dead_generation_is_dropped() -> None:
    channels = Channels()
    old = channels.open("a", 0)
    assert channels.put("a", 0, "old sound")
    new = channels.open("a", 1)
    assert drain(old) == [End("cancelled")]
    assert not channels.put("a", 0, "stale sound")
    assert channels.put("a", 1, "new sound")
    assert not channels.put("a", 0, End("ok"))
    assert channels.put("a", 1, End("ok"))
    assert drain(new) == ["new sound", End("ok")]


def test_early_items_are_parked_until_their_request_begins() -> None:
    channels = Channels()
    assert channels.put("a", 0, 1)
    assert channels.put("a", 0, End("ok"))
    channel = channels.open("a", 0)
    assert drain(channel) == [1, End("ok")]
    channels.close("a")
    assert not channels.put("a", 0, 2)
    channels.forget("a")
    assert len(channels) == 0
