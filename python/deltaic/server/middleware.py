"""What every request passes before it is read: the key, the number of others, the size."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltaic.server.errors import ApiError

# What monitoring reads, which holds no text of anyone, and the page, which asks for the key.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics"})
_MAX_DISCARDED_BYTES = 256 << 20


class ApiKeyMiddleware:
    """Answer 401 to a request without one of the keys, in a time that does not depend on how much of it is right."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _path(scope) not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            digest = sha256(given.strip().encode("latin-1")).digest()
            matches = [hmac.compare_digest(digest, known) for known in self._digests]
            if scheme.lower() != "bearer" or not any(matches):
                error = ApiError(
                    401,
                    "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.to_response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ConcurrencyMiddleware:
    """Answer 429 to requests beyond so many that are read or answered: each may hold a body of max_body_bytes."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if self._num_requests >= self._max_requests:
            await _discard(receive)
            error = ApiError(
                429,
                f"the server is busy: it answers {self._max_requests} requests, which is the limit",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
            await error.to_response()(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1


class BodyLimitMiddleware:
    """Answer 413 to a body of more than max_bytes, which is never held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the body is larger than {self._max_bytes} bytes"
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._max_bytes:
            await _discard(receive)
            error = ApiError(413, f"{message}: it has {length[:20]}", headers={"Connection": "close"})
            await error.to_response()(scope, receive, send)
            return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            event = await receive()
            num_bytes += len(event.get("body", b""))
            if num_bytes > self._max_bytes:
                await _discard(receive)
                raise HTTPException(413, message, {"Connection": "close"})
            return event

        await self._app(scope, limited, send)


def _path(scope: Scope) -> str:
    """Return the path that the router sees: without where the application is mounted in another one."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def _discard(receive: Receive) -> None:
    """Read a body to its end, within reason: who still writes does not read the answer."""
    num_bytes = 0
    while num_bytes <= _MAX_DISCARDED_BYTES:
        event = await receive()
        num_bytes += len(event.get("body", b""))
        if not event.get("more_body", False):
            return
