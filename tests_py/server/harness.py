"""Servers for tests, and what they are asked."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from deltaic import AsyncLLM
from deltaic.server import ServerSettings, create_app
from deltaic.server.run import listen
from fastapi import FastAPI
from scripted_engine import ScriptedEngine

SMALL: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 256}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def running_server(llm: AsyncLLM, settings: ServerSettings | None = None) -> Iterator[str]:
    """Serve on a free port of the loopback; yield the URL."""
    with running_app(create_app(llm, settings)) as url:
        yield url


@contextmanager
def running_app(app: FastAPI) -> Iterator[str]:
    """Serve an application as running_server does."""
    with listen("127.0.0.1", 0) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def serve(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `deltaic serve`; yield its process and URL once it listens. What it says on stderr is stderr.read()."""
    command = [sys.executable, "-m", "deltaic", "serve", "--port", "0"]
    if "--kv-cache-memory-bytes" not in args:
        command += ["--kv-cache-memory-bytes", str(256 << 20)]
    # A shell in the background has its children ignore Ctrl-C.
    with subprocess.Popen(
        [*command, *args],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            while line.startswith(("max_model_len is ", "max_num_seqs is ")):  # what fits into a small cache
                line = process.stderr.readline()
            assert line.startswith("serving "), line
            yield process, line.split(" at ")[1].strip().removesuffix("/v1")
        finally:
            if process.poll() is None:
                process.kill()


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels; 0 where there is none."""
    total = 0.0
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        found = re.fullmatch(r"deltaic:([a-z_0-9]+)(?:\{(.*)\})? (\S+)", line)
        if found and found[1] == name and all(f'{key}="{value}"' in found[2] for key, value in labels.items()):
            total += float(found[3])
    return total


@dataclass
class Scripted:
    """A server in this process and its engine."""

    llm: AsyncLLM
    engine: ScriptedEngine
    settings: ServerSettings

    def __post_init__(self) -> None:
        self.app = create_app(self.llm, self.settings)

    def ask(self, *requests: Any, **options: Any) -> list[httpx.Response]:
        """Send (method, path, body or content, headers) each after the other; return the responses."""

        async def run() -> list[httpx.Response]:
            # Defects become status 500, as on a socket.
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
                return [await client.request(method, path, **fields) for method, path, fields in requests]

        return asyncio.run(run())

    def post(self, path: str, body: Any, **fields: Any) -> httpx.Response:
        return self.ask(("POST", path, {"json": body, **fields}))[0]

    def get(self, path: str, **fields: Any) -> httpx.Response:
        return self.ask(("GET", path, fields))[0]


Maker = Callable[..., Scripted]
