from __future__ import annotations

import pytest
from deltaic.reasoning import ReasoningSplitter, opens_reasoning
from hypothesis import given
from hypothesis import strategies as st


def split(pieces: list[str], *, opened: bool, until: str | None = None) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened, until=until)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.end()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("Hello.", False, "", "Hello."),
        ("  Hello. ", False, "", "  Hello. "),
        ("", False, "", ""),
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\n<think>Hm.</think>Yes.", False, "Hm.", "Yes."),
        ("Hm.\n\nWell.\n</think>\n\nYes.\n", True, "Hm.\n\nWell.", "Yes.\n"),
        ("Hm, cut", True, "Hm, cut", ""),
        ("Hm </thin", True, "Hm </thin", ""),
        ("Hm </thing> </think> x", True, "Hm </thing>", "x"),
        ("</think>x", True, "", "x"),
        ("<think></think>", False, "", ""),
        ("<thin", False, "", "<thin"),
        ("<thing>", False, "", "<thing>"),
        ("I <think> so</think>", False, "", "I <think> so</think>"),
        ("a</think>b<think>c</think>d", True, "a", "b<think>c</think>d"),
    ],
)
def test_texts(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert split([text], opened=opened) == (reasoning, content)
    assert split(list(text), opened=opened) == (reasoning, content)


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<a>", "<", "</", "think", ">", "</thi"]), max_size=12
    ),
    st.booleans(),
    st.sampled_from([None, "<a>", "think>"]),
    st.integers(1, 5),
)
def test_cuts_do_not_matter(words: list[str], opened: bool, until: str | None, size: int) -> None:
    text = "".join(words)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    whole = split([text], opened=opened, until=until)
    assert split(pieces, opened=opened, until=until) == whole
    assert split(words, opened=opened, until=until) == whole


def test_tag_that_ends_the_reasoning_too() -> None:
    assert split(["Hm. <call>x</think>"], opened=True, until="<call>") == ("Hm.", "<call>x</think>")
    assert split(["Hm.</think> <call>x"], opened=True, until="<call>") == ("Hm.", "<call>x")


def test_prompts_that_open_the_reasoning() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", "")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", "")
    assert not opens_reasoning("<think> is a tag", "")
    assert opens_reasoning("... <think> I was", "<think> I was")
    assert not opens_reasoning("... <think> I was </think> so", "<think> I was </think> so")
