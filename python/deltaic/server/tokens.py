"""/tokenize and /detokenize: text to token ids and back, as the model sees them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from deltaic.server.chat_answer import render
from deltaic.server.errors import client_errors
from deltaic.server.protocol import DetokenizeBody, Text, TokenizeBody, Tokens
from deltaic.server.serving import Serving
from deltaic.server.token_text import token_name


def tokens_router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Tokens:
        """Return the ids of a prompt, or of a conversation."""
        serving.check_model(body.model)
        with client_errors():
            return await asyncio.to_thread(_tokenize, serving, body)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Text:
        """Return the text of token ids, special tokens written out."""
        serving.check_model(body.model)
        with client_errors():
            for i, token_id in enumerate(body.tokens):
                serving.llm.inputs.check_token_id(f"tokens[{i}]", token_id)
            return Text(prompt=serving.llm.get_tokenizer().decode(body.tokens))

    return router


def _tokenize(serving: Serving, body: TokenizeBody) -> Tokens:
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("prompt or messages must be given, and not both")
    tokenizer = serving.llm.get_tokenizer()
    text, special = body.prompt, body.add_special_tokens is not False
    if text is None:
        text, special = render(serving.llm, body), body.add_special_tokens is True
    serving.llm.inputs.check_text(text)
    token_ids = tokenizer.encode(text, special)
    return Tokens(
        count=len(token_ids),
        max_model_len=serving.llm.max_model_len,
        tokens=token_ids,
        token_strs=[token_name(tokenizer, i) for i in token_ids] if body.return_token_strs else None,
    )
