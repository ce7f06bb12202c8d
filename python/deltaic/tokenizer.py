"""Text to token ids and back, from a checkpoint's tokenizer.json, or its vocab.json and merges.txt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Backend

from deltaic import _core
from deltaic.checkpoint import one_line, read_json
from deltaic.qwen_tokenizer import VOCAB_FILE, has_vocab_and_merges, read_vocab_and_merges

TOKENIZER_FILE = "tokenizer.json"
_NFC_SHRINKS = 3  # at most: three Hangul letters of 3 bytes each become one syllable of 3


class Tokenizer:
    """A byte-level tokenizer: each token id stands for a fixed string of bytes.

    `folder` is a checkpoint folder. ValueError when its tokenizer is missing or cannot be read, Unsupported when
    its tokens are not bytes (its decoder is not ByteLevel).
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self._backend = _read_backend(folder)
        self.config = read_json(folder / "tokenizer_config.json")
        self._added = {i: token.content for i, token in self._backend.get_added_tokens_decoder().items()}
        special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        self._special_ids = frozenset(i for i, content in self._added.items() if content in special)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._max_token_bytes: int | None = None  # counted when first needed
        self.eos_token_id = self.token_to_id(_content(self.config.get("eos_token")))
        self.bos_token_id = self.token_to_id(_content(self.config.get("bos_token")))
        self.pad_token_id = self.token_to_id(_content(self.config.get("pad_token")))

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, added ones included; the model's logits may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Return the named special tokens, as chat templates read them."""
        names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        return {name: token for name in names if (token := _content(self.config.get(name))) is not None}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their ids.

        ValueError for a lone surrogate, which has no UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds a lone surrogate at character {error.start}, which is not text") from None
        # Of the library's ways to encode this one lets other threads run meanwhile.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def min_num_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` cannot do without, from its length alone; 0 when nothing is known."""
        if self._max_token_bytes is None:
            self._max_token_bytes = self._longest()
        if not self._max_token_bytes:
            return 0
        return -(-len(text.encode("utf-8", "replace")) // self._max_token_bytes)

    def _longest(self) -> int:
        """Return the most bytes of a text that one token can stand for; 0: any number."""
        normalizer = type(self._backend.normalizer).__name__
        added = self._backend.get_added_tokens_decoder().values()
        if normalizer not in ("NoneType", "NFC") or any(token.lstrip or token.rstrip for token in added):
            return 0
        longest = max(len(_to_bytes(token)) for token in self._backend.get_vocab(with_added_tokens=True))
        return longest * (_NFC_SHRINKS if normalizer == "NFC" else 1)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; none for an id of the padding behind the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _to_bytes(self.id_to_token(token_id))
        return known

    def token_text(self, token_id: int) -> str | None:
        """Return the text of a token that is whole characters; None for one that holds a part of a character."""
        if token_id not in self._texts:
            try:
                self._texts[token_id] = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                self._texts[token_id] = None
        return self._texts[token_id]

    def token_to_id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None for an id without one."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that write `words`, each at the start of a text and after a space."""
        sequences: list[list[int]] = []
        for i, word in enumerate(words):
            bare = self.encode(word.lstrip(), add_special_tokens=False)
            if not bare:
                raise ValueError(f"bad_words[{i}] must hold more than spaces, got {word!r}")
            spaced = self.encode(" " + word.lstrip(), add_special_tokens=False)
            sequences.append(bare)
            if spaced[-len(bare) :] != bare:  # else the first sequence covers it
                sequences.append(spaced)
        return sequences


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """Return the folder's tokenizer; None when it has neither a tokenizer.json nor vocab.json and merges.txt."""
    folder = Path(folder)
    return Tokenizer(folder) if (folder / TOKENIZER_FILE).is_file() or has_vocab_and_merges(folder) else None


def _read_backend(folder: Path) -> _Backend:
    path = folder / TOKENIZER_FILE
    is_split = not path.is_file() and has_vocab_and_merges(folder)
    if not path.is_file() and not is_split:
        raise ValueError(f"{path} does not exist: without it a model takes and returns token ids only")
    try:
        if is_split:
            return read_vocab_and_merges(folder)
        backend = _Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for any content it cannot use
        raise ValueError(f"{folder / VOCAB_FILE if is_split else path} cannot be read: {one_line(error)}") from error
    decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder")
    if not _is_byte_level(decoder):
        kind = decoder.get("type") if isinstance(decoder, Mapping) else decoder
        raise _core.Unsupported(f"{path} has the decoder {kind!r}; deltaic reads byte-level tokenizers (ByteLevel)")
    return backend


def _content(token: object) -> str | None:
    """Return a token's text; tokenizer_config.json writes a string or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, Mapping):
        return False
    if decoder.get("type") == "Sequence":
        decoders = decoder.get("decoders") or []
        return len(decoders) == 1 and _is_byte_level(decoders[0])
    return decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's character for each byte: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str | None) -> bytes:
    """Return the bytes of a token; one with a character outside the byte alphabet stands for itself."""
    if token is None:
        return b""
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode("utf-8")
