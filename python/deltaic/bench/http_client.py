"""A small HTTP/1.1 client for asyncio: one request a connection, the body as it comes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_LIMIT = 16 << 20  # of a line


class HttpError(Exception):
    """An answer that is no success, or none at all: then it has no status."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Say whether the same request would be refused again: a wrong key or path, not a server that starts."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 425, 429)


@dataclass(frozen=True, slots=True)
class Url:
    """Where requests go."""

    host: str
    port: int
    path: str
    is_secure: bool

    @staticmethod
    def parse(text: str) -> Url:
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url must be http://host[:port][/path] or https, got {text!r}")
        is_secure = parts.scheme == "https"
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"base_url {text!r}: {error}") from error
        default = 443 if is_secure else 80
        return Url(parts.hostname, default if port is None else port, parts.path.rstrip("/"), is_secure)

    @property
    def authority(self) -> str:
        """Return host:port as a URL has them."""
        return authority(self.host, self.port)


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def request(
    url: Url, method: str, path: str, *, headers: Mapping[str, str], body: bytes = b"", timeout_s: float = 600.0
) -> AsyncIterator[bytes]:
    """Yield the pieces of an answer's body; HttpError for a status other than 200, or a connection that breaks.

    timeout_s bounds the wait for the connection, and for each piece.
    """
    context = ssl.create_default_context() if url.is_secure else None
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(url.host, url.port, ssl=context, limit=_LIMIT), timeout_s
        )
    except (OSError, asyncio.TimeoutError) as error:
        raise HttpError(f"cannot connect to {url.authority}: {str(error) or 'timed out'}") from error
    try:
        given = {
            "Host": url.authority,
            "Connection": "close",
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **headers,
        }
        lines = [f"{method} {url.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        status, answer_headers = await asyncio.wait_for(_read_head(reader), timeout_s)
        pieces = _read_body(reader, answer_headers, timeout_s)
        if status != 200:
            text = b"".join([piece async for piece in pieces])
            raise HttpError(f"HTTP {status}: {' '.join(text.decode(errors='replace').split())[:300]}", status)
        async for piece in pieces:
            yield piece
    except asyncio.TimeoutError as error:
        raise HttpError(f"no answer within {timeout_s:g} s") from error
    except (OSError, EOFError, ValueError) as error:
        raise HttpError(f"the connection broke: {str(error) or type(error).__name__}") from error
    finally:
        writer.close()
        with suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await reader.readline()).split()
    if len(words) < 2 or not words[1].isdigit():
        raise ValueError("no HTTP answer came")
    status = int(words[1])
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return status, headers


async def _read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str], timeout_s: float
) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int(await asyncio.wait_for(reader.readline(), timeout_s), 16):
            yield await asyncio.wait_for(reader.readexactly(size), timeout_s)
            await reader.readline()
    elif "content-length" in headers:
        yield await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), timeout_s)
    else:
        while piece := await asyncio.wait_for(reader.read(65536), timeout_s):
            yield piece


async def server_sent_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
