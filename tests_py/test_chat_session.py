from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deltaic.chat_session import ChatSession
from deltaic.sampling_params import SamplingParams


class EchoLLM:
    """Answer with what was said last; stop, refuse or fail on demand."""

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, str]]] = []

    def stream(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[str]:
        self.conversations.append([dict(message) for message in messages])
        text = messages[-1]["content"]
        if text == "too long":
            raise ValueError("the prompt has 5000 tokens")
        return self._say(text)

    @staticmethod
    def _say(text: str) -> Iterator[str]:
        yield "You said: "
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "fail":
            raise RuntimeError("request 1 failed")
        yield text


def converse(*lines: str | type[BaseException], **options: Any) -> tuple[ChatSession, EchoLLM, str, list[str]]:
    """Run a session over lines that are typed; an exception is what the terminal raises."""
    typed = iter(lines)

    def read() -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    llm, out, notes = EchoLLM(), io.StringIO(), list[str]()
    note: Callable[[str], None] = notes.append
    session = ChatSession(llm, SamplingParams(), read=read, out=out, note=note, **options)  # type: ignore[arg-type]
    session.run()
    return session, llm, out.getvalue(), notes


def test_answers_are_streamed_and_remembered() -> None:
    session, llm, out, notes = converse("Hi", "  ", "Bye")
    assert out == "You said: Hi\nYou said: Bye\n"
    assert [message["content"] for message in llm.conversations[1]] == ["Hi", "You said: Hi", "Bye"]
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert notes == []


def test_commands() -> None:
    session, llm, out, notes = converse(
        "Hi", "/clear", "Again", "/help", "/wat", "/exit", "never read", system="Be kind."
    )
    assert [message["content"] for message in llm.conversations[1]] == ["Be kind.", "Again"]
    assert notes[0] == "(forgotten)"
    assert "/exit" in notes[1]
    assert notes[2].startswith("unknown command /wat\n")
    assert "never read" not in out
    assert session.messages[0] == {"role": "system", "content": "Be kind."}


def test_interrupt_stops_the_answer_and_keeps_what_was_said() -> None:
    session, _, out, notes = converse("interrupt", "Hi")
    assert out == "You said: \nYou said: Hi\n"
    assert notes == [" (stopped)"]
    assert session.messages[1] == {"role": "assistant", "content": "You said: "}


def test_interrupt_at_the_prompt_does_not_leave() -> None:
    _, _, out, notes = converse(KeyboardInterrupt, "Hi")
    assert out == "You said: Hi\n"
    assert "Ctrl-D" in notes[0]


@pytest.mark.parametrize("line", [KeyboardInterrupt, "interrupt"])
def test_interrupt_ends_a_session_on_a_pipe(line: str | type[BaseException]) -> None:
    with pytest.raises(KeyboardInterrupt):
        converse(line, "Hi", interactive=False)


def test_message_that_cannot_be_answered_is_taken_back() -> None:
    session, llm, _, notes = converse("Hi", "too long", "fail", "Bye")
    assert notes[0] == "error: the prompt has 5000 tokens (/clear starts over)"
    assert notes[1].startswith("error: request 1 failed")
    assert [message["content"] for message in llm.conversations[-1]] == ["Hi", "You said: Hi", "Bye"]
    assert len(session.messages) == 4
