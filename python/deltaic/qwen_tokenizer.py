"""The tokenizer of Qwen checkpoints without a tokenizer.json: vocab.json, merges.txt and their added tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from deltaic.checkpoint import read_json

VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
# How Qwen2 and later cut a text into words: contractions, letters, single digits, other characters, white space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


def has_vocab_and_merges(folder: Path) -> bool:
    return (folder / VOCAB_FILE).is_file() and (folder / MERGES_FILE).is_file()


def read_vocab_and_merges(folder: Path) -> Tokenizer:
    """Return the tokenizer. ValueError for an added token whose id is not the next free one."""
    vocab, merges = BPE.read_file(str(folder / VOCAB_FILE), str(folder / MERGES_FILE))
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    for token_id, token in sorted(added.items(), key=lambda item: int(item[0])):
        content = token["content"]
        flags = {name: bool(token.get(name, False)) for name in _FLAGS}
        tokenizer.add_tokens([AddedToken(content, **flags)])
        if tokenizer.token_to_id(content) != int(token_id):
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: the added token {content!r} has id {token_id}, "
                f"{tokenizer.token_to_id(content)} is free"
            )
    return tokenizer
