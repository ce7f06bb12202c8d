from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deltaic import _core
from deltaic.checkpoint import read_json
from deltaic.tokenizer import Tokenizer, load_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

IM_START, IM_END, END_OF_TEXT = 4094, 4095, 4093


def test_prompts_become_the_ids_of_the_golden_file(tokenizer: Tokenizer, default_model: Path) -> None:
    for case in read_json(default_model / "golden.json")["prompts"]:
        assert tokenizer.encode(case["prompt"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["prompt"]


@pytest.mark.parametrize("text", ["", " ", "naïve café", "ď 🌶 👩‍👩‍👧‍👦", "日本語\n\n\tx", "\x00\x7f"])
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_read_from_text_and_skipped_on_demand(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (IM_START, IM_END)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi"
    assert tokenizer.special_token_ids == {END_OF_TEXT, IM_START, IM_END}
    assert tokenizer.special_tokens_map == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (IM_END, END_OF_TEXT, None)


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud83d")


def test_token_text_is_of_whole_characters_only(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        is_whole = data.decode("utf-8", "ignore").encode() == data
        for _ in range(2):  # computed, then remembered
            assert tokenizer.token_text(token_id) == (data.decode() if is_whole else None)


def test_token_bytes_are_exact_for_parts_of_a_character(tokenizer: Tokenizer) -> None:
    """D90: a token that holds part of a character has bytes, though it has no text."""
    for text in ("🌶", "ď", "👩‍👩‍👧", "true", " true"):
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert all(tokenizer.token_bytes(i) for i in ids)


def test_ids_behind_the_vocabulary_have_no_bytes(tokenizer: Tokenizer) -> None:
    """D106: the padded rows of an embedding are ids that stand for nothing."""
    for token_id in (tokenizer.vocab_size, 151_935, 2**31 - 1, 5279552648203111001, -1):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.id_to_token(token_id) is None
        assert tokenizer.decode([token_id]) == ""


def test_every_token_decodes_as_the_library_does(tokenizer: Tokenizer, default_model: Path) -> None:
    backend = Backend.from_file(str(default_model / "tokenizer.json"))
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.decode([token_id]) == backend.decode([token_id], skip_special_tokens=False)


def save_byte_level(folder: Path, added: list[AddedToken]) -> Backend:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(sorted(alphabet))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added)
    backend.save(str(folder / "tokenizer.json"))
    return backend


def test_added_tokens_outside_the_byte_alphabet_stand_for_themselves(tmp_path: Path) -> None:
    backend = save_byte_level(
        tmp_path, [AddedToken("<｜end｜>", special=True), AddedToken("two words"), AddedToken("日本")]
    )
    tokenizer = Tokenizer(tmp_path)
    for text in ("<｜end｜>", "two words", "日本", "日"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.special_token_ids == {256}


def test_bad_words_are_written_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    for word in ("berry", " berry", "the sea", "girl"):
        for sequence in (tokenizer.encode(word.strip()), tokenizer.encode(" " + word.strip())):
            assert sequence in tokenizer.bad_words_token_ids([word])
    with pytest.raises(ValueError, match=r"bad_words\[1\]"):
        tokenizer.bad_words_token_ids(["berry", "  "])


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}'])
def test_broken_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(_core.Unsupported, match="'WordPiece'"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_broken_json_names_the_file(tmp_path: Path, default_model: Path, content: str) -> None:
    shutil.copy(default_model / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path)


def test_number_of_tokens_is_bounded_by_the_length(tokenizer: Tokenizer) -> None:
    for text in ("", "a", "Once upon a time", " " * 500, "🌶" * 50, "\u1112\u1161\u11ab" * 50, "<|im_end|>" * 20):
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.min_num_tokens("a" * 10_000) > 100
