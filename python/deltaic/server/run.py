"""`deltaic serve`: the application on a socket, until a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from deltaic.async_llm import AsyncLLM
from deltaic.server.app import create_app
from deltaic.server.settings import ServerSettings


class _Engine(Protocol):
    def shutdown(self, timeout_s: float) -> bool: ...


class _Server(uvicorn.Server):
    """End live streams with a last event before connections are waited for."""

    def __init__(self, config: uvicorn.Config, engine: _Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.shutdown(timeout_s=0)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; OSError when the address cannot be had. Port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]  # the address stands here already
        raise OSError(f"cannot listen on {host} port {port}: {reason}") from error


def address(sock: socket.socket) -> str:
    """Return a socket's host and port as a URL has them."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run_server(llm: AsyncLLM, settings: ServerSettings, sock: socket.socket, *, access_log: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, which end within 2 seconds what still runs. KeyboardInterrupt for SIGINT."""
    run_app(create_app(llm, settings), llm, sock, access_log=access_log)


def run_app(app: FastAPI, engine: _Engine, sock: socket.socket, *, access_log: bool = False) -> None:
    """Serve an application around an engine, as run_server does."""
    config = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        lifespan="on",
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    # uvicorn raises the signal once more when it has ended; SIGTERM has done its work by then.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        asyncio.run(_Server(config, engine).serve(sockets=[sock]))
    finally:
        signal.signal(signal.SIGTERM, before)
        if not engine.shutdown(timeout_s=0.2):
            # A step runs on. The interpreter must not be taken down around its thread.
            sys.stderr.flush()
            os._exit(0)
