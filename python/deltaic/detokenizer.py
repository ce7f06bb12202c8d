"""Token ids to text, one at a time: no broken characters, no text past a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from deltaic.tokenizer import Tokenizer

_MAX_UTF8_BYTES = 4


class IncrementalDecoder:
    """Decode token ids one by one.

    A character whose bytes are not complete is withheld; bytes that cannot be part of any become U+FFFD. What
    `decode` and the last `flush` return, concatenated, is the decoding of all ids at once. The prompt's last bytes,
    when they are the start of a character, are continued by the first token.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._pending = b""  # the start of a character
        self._decode(self._tail(prompt_token_ids))

    def _tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the prompt's last bytes, enough to hold any character."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _MAX_UTF8_BYTES:
                break
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
        return tail

    def decode(self, token_id: int) -> str:
        """Return the text that the token completes."""
        if token_id in self._skipped:
            return ""
        if not self._pending and (text := self._tokenizer.token_text(token_id)) is not None:
            return text
        return self._decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD for the incomplete character at the end, or nothing."""
        return self._decode(b"", is_last=True)

    def _decode(self, added: bytes, is_last: bool = False) -> str:
        data = self._pending + added
        text, num_decoded = codecs.utf_8_decode(data, "replace", is_last)
        self._pending = data[num_decoded:]
        return text


def find_stop(text: str, num_new_chars: int, stop: Sequence[str]) -> tuple[str, int, int] | None:
    """Return the stop string that is completed first by the last `num_new_chars` of `text`, with its start and end.

    Of several completed by the same character the first in the list wins.
    """
    best: tuple[str, int, int] | None = None
    for candidate in stop:
        start = text.find(candidate, max(len(text) - num_new_chars - len(candidate) + 1, 0))
        if start >= 0 and (best is None or start + len(candidate) < best[2]):
            best = (candidate, start, start + len(candidate))
    return best


class Detokenizer:
    """The text of one completion while it grows, and where a stop string ends it.

    `text` never holds part of a stop string's match (unless include_stop) nor half a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        if any(not candidate for candidate in stop):
            raise ValueError("stop must not hold an empty string, got ''")
        self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = list(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # Characters that may turn out to be the start of a stop string.
        self._num_held = 0 if include_stop else max((len(candidate) - 1 for candidate in stop), default=0)
        self._num_tokens = 0
        self._num_returned = 0
        self._finished = False
        self.text = ""

    def append(self, token_id: int) -> str | None:
        """Take one token; return the stop string that it completes, after which nothing may be appended.

        The first min_tokens tokens complete none.
        """
        new_text = self._decoder.decode(token_id)
        text, self.text = self.text, ""  # CPython appends in place to a text that nobody else holds
        text += new_text
        self.text = text
        self._num_tokens += 1
        if not self._stop or not new_text or self._num_tokens <= self._min_tokens:
            return None
        found = find_stop(self.text, len(new_text), self._stop)
        if found is None:
            return None
        candidate, start, end = found
        self.text = self.text[: end if self._include_stop else start]
        self._finished = True
        return candidate

    def skip(self) -> None:
        """Count a token whose text is left out: the stop token."""
        self._num_tokens += 1

    def finish(self) -> None:
        """End the text, for another reason than a stop string: what was withheld belongs to it now."""
        if not self._finished:
            self.text += self._decoder.flush()
            self._finished = True

    def take_delta(self) -> str:
        """Return the text since the last call, without the characters held back until the end."""
        end = len(self.text) if self._finished else len(self.text) - self._num_held
        start = self._num_returned
        if end <= start:
            return ""
        self._num_returned = end
        return self.text[start:end]

    def safe_text(self) -> str:
        """Return all text that a stop string can no longer take back."""
        return self.text if self._finished else self.text[: max(len(self.text) - self._num_held, 0)]
