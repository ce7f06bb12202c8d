from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltaic.chat_session import ChatSession, PlainDisplay
from deltaic.outputs import CompletionOutput, RequestMetrics, RequestOutput
from deltaic.sampling_params import SamplingParams


class EchoLLM:
    """Answer with what was said last; stop, refuse or fail on demand."""

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.options: list[dict[str, Any]] = []

    def render_chat(self, messages: list[dict[str, str]], **options: Any) -> str:
        if not isinstance(messages, list):
            raise TypeError("messages must be a list")
        return "<think>" if messages[-1]["content"] == "think" else ""

    def stream_outputs(
        self, messages: list[dict[str, str]], params: SamplingParams, **options: Any
    ) -> Iterator[RequestOutput]:
        self.conversations.append([dict(message) for message in messages])
        self.params.append(params)
        self.options.append(options)
        text = messages[-1]["content"]
        if text == "too long":
            raise ValueError("the prompt has 5000 tokens")
        pieces = list(self._say(text))
        metrics = RequestMetrics(0.0, first_token_time=0.25, last_token_time=1.25, num_generation_tokens=11)
        for i, piece in enumerate(pieces):
            if isinstance(piece, BaseException):
                raise piece
            last = i == len(pieces) - 1
            completion = CompletionOutput(0, piece, [7], finish_reason="stop" if last else None)
            yield RequestOutput("r", "", [1, 2, 3], [completion], last, num_cached_tokens=2, metrics=metrics)

    @staticmethod
    def _say(text: str) -> Iterator[str | BaseException]:
        if text == "think first":
            yield "<think>Hm."
            yield KeyboardInterrupt()
        elif text == "think":
            yield "Hm.</thi"
            yield "nk>\n\nSo: "
        elif text != "at once":
            yield "You said: "
        if text == "at once":
            yield KeyboardInterrupt()
        if text == "interrupt":
            yield KeyboardInterrupt()
        if text == "fail":
            yield RuntimeError("request 1 failed")
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
    display = PlainDisplay(out)
    session = ChatSession(llm, SamplingParams(), read=read, display=display, note=note, **options)  # type: ignore[arg-type]
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
    assert notes == ["(stopped)"]
    assert session.messages[1] == {"role": "assistant", "content": "You said: "}


def test_interrupt_before_the_first_word_takes_the_message_back() -> None:
    session, llm, _, notes = converse("Hi", "at once", "Bye")
    assert notes == ["(stopped; the message is taken back)"]
    assert [message["content"] for message in llm.conversations[-1]] == ["Hi", "You said: Hi", "Bye"]
    assert all(message["content"] for message in session.messages)
    session, _, _, _ = converse("think first", "/retry")  # a thought alone is no answer
    assert session.messages == []


class ImpatientDisplay(PlainDisplay):
    """A person who presses Ctrl-C again while an answer ends, or while it begins."""

    def end(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().end()
        signal.raise_signal(signal.SIGINT)


def test_further_interrupts_while_an_answer_ends_do_not_leave() -> None:
    typed = iter(["interrupt", "Hi"])
    out, notes = io.StringIO(), list[str]()

    def read() -> str:
        for line in typed:
            return line
        raise EOFError

    session = ChatSession(
        EchoLLM(),  # type: ignore[arg-type]
        SamplingParams(),
        read=read,
        display=ImpatientDisplay(out),
        note=notes.append,
    )
    session.run()
    assert out.getvalue() == "You said: \nYou said: Hi\n"
    assert notes == ["(stopped)"]
    assert [turn["content"] for turn in session.turns] == ["interrupt", "You said: ", "Hi", "You said: Hi"]


def test_interrupt_before_an_answer_begins_takes_the_message_back() -> None:
    class Slow(EchoLLM):
        def render_chat(self, messages: list[dict[str, str]], **options: Any) -> str:
            raise RuntimeError("not reached")

    typed: list[str | type[BaseException]] = ["Hi"]
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if len(notes) == 1:
            raise KeyboardInterrupt

    def read() -> str:
        if not typed:
            raise EOFError
        return str(typed.pop())

    session = ChatSession(Slow(), SamplingParams(), read=read, note=note)  # type: ignore[arg-type]
    session.run()
    assert session.turns == []
    assert notes == ["error: not reached (/clear starts over)", "(Ctrl-D or /exit to leave)"]


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


def test_reasoning_is_neither_shown_on_a_pipe_nor_lost() -> None:
    session, _, out, _ = converse("think")
    assert out == "So: think\n"
    assert session.messages[1] == {"role": "assistant", "reasoning_content": "Hm.", "content": "So: think"}


def test_retry_and_undo() -> None:
    session, llm, _, notes = converse("Hi", "/retry", "Bye", "/undo", "/undo", "/undo", "/retry")
    assert [len(messages) for messages in llm.conversations] == [1, 1, 3]
    assert session.messages == []
    assert notes[:2] == ["(taken back: Hi)", "(taken back: Bye)"]
    assert notes[-1] == "(there is no message)"


def test_system_prompt_is_set_and_taken_away() -> None:
    _, llm, _, notes = converse("/system Be brief.", "Hi", "/system", "/system -", "Ho")
    assert [messages[0]["role"] for messages in llm.conversations] == ["system", "user"]
    assert notes == ["system: Be brief.", "system: Be brief.", "system: none"]


def test_parameters_are_set_and_shown() -> None:
    _, llm, _, notes = converse(
        "/set temperature 0.5", "/set max_tokens 7", "/set seed none", "/set ignore_eos on", "/think off", "Hi", "/set"
    )
    params = llm.params[0]
    assert (params.temperature, params.max_tokens, params.seed, params.ignore_eos) == (0.5, 7, None, True)
    assert llm.options[0] == {"chat_template_kwargs": {"enable_thinking": False}}
    assert notes[0] == "temperature 0.5"
    assert "max_tokens 7" in notes[-1].splitlines()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set colour 5", "there is no colour to set; there are temperature, "),
        ("/set temperature hot", "temperature must be a number, got 'hot'"),
        ("/set temperature 9", "temperature must be a finite number in [0, 2]"),
        ("/set max_tokens 1.5", "max_tokens must be an integer, got '1.5'"),
        ("/set temperature", "temperature must be"),
        ("/think", "/think must be on or off, got ''"),
        ("/save", "/save needs the name of a file"),
        ("/load", "/load needs the name of a file"),
        ("/load /no/such/file", "error: /no/such/file cannot be read: No such file or directory"),
        ("/load /", "error: / cannot be read: Is a directory"),
        ("/save /no/such/file", "error: /no/such/file cannot be written: No such file or directory"),
    ],
)
def test_wrong_commands_say_why_and_change_nothing(line: str, words: str) -> None:
    _, llm, _, notes = converse(line, "Hi")
    assert notes[0].startswith("error: ")
    assert words in notes[0]
    assert llm.params == [SamplingParams()]


def test_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    session, _, _, notes = converse("Hi", f"/save {path}", system="Be kind.")
    assert json.loads(path.read_text()) == session.messages
    _, llm, _, _ = converse(f"/load {path}", "Bye")
    assert llm.conversations[0] == [*session.messages, {"role": "user", "content": "Bye"}]
    assert notes == [f"(2 messages in {path})"]
    (tmp_path / "bad.json").write_text("{")
    for content in (b"{", b"\xff", b"[" * 1_000_000):
        (tmp_path / "bad.json").write_bytes(content)
        assert "bad.json is no conversation: " in converse(f"/load {tmp_path / 'bad.json'}", "/exit")[3][0]


def test_message_of_parts_is_answered_again_as_it_was(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    path = tmp_path / "parts.json"
    path.write_text(json.dumps([{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes?"}]))
    _, llm, _, notes = converse(f"/load {path}", "/retry")
    assert llm.conversations == [[{"role": "user", "content": parts}]]
    assert notes[1] == "(taken back: Hi there)"


def test_conversation_that_is_no_text_is_saved_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "surrogate.json"
    messages = [{"role": "user", "content": "\ud800 🐻"}]
    path.write_text(json.dumps(messages))
    converse(f"/load {path}", f"/save {path}")
    assert json.loads(path.read_text(encoding="utf-8")) == messages


def test_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    session, _, _, _ = converse("Hi", "/save ~/talk.json", "/clear", "/load ~/talk.json")
    assert json.loads((tmp_path / "talk.json").read_text()) == session.messages != []


def test_figures_of_an_answer() -> None:
    _, _, _, notes = converse("/stats on", "Hi", "/stats off", "Bye")
    assert notes == ["(3 prompt tokens, 2 of them cached, 11 new, the first after 250 ms, then 10.0 tokens/s)"]
