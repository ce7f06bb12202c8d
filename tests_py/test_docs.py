"""The code blocks of README.md and docs/ run as they stand.

A ```python block runs as a program. Of a ```bash block the lines that call `deltaic`, curl or a Python script run, one
after the other. A block that talks to http://127.0.0.1:8000 gets a server, on a port of its own; paths below /path/to/
get what STAND_INS says. Not run: other paths below /path/to/ (checkpoints that only a download has), what installs and
builds (scripts/test.sh does), and `deltaic serve`, which the server stands for.
"""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVER = "http://127.0.0.1:8000"
STAND_INS = {
    "/path/to/deltaic": str(ROOT),
    "/path/to/Qwen3.5-0.8B": str(ROOT / "python" / "deltaic" / "default_model"),
    "/path/to/tiny-speech": "",  # made by a fixture
}
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    body: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match["language"], textwrap.dedent(match["body"]))


def commands(block: Block) -> list[str]:
    """Return the calls of `deltaic`, curl and scripts that can run here."""
    joined = block.body.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    runs = re.compile(r"(deltaic (?!serve\b)|curl |python )")
    return [line for line in lines if runs.match(line) and can_stand_in(line)]


def can_stand_in(text: str) -> bool:
    """Return whether each path below /path/to/ has a stand-in."""
    return all(
        any(path == known or path.startswith(known + "/") for known in STAND_INS)
        for path in re.findall(r"/path/to/[\w./-]*", text)
    )


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON_BLOCKS = [block for block in ALL_BLOCKS if block.language == "python" and can_stand_in(block.body)]
SHELL_BLOCKS = [block for block in ALL_BLOCKS if block.language == "bash" and commands(block)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "deltaic", "serve", "--port", str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process, log)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the server did not start: {log.read_text()}")


@pytest.fixture(scope="module")
def tiny_speech(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny-speech"
    run([sys.executable, str(ROOT / "examples" / "make_tiny_speech.py"), str(folder)], ROOT)
    return str(folder)


def with_stand_ins(text: str, request: pytest.FixtureRequest) -> str:
    if SERVER in text:
        text = text.replace(SERVER, request.getfixturevalue("server_url"))
    for path, stand_in in STAND_INS.items():
        if path in text:
            text = text.replace(path, stand_in or request.getfixturevalue("tiny_speech"))
    return text


def run(command: list[str], cwd: Path) -> None:
    result = subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, (
        f"{shlex.join(command)} ended with {result.returncode}\n{result.stdout}{result.stderr}"
    )


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: block.id)
def test_python_block_runs(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(with_stand_ins(block.body, request))
    run([sys.executable, str(program)], tmp_path)


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.id)
def test_commands_of_a_shell_block_run(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    for line in commands(block):
        words = shlex.split(with_stand_ins(line, request), comments=True)
        if words[0] == "deltaic":
            words = [sys.executable, "-m", "deltaic", *words[1:]]
        elif words[0] == "python":
            words[0] = sys.executable
        run(words, tmp_path)


def test_every_python_block_runs_and_blocks_of_both_kinds_are_found() -> None:
    assert len(PYTHON_BLOCKS) == len([block for block in ALL_BLOCKS if block.language == "python"]) >= 13
    assert len(SHELL_BLOCKS) >= 6
