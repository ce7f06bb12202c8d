"""Streams whose client cannot be written to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from deltaic.server.event_stream import EventStream


class Client:
    """Take `room` messages, then break or stall; be gone once `gone` is set."""

    def __init__(self, room: int, *, breaks: bool) -> None:
        self.room, self.breaks = room, breaks
        self.stalled, self.gone = asyncio.Event(), asyncio.Event()

    async def send(self, _: Any) -> None:
        self.room -= 1
        if self.room < 0:
            self.stalled.set()
            if self.breaks:
                raise OSError("broken pipe")
            await asyncio.Event().wait()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("breaks", [True, False])
def test_events_end_with_a_client_that_takes_no_more(breaks: bool) -> None:
    """The generator stands at a yield then, where no cancelling reaches it."""
    ended: list[bool] = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "x"
        finally:
            ended.append(True)

    async def main() -> None:
        client = Client(3, breaks=breaks)
        stream = EventStream(events())
        answer = asyncio.ensure_future(stream({"type": "http"}, client.receive, client.send))
        await client.stalled.wait()
        client.gone.set()
        await asyncio.wait({answer}, timeout=20)
        assert answer.done()
        assert isinstance(answer.exception(), OSError) is breaks
        assert ended == [True]

    asyncio.run(main())
