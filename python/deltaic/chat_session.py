"""A conversation on a terminal, or on a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from deltaic.interrupts import ignored_interrupt
from deltaic.outputs import RequestOutput
from deltaic.reasoning import ReasoningSplitter, opens_reasoning
from deltaic.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deltaic.llm import LLM

HELP = """/help              show this
/clear             forget the conversation
/retry             answer the last message again
/undo              take the last message and its answer back
/system [TEXT]     show the system prompt, or set it; /system - takes it away
/set [NAME VALUE]  show the sampling parameters, or set one: /set temperature 0.5
/think on|off      let the model think first, if its template knows how
/stats on|off      show tokens and times after each answer
/save FILE         write the conversation as JSON
/load FILE         go on with one that was saved
/exit              leave (or Ctrl-D)
Ctrl-C stops an answer."""
COMMANDS = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))

_NUMBERS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "min_tokens": int,
    "seed": int,
}
_SETTABLE = (*_NUMBERS, "ignore_eos")


class Display(Protocol):
    """Where an answer is shown while it comes."""

    def think(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def end(self) -> None:
        """Finish what was begun; nothing more of this answer comes."""


class PlainDisplay:
    """The answer as it is; what was thought first is left out."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def think(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def end(self) -> None:
        self.say("\n")


class ChatSession:
    """Read messages, stream answers, remember both.

    `read` returns the next message and raises EOFError at the end, KeyboardInterrupt for a Ctrl-C at the prompt;
    answers go to `display`, remarks to `note`. A Ctrl-C ends the session unless it is interactive: a pipe cannot say
    /exit.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        read: Callable[[], str] = input,
        note: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
        display: Display | None = None,
        system: str | None = None,
        interactive: bool = True,
        stats: bool = False,
    ) -> None:
        self._llm = llm
        self._params = params
        self._read = read
        self._note = note
        self._display = PlainDisplay(sys.stdout) if display is None else display
        self._interactive = interactive
        self._system = system
        self._stats = stats
        self._template_kwargs: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []  # all but the system prompt

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as the model is given it."""
        return [*([] if self._system is None else [{"role": "system", "content": self._system}]), *self.turns]

    def run(self) -> None:
        """Converse until the end of input or /exit."""
        while True:
            try:
                text = self._read().strip()
                if text in ("/exit", "/quit"):
                    return
                if text.startswith("/"):
                    self._command(*text.split(maxsplit=1))
                elif text:
                    self.answer(text)
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                with ignored_interrupt():
                    self._note("(Ctrl-D or /exit to leave)")

    def answer(self, content: Any) -> None:
        """Stream the answer to a message, whose content is a text or text parts.

        A message that cannot be answered, or whose answer is stopped before it says anything, is taken back.
        """
        num_turns = len(self.turns)
        self.turns.append({"role": "user", "content": content})
        try:
            answer = self._answer()
        except BaseException:
            del self.turns[num_turns:]
            raise
        if answer is None:
            del self.turns[num_turns:]
        else:
            self.turns.append(answer)

    def _answer(self) -> dict[str, Any] | None:
        """Show the answer to the conversation; return its message, None when there is none. One Ctrl-C stops it."""
        said = {"reasoning_content": "", "content": ""}
        last: RequestOutput | None = None
        try:
            for output, thought, content in self._pieces():
                last = output
                said["reasoning_content"] += thought
                said["content"] += content
                if thought:
                    self._display.think(thought)
                if content:
                    self._display.say(content)
        except KeyboardInterrupt:
            with ignored_interrupt():  # an impatient second one
                self._display.end()
                if self._interactive:
                    self._note("(stopped)" if said["content"] else "(stopped; the message is taken back)")
            if not self._interactive:
                raise
            if not said["content"]:
                return None
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if last is not None:
                self._display.end()
            self._note(f"error: {error} (/clear starts over)")
            return None
        else:
            with ignored_interrupt():  # one that came as the answer ended
                self._display.end()
                if self._stats and last is not None:
                    self._note(describe(last))
        return {"role": "assistant", **{key: value for key, value in said.items() if value or key == "content"}}

    def _pieces(self) -> Iterator[tuple[RequestOutput, str, str]]:
        """Yield outputs, with what they add to the reasoning and to what is said."""
        options: dict[str, Any] = {"chat_template_kwargs": self._template_kwargs} if self._template_kwargs else {}
        opened = opens_reasoning(self._llm.render_chat(self.messages, **options), "")
        splitter = ReasoningSplitter(opened=opened)
        for output in self._llm.stream_outputs(self.messages, self._params, **options):
            thought, content = splitter.feed(output.text)
            if output.finished:
                rest = splitter.end()
                thought, content = thought + rest[0], content + rest[1]
            yield output, thought, content

    # ---- commands ----

    def _command(self, name: str, rest: str = "") -> None:
        actions: dict[str, Callable[[], object]] = {
            "/help": lambda: self._note(HELP),
            "/clear": self._clear,
            "/retry": self._retry,
            "/undo": self._undo,
            "/system": lambda: self._set_system(rest),
            "/set": lambda: self._set(rest),
            "/think": lambda: self._think(rest),
            "/stats": lambda: self._set_stats(rest),
            "/save": lambda: self._save(rest),
            "/load": lambda: self._load(rest),
        }
        action = actions.get(name)
        if action is None:
            self._note(f"unknown command {name}\n{HELP}")
            return
        try:
            action()
        except (ValueError, TypeError) as error:
            self._note(f"error: {error}")

    def _clear(self) -> None:
        self.turns.clear()
        self._note("(forgotten)")

    def _undo(self) -> Any:
        """Forget the last message of the user's and what came of it; return its content."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                self._note(f"(taken back: {text_of(turn['content'])})")
                return turn["content"]
        self._note("(there is no message)")
        return None

    def _retry(self) -> None:
        content = self._undo()
        if content is not None:
            self.answer(content)

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "-" else text
        self._note(f"system: {'none' if self._system is None else text_of(self._system)}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            if name not in _SETTABLE:
                raise ValueError(f"there is no {name} to set; there are {', '.join(_SETTABLE)}")
            given: Any = _number(name, value) if name in _NUMBERS else _switch(name, value)
            self._params = replace(self._params, **{name: given})
        shown = [f"{key} {getattr(self._params, key)}" for key in ([name] if name else _SETTABLE)]
        self._note("\n".join(shown))

    def _think(self, text: str) -> None:
        self._template_kwargs = {"enable_thinking": _switch("/think", text)}

    def _set_stats(self, text: str) -> None:
        self._stats = _switch("/stats", text)

    def _save(self, name: str) -> None:
        if not name:
            raise ValueError("/save needs the name of a file")
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        with _told(f"{name} cannot be written"):
            # JSON writes half of a surrogate pair, which a loaded conversation may hold, as Python escapes it.
            Path(name).expanduser().write_bytes(text.encode("utf-8", "backslashreplace"))
        self._note(f"({len(self.turns)} messages in {name})")

    def _load(self, name: str) -> None:
        if not name:
            raise ValueError("/load needs the name of a file")
        with _told(f"{name} cannot be read"):
            content = Path(name).expanduser().read_bytes()
        try:
            messages = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is no conversation: {error}") from error
        self._llm.render_chat(messages)  # says what is wrong with them
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self._system, self.turns = system, messages[0 if system is None else 1 :]
        self._note(f"({len(self.turns)} messages)")


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a text or text parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what the system says of a file into one line without its numbers."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home for ~
        raise ValueError(f"{what}: {getattr(error, 'strerror', None) or error}") from error


def _number(name: str, text: str) -> float | None:
    if text in ("none", ""):
        return None
    kind = _NUMBERS[name]
    try:
        number: float = kind(text)
    except ValueError:
        raise ValueError(f"{name} must be {'an integer' if kind is int else 'a number'}, got {text!r:.60}") from None
    return number


def _switch(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"{name} must be on or off, got {text!r:.60}")
    return text == "on"


def describe(output: RequestOutput) -> str:
    """Return one line about an answer's tokens and times."""
    num_prompt, metrics = len(output.prompt_token_ids), output.metrics
    parts = [f"{num_prompt} prompt tokens, {output.num_cached_tokens or 0} of them cached"]
    if metrics is not None and metrics.time_to_first_token is not None:
        parts.append(f"{metrics.num_generation_tokens} new, the first after {metrics.time_to_first_token * 1e3:.0f} ms")
        if metrics.tokens_per_second is not None:
            parts.append(f"then {metrics.tokens_per_second:.1f} tokens/s")
    return f"({', '.join(parts)})"
