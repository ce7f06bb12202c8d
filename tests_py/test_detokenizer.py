"""Text that grows token by token (D85, D92, D93, D94, D96)."""

from __future__ import annotations

import random
from pathlib import Path

import deltaic
import pytest
from deltaic.detokenizer import Detokenizer, IncrementalDecoder, find_stop
from deltaic.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

TOKENIZER = Tokenizer(Path(deltaic.__file__).parent / "default_model")
BYTE_TOKENS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}


def byte_ids(text: str) -> list[int]:
    """Return ids of single-byte tokens."""
    return [BYTE_TOKENS[bytes([byte])] for byte in text.encode()]


def decode_one_by_one(ids: list[int], prompt: list[int] | None = None, skip: bool = False) -> list[str]:
    decoder = IncrementalDecoder(TOKENIZER, prompt or [], skip_special_tokens=skip)
    return [*map(decoder.decode, ids), decoder.flush()]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("highest", [256, 4095, 4200])
def test_ten_thousand_random_tokens_decode_as_all_at_once(default_model: Path, highest: int, skip: bool) -> None:
    """D96: no exception, and the same text as the tokenizers library makes of the whole."""
    backend = Backend.from_file(str(default_model / "tokenizer.json"))
    rng = random.Random(highest)
    for _ in range(5):
        ids = [rng.randint(0, highest) for _ in range(10_000)]
        assert "".join(decode_one_by_one(ids, skip=skip)) == backend.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 255)), st.integers(0, 4))
def test_bytes_in_any_order_decode_as_all_at_once(data: list[int], num_stray: int) -> None:
    ids = [BYTE_TOKENS[bytes([byte])] for byte in data]
    deltas = decode_one_by_one(ids)
    assert "".join(deltas) == bytes(data).decode("utf-8", "replace")
    # A character that its bytes complete is never preceded by a replacement of its own parts.
    assert "".join(decode_one_by_one(ids[num_stray:])) == bytes(data[num_stray:]).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["ď", "🌶", "👩‍👩‍👧‍👦", "a🌶️b"])
def test_parts_of_a_character_are_withheld(text: str) -> None:
    """D96: characters split over steps."""
    deltas = decode_one_by_one(byte_ids(text))
    assert "".join(deltas) == text
    assert all(set(delta) <= set(text) for delta in deltas)


def test_replacement_character_stands_only_where_bytes_can_be_no_character() -> None:
    pepper = byte_ids("🌶")
    assert decode_one_by_one(pepper[:3]) == ["", "", "", "\ufffd"]  # incomplete: only at the very end
    assert decode_one_by_one([*pepper[:2], *byte_ids("x")]) == ["", "", "\ufffdx", ""]  # broken off
    assert decode_one_by_one([*pepper[2:], *byte_ids("ok")]) == ["\ufffd", "\ufffd", "o", "k", ""]  # no start
    assert decode_one_by_one([*byte_ids("é")[:1], *pepper]) == ["", "\ufffd", "", "", "🌶", ""]  # recovered at once


@given(st.text(min_size=1), st.data())
@settings(max_examples=200)
def test_character_that_the_prompt_began_is_continued(text: str, data: st.DataObject) -> None:
    """D96: the prompt may end within a character."""
    ids = byte_ids(text)
    cut = data.draw(st.integers(0, len(ids)))
    head = text.encode()[:cut].decode("utf-8", "ignore")
    assert head + "".join(decode_one_by_one(ids[cut:], prompt=ids[:cut])) == text


def test_special_tokens_are_skipped_by_flag() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\nHi<|im_end|>")
    assert "".join(decode_one_by_one(ids, skip=True)) == "user\nHi"
    assert "".join(decode_one_by_one(ids, skip=False)) == "<|im_start|>user\nHi<|im_end|>"


@pytest.mark.parametrize(
    ("text", "num_new", "stop", "found"),
    [
        (" The user is a", 5, ["a", "is"], ("is", 10, 12)),
        (" The user is a", 5, ["is", "a"], ("is", 10, 12)),
        ("abc", 3, ["abc", "b"], ("b", 1, 2)),
        ("abc", 3, ["b", "abc"], ("b", 1, 2)),
        ("ab", 2, ["ab", "b"], ("ab", 0, 2)),
        ("ab", 2, ["b", "ab"], ("b", 1, 2)),
        ("hello world.", 12, ["."], (".", 11, 12)),
        ("aXbX", 2, ["X"], ("X", 3, 4)),  # an old match is old
        ("##", 1, ["###"], None),
        ("x###", 1, ["###"], ("###", 1, 4)),
        ("abc", 3, ["abcd"], None),
        ("abc", 0, ["c"], None),
        ("", 0, ["c"], None),
    ],
)
def test_stop_string_completed_first_wins(
    text: str, num_new: int, stop: list[str], found: tuple[str, int, int] | None
) -> None:
    """D92: by where it ends, then by its place in the list."""
    assert find_stop(text, num_new, stop) == found


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_first_completed_stop_does_not_depend_on_how_the_text_arrives(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    at_once = find_stop(text, len(text), stop)
    stepwise, end = None, 0
    while end < len(text) and stepwise is None:
        step = data.draw(st.integers(1, len(text) - end))
        end += step
        stepwise = find_stop(text[:end], step, stop)
    assert at_once == stepwise


def run(detokenizer: Detokenizer, ids: list[int]) -> tuple[list[str], str | None]:
    """Append all ids; return the deltas and the stop string."""
    deltas, stop = [], None
    for token_id in ids:
        stop = detokenizer.append(token_id)
        deltas.append(detokenizer.take_delta())
        if stop is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    return deltas, stop


def test_text_ends_before_or_behind_the_stop_string() -> None:
    ids = TOKENIZER.encode("hello world. And more")
    detokenizer = Detokenizer(TOKENIZER, stop=["."])
    assert run(detokenizer, ids)[1] == "."
    assert detokenizer.text == "hello world"
    detokenizer = Detokenizer(TOKENIZER, stop=["."], include_stop=True)
    deltas, stop = run(detokenizer, ids)
    assert ("".join(deltas), stop, detokenizer.text) == ("hello world.", ".", "hello world.")


def test_stream_never_shows_a_part_of_the_stop_string() -> None:
    """D93: what may become the stop string is held back, and comes at the end when it does not."""
    detokenizer = Detokenizer(TOKENIZER, stop=["###END"])
    deltas, stop = run(detokenizer, byte_ids("text ###END more"))
    assert ("".join(deltas), stop, detokenizer.text) == ("text ", "###END", "text ")
    assert not any("#" in delta for delta in deltas)

    detokenizer = Detokenizer(TOKENIZER, stop=["###END"])
    deltas, stop = run(detokenizer, byte_ids("text ###EN"))
    assert ("".join(deltas), stop, detokenizer.text) == ("text ###EN", None, "text ###EN")


@given(
    st.lists(st.integers(0, 4095), max_size=60),
    st.lists(st.text(min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 8),
    st.booleans(),
)
@settings(max_examples=300)
def test_deltas_add_up_to_the_text(ids: list[int], stop: list[str], include: bool, min_tokens: int, skip: bool) -> None:
    """D93: whatever stops it; without a stop string it is the decoding of all tokens."""
    detokenizer = Detokenizer(
        TOKENIZER, stop=stop, include_stop=include, min_tokens=min_tokens, skip_special_tokens=skip
    )
    deltas, found = run(detokenizer, ids)
    assert "".join(deltas) == detokenizer.text == detokenizer.safe_text()
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip)
    if found is None:
        assert detokenizer.text == whole
    else:
        assert found in stop
        assert whole.startswith(detokenizer.text)
        assert detokenizer.text.endswith(found) or not include


def test_stop_strings_are_ignored_within_min_tokens() -> None:
    """D85: five tokens come whatever they hold, the sixth may stop."""
    detokenizer = Detokenizer(TOKENIZER, stop=["a"], min_tokens=5)
    deltas, stop = run(detokenizer, byte_ids("aaaaabac"))
    assert ("".join(deltas), stop) == ("aaaaab", "a")
    assert run(Detokenizer(TOKENIZER, stop=["a"], min_tokens=5), byte_ids("aaaaa"))[1] is None


def test_empty_stop_string_is_refused() -> None:
    """D94: it would match everywhere."""
    with pytest.raises(ValueError, match="stop"):
        Detokenizer(TOKENIZER, stop=["a", ""])
