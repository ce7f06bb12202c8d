"""Tokens and their log probabilities in JSON, which knows neither bytes nor infinity."""

from __future__ import annotations

from typing import Any

from deltaic.outputs import CompletionOutput
from deltaic.server.protocol import ChatLogprob, TopLogprob
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


def chat_logprobs(tokenizer: Tokenizer, completion: CompletionOutput, num_top: int) -> list[ChatLogprob]:
    """Return an entry for each token of an output that has log probabilities, with num_top of the best."""
    content = []
    for token_id, entry in zip(completion.token_ids, completion.logprobs or [], strict=True):
        best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:num_top]
        content.append(
            ChatLogprob(
                **_token(tokenizer, token_id, entry[token_id].logprob),
                top_logprobs=[TopLogprob(**_token(tokenizer, other, known.logprob)) for other, known in best],
            )
        )
    return content


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
