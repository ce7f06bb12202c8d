"""A conversation on a terminal, or on a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from deltaic.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deltaic.llm import LLM

HELP = """/help   show this
/clear  forget the conversation
/exit   leave (or Ctrl-D)
Ctrl-C stops an answer."""


class ChatSession:
    """Read messages, stream answers, remember both.

    `read` returns the next message and raises EOFError at the end, KeyboardInterrupt for a Ctrl-C at the prompt;
    answers go to `out`, remarks to `note`. A Ctrl-C ends the session unless it is interactive: a pipe cannot say /exit.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        read: Callable[[], str] = input,
        note: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
        out: TextIO | None = None,
        system: str | None = None,
        interactive: bool = True,
    ) -> None:
        self._llm = llm
        self._params = params
        self._read = read
        self._note = note
        self._out = sys.stdout if out is None else out
        self._interactive = interactive
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def run(self) -> None:
        """Converse until the end of input or /exit."""
        while True:
            try:
                text = self._read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._note("(Ctrl-D or /exit to leave)")
                continue
            if text in ("/exit", "/quit"):
                return
            if text == "/clear":
                self.messages = list(self._opening)
                self._note("(forgotten)")
            elif text.startswith("/"):
                self._note(HELP if text == "/help" else f"unknown command {text.split()[0]}\n{HELP}")
            elif text:
                self.answer(text)

    def answer(self, text: str) -> None:
        """Stream the answer to a message. One that cannot be answered is taken back, with a remark that says why."""
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            for delta in self._llm.stream(self.messages, self._params):
                self._out.write(delta)
                self._out.flush()
                said.append(delta)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._note(" (stopped)")
        except (ValueError, NotImplementedError, RuntimeError) as error:
            self.messages.pop()
            self._note(f"error: {error} (/clear starts over)")
            return
        self._out.write("\n")
        self._out.flush()
        self.messages.append({"role": "assistant", "content": "".join(said)})
