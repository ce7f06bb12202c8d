"""`deltaic chat` as a person meets it, on a terminal of its own."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltaic.chat_terminal import MarkdownDisplay, complete_end, history_path, make_reader
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[=>]|\][^\x07]*\x07)")


class Terminal:
    """A process on a terminal; what it shows is read as it comes."""

    def __init__(self, home: Path, *args: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(home)}
        command = [sys.executable, "-m", "deltaic", "chat", "--kv-cache-memory-bytes", str(32 << 20), *args]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def enter(self, line: str) -> None:
        """Type a line once the prompt is there: what comes before belongs to no editor."""
        self.wait_for(">")
        self.type(f"{line}\r")

    def wait_for(self, words: str) -> str:
        """Return what was shown up to these words, and forget it."""
        deadline = time.monotonic() + 60
        while words not in (plain := ESCAPE.sub("", self.shown)):
            assert time.monotonic() < deadline, plain[-2000:]
            if select.select([self._master], [], [], 1)[0]:
                try:
                    self.shown += os.read(self._master, 65536).decode(errors="replace")
                except OSError as error:  # the process has gone
                    raise AssertionError(plain[-2000:]) from error
        before, _, self.shown = plain.partition(words)
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def terminal(home: Path) -> Iterator[Terminal]:
    made = Terminal(home, "--temperature", "0", "--stats")
    yield made
    made.close()


def test_conversation_on_a_terminal(terminal: Terminal, home: Path) -> None:
    terminal.wait_for("/help shows the commands")
    terminal.enter("What is the capital of France?")
    assert "Paris" in terminal.wait_for("prompt tokens")
    # Ctrl-C stops the answer and not the program.
    for line in ("/set ignore_eos on", "/set max_tokens 3000"):
        terminal.enter(line)
    terminal.wait_for("max_tokens 3000")
    terminal.enter("Tell me a story.")
    terminal.wait_for("story.")
    for letter in "aeio":  # of the answer
        terminal.wait_for(letter)
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("(stopped)")
    terminal.wait_for(">")
    terminal.type("\x03")  # at the prompt neither
    terminal.wait_for("(Ctrl-D or /exit to leave)")
    terminal.enter("/undo")
    terminal.wait_for("(taken back: Tell me a story.)")
    terminal.wait_for(">")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0
    assert "+What is the capital of France?" in (home / "deltaic" / "chat_history").read_text()


def test_what_is_typed_while_an_answer_comes_is_sent_afterwards(terminal: Terminal) -> None:
    terminal.wait_for("/help shows the commands")
    terminal.enter("/set max_tokens 300\r/set ignore_eos on")
    terminal.wait_for("ignore_eos True")
    terminal.enter("Tell me a story.")
    terminal.wait_for("story.")
    for letter in "aeio":  # of the answer
        terminal.wait_for(letter)
    terminal.type("/undo\r")
    assert "/undo" not in terminal.wait_for("300 new")
    terminal.wait_for("(taken back: Tell me a story.)")
    terminal.wait_for(">")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


def type_message(keys: str) -> str:
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text(keys)
        return make_reader()()


def test_lines_are_broken_sent_and_remembered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    assert type_message("one\x1b\rtwo\nthree\r") == "one\ntwo\nthree"
    assert type_message("\x1b[200~pasted\nlines\x1b[201~\r") == "pasted\nlines"
    assert type_message("last\r") == "last"
    assert type_message("\x1b[A\r") == "last"
    assert oct(history_path().stat().st_mode)[-3:] == "600"


def test_history_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    assert type_message("Hi\r") == "Hi"


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one", ""),
        ("one\n\n", ""),  # what comes may belong to it
        ("one\n\ntwo", "one\n\n"),
        ("- a\n\n- b", ""),
        ("1. a\n\n   more", ""),
        ("- a\n\nend", "- a\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nend", "```\na\n\nb\n```\n\n"),
        ("````\n```\n\nb\n````\n\nend", "````\n```\n\nb\n````\n\n"),
        ("| a |\n\n| b |", ""),
    ],
)
def test_blocks_that_are_complete(text: str, complete: str) -> None:
    assert text[: complete_end(text)] == complete


def show(pieces: list[str], thoughts: list[str] | None = None) -> str:
    out = io.StringIO()
    display = MarkdownDisplay(Console(file=out, width=60, force_terminal=False))
    for thought in thoughts or []:
        display.think(thought)
    for piece in pieces:
        display.say(piece)
    display.end()
    return out.getvalue()


TEXT = "# Title\n\nSome **bold** words.\n\n- one\n- two\n\n```py\nx = 1\n\ny = 2\n```\n\nEnd."


def test_markdown_is_shown() -> None:
    shown = show([TEXT], ["Hm."])
    assert re.match(r"  Hm\. *\n *\n", shown)
    for words in ("Title", "Some bold words.", " • one", "x = 1", "End."):
        assert words in shown
    assert "**" not in shown
    assert "```" not in shown


@given(st.integers(1, 20))
def test_cuts_do_not_matter(size: int) -> None:
    assert show([TEXT[i : i + size] for i in range(0, len(TEXT), size)]) == show(list(TEXT))
