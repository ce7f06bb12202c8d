"""Answers that end when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from deltaic.server.errors import to_api_error

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, whose request's body has been read; cancel it and raise ClientGone when the client goes."""
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, listener)


class EventStream(Response):
    """Server-sent events: data, or a name and data, one an item of `events`; then data `ends_with`, if any.

    An exception of `events` becomes a last event with an error. `events` is closed when the client goes.
    """

    def __init__(
        self,
        events: AsyncGenerator[str, None] | AsyncGenerator[tuple[str, str], None],
        ends_with: str | None = "[DONE]",
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._events = events
        self._ends_with = ends_with

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        listener = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({sender, listener}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await _cancel(sender, listener)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await self._send_event(send, event)
        except Exception as error:
            await self._send_event(send, to_api_error(error).to_json())
        if self._ends_with is not None:
            await self._send_event(send, self._ends_with)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send_event(send: Send, event: str | tuple[str, str]) -> None:
        text = f"data: {event}\n\n" if isinstance(event, str) else f"event: {event[0]}\ndata: {event[1]}\n\n"
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
