from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltaic.tokenizer import Tokenizer, load_tokenizer

# What the Qwen2TokenizerFast of transformers 4.57.3 gives for these files.
GOLDEN = {
    "Hello there, it's 12345 o'clock!\n\n  What?": [
        3449,
        415,
        11,
        314,
        389,
        220,
        16,
        17,
        18,
        19,
        20,
        267,
        3043,
        1716,
        220,
        1367,
        30,
    ],
    "I'LL we'Re\t\ttabs   end  ": [40, 6, 43, 43, 354, 6, 49, 68, 197, 197, 83, 656, 82, 220, 220, 1052, 220, 220],
    "<think>x</think> \r\n\r\n a": [4095, 87, 27, 14, 438, 561, 29, 220, 201, 198, 201, 198, 258],
}


def write_split(folder: Path, default_model: Path, first_id: int | None = None) -> Path:
    """Write the bundled tokenizer as vocab.json, merges.txt and added tokens."""
    model = json.loads((default_model / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    first = len(model["vocab"]) if first_id is None else first_id
    added = {
        str(first + i): {"content": content, "special": content != "<think>"}
        for i, content in enumerate(["<|im_start|>", "<|im_end|>", "<think>"])
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "eos_token": "<|im_end|>"})
    )
    return folder


@pytest.mark.parametrize("text", GOLDEN)
def test_vocab_and_merges_give_what_transformers_gives(tmp_path: Path, default_model: Path, text: str) -> None:
    tokenizer = load_tokenizer(write_split(tmp_path, default_model))
    assert tokenizer is not None
    assert tokenizer.encode(text) == GOLDEN[text]
    assert tokenizer.decode(GOLDEN[text]) == text


def test_vocab_and_merges_cut_words_as_the_bundled_tokenizer_does(
    tmp_path: Path, default_model: Path, tokenizer: Tokenizer
) -> None:
    split = Tokenizer(write_split(tmp_path, default_model))
    text = "Once upon a time, there was a little dog; it's 42!\n\n  Étoile 日本語"
    assert split.encode(text) == tokenizer.encode(text)
    assert split.special_token_ids == {4093, 4094}
    assert split.eos_token_id == 4094


def test_an_added_token_with_another_id_is_refused(tmp_path: Path, default_model: Path) -> None:
    with pytest.raises(ValueError, match=r"the added token '<\|im_start\|>' has id 5000, 4093 is free"):
        load_tokenizer(write_split(tmp_path, default_model, first_id=5000))


def test_vocab_without_merges_is_no_tokenizer(tmp_path: Path, default_model: Path) -> None:
    (write_split(tmp_path, default_model) / "merges.txt").unlink()
    assert load_tokenizer(tmp_path) is None
