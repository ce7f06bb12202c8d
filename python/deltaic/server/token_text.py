"""Tokens and their log probabilities in JSON, which knows neither bytes nor infinity."""

from __future__ import annotations

from deltaic.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # OpenAI's for a token that cannot come


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; for one that is a part of a character, `bytes:` and its bytes."""
    token = tokenizer.token_bytes(token_id)
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
