"""What a person sees of a conversation: a line editor, and answers as they come, in markdown."""

from __future__ import annotations

import os
import re
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

from deltaic.chat_session import COMMANDS

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
# Behind it a new block begins, whatever comes.
_BLANK = re.compile(r"\n[ \t]*\n(?=[^\s])")
_CONTINUES = re.compile(r"(?:[-*+]|\d+[.)]|\||>| )")  # may belong to the list, table or quotation before it


class MarkdownDisplay:
    """Blocks are printed when they are complete; the one that grows is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._held = ""  # the block that grows
        self._thought = ""
        self._printed = False  # some block of this answer

    def think(self, text: str) -> None:
        self._thought += text
        self._draw()

    def say(self, text: str) -> None:
        self._end_thought()
        self._held += text
        end = complete_end(self._held)
        if end:
            self._print(self._held[:end])
            self._held = self._held[end:]
        self._draw()

    def end(self) -> None:
        self._end_thought()
        self._print(self._held)
        self._held, self._printed = "", False

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=12, vertical_overflow="crop")
            self._live.start()
        self._live.update(self._tail())

    def _tail(self) -> Padding | Markdown:
        """Return the end of what grows, as much as the screen holds."""
        lines = (self._thought or self._held).split("\n")[-max(self._console.height - 4, 1) :]
        return _dim("\n".join(lines)) if self._thought else Markdown("\n".join(lines))

    def _print(self, text: str) -> None:
        self._stop_live()
        if text.strip():
            if self._printed:
                self._console.print()
            self._console.print(Markdown(text))
            self._printed = True

    def _end_thought(self) -> None:
        if self._thought:
            self._stop_live()
            self._console.print(_dim(self._thought))
            self._thought, self._printed = "", True

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def complete_end(text: str) -> int:
    """Return where the last block begins that may still grow; 0: the text is one block so far."""
    end = 0
    fence = ""
    for match in re.finditer(rf"{_FENCE.pattern}|{_BLANK.pattern}", text, re.MULTILINE):
        mark = match[1]
        if mark is None:
            if not fence and not _CONTINUES.match(text, match.end()):
                end = match.end()
        elif not fence:
            fence = mark
        elif mark[0] == fence[0] and len(mark) >= len(fence):
            fence = ""
    return end


def _dim(text: str) -> Padding:
    return Padding(Text(text, style="dim italic"), (0, 0, 0, 2), expand=False)


@contextmanager
def keyboard_kept_for_the_prompt() -> Iterator[None]:
    """Have the terminal keep what is typed while an answer comes, unseen and as it is, for the next prompt.

    Else it would be shown within the answer, and its Enter would come as the Ctrl-J that breaks a line. Ctrl-C stays a
    signal.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def history_path() -> Path:
    """Return where messages are remembered from one session to the next."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "deltaic" / "chat_history"


def make_reader() -> Callable[[], str]:
    """Return a function that reads one message from the terminal.

    Enter sends; Alt-Enter and Ctrl-J break the line, as does what is pasted. Up and down go through the history.
    """
    keys = KeyBindings()

    @keys.add("c-j")
    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    session: PromptSession[str] = PromptSession(
        message=HTML("<b>&gt; </b>"),
        history=_history(),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        completer=WordCompleter(COMMANDS, sentence=True),
        complete_while_typing=False,
        enable_history_search=True,
    )
    return session.prompt


def _history() -> History:
    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()  # a home that cannot be written to
    return FileHistory(path)
