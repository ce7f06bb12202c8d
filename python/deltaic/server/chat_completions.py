"""/v1/chat/completions: the answer to a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from deltaic import _core
from deltaic.async_llm import AsyncLLM, OutputStream
from deltaic.input_processor import EngineInput
from deltaic.outputs import CompletionOutput
from deltaic.server.errors import client_errors
from deltaic.server.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionBody,
    ChatCompletionChunk,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatOptions,
    TokenizeBody,
    TopLogprob,
)
from deltaic.server.reasoning import ReasoningSplitter, opens_reasoning
from deltaic.server.responses import EventStream, unless_disconnected
from deltaic.server.serving import Serving, TokenCounts, now, sampling_params
from deltaic.server.token_text import finite, token_name
from deltaic.tokenizer import Tokenizer


def chat_completions_router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        """Answer a conversation; with stream as server-sent events."""
        return await unless_disconnected(request, _answer(serving, body))

    return router


async def _answer(serving: Serving, body: ChatCompletionBody) -> Response:
    serving.check_model(body.model)
    with client_errors():
        given = await asyncio.to_thread(_input, serving.llm, body)
    name, stream = await serving.submit([given], "chatcmpl", body.priority)
    answer = _Answer(serving, body, given, name)
    if body.stream:
        return EventStream(answer.events(stream))
    return Response(await answer.whole(stream), media_type="application/json")


def render(llm: AsyncLLM, body: ChatOptions | TokenizeBody) -> str:
    """Return the text that a body's messages become."""
    continued = body.continue_final_message is True
    return llm.render_chat(
        body.messages or [],
        tools=body.tools or None,
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _input(llm: AsyncLLM, body: ChatCompletionBody) -> EngineInput:
    body.refuse_unsupported()
    if body.echo:
        raise _core.Unsupported("echo is not supported for chat; leave it out")
    if body.top_logprobs is not None and not body.logprobs:
        raise ValueError("top_logprobs needs logprobs = true")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise ValueError(f"top_logprobs must be at least 0, got {body.top_logprobs}")
    if body.tool_choice not in (None, "none", "auto"):
        raise _core.Unsupported("tool_choice must be none or auto: this version of deltaic forces no call")
    prompt = render(llm, body)
    if body.tools:
        raise _core.Unsupported("tools is not supported by this version of the server; leave it out")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None and "max_tokens" not in llm.default_fields:
        max_tokens = llm.max_model_len  # up to the context
    params = sampling_params(
        llm, body, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    return llm.inputs.process(prompt, params, add_special_tokens=body.add_special_tokens is True)


class _Answer:
    """The answer to one request, whole or in events."""

    def __init__(self, serving: Serving, body: ChatCompletionBody, given: EngineInput, name: str) -> None:
        self._serving = serving
        self._body = body
        self._given = given
        self._frame: dict[str, Any] = {"id": name, "created": now(), "model": body.model or serving.model_name}
        self._tokenizer = serving.llm.get_tokenizer()
        opened = opens_reasoning(given.prompt or "", _continued_text(body))
        self._splitters = [ReasoningSplitter(opened=opened) for _ in range(given.sampling_params.n)]
        self._counts = TokenCounts([given])

    async def whole(self, stream: OutputStream) -> str:
        choices = []
        async for completion in self._completions(stream):
            reasoning, content = self._split(completion)
            message = ChatMessage(role="assistant", content=content, refusal=None)
            if reasoning:
                message.reasoning_content = reasoning
            choices.append(
                ChatChoice(
                    index=completion.index,
                    message=message,
                    logprobs=self._logprobs(completion),
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                )
            )
        choices.sort(key=lambda choice: choice.index)
        return ChatCompletion(
            **self._frame, object="chat.completion", choices=choices, usage=self._counts.usage
        ).model_dump_json(exclude_unset=True)

    async def events(self, stream: OutputStream) -> AsyncGenerator[str, None]:
        for index in range(len(self._splitters)):
            yield self._event(index, ChatMessage(role="assistant", content=""), None)
        async for completion in self._completions(stream):
            reasoning, content = self._split(completion)
            delta: dict[str, str] = {}
            if reasoning:
                delta["reasoning_content"] = reasoning
            if content:
                delta["content"] = content
            logprobs = self._logprobs(completion)
            if delta or logprobs or completion.finish_reason:
                yield self._event(completion.index, ChatMessage(**delta), completion, logprobs)
        if self._body.include_usage:
            yield self._chunk([], usage=True)

    def _event(
        self,
        index: int,
        delta: ChatMessage,
        completion: CompletionOutput | None,
        logprobs: ChatLogprobs | None = None,
    ) -> str:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=None if completion is None else completion.finish_reason,
            stop_reason=None if completion is None else completion.stop_reason,
        )
        return self._chunk([choice])

    def _chunk(self, choices: list[ChatChunkChoice], *, usage: bool = False) -> str:
        fields = dict(self._frame)
        if self._body.include_usage:
            fields["usage"] = self._counts.usage if usage else None
        return ChatCompletionChunk(**fields, object="chat.completion.chunk", choices=choices).model_dump_json(
            exclude_unset=True
        )

    async def _completions(self, stream: OutputStream) -> AsyncGenerator[CompletionOutput, None]:
        outputs = self._serving.outputs(stream, [self._given])
        try:
            async for index, output in outputs:
                self._counts.add(index, output)
                for completion in output.outputs:
                    yield completion
        finally:
            await outputs.aclose()

    def _split(self, completion: CompletionOutput) -> tuple[str, str]:
        splitter = self._splitters[completion.index]
        reasoning, content = splitter.feed(completion.text)
        if completion.finished:
            last_reasoning, last_content = splitter.end()
            reasoning, content = reasoning + last_reasoning, content + last_content
        return reasoning, content

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not completion.logprobs:
            return None
        num_top = self._body.top_logprobs or 0
        content = []
        for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:num_top]
            content.append(
                ChatLogprob(
                    **_token(self._tokenizer, token_id, entry[token_id].logprob),
                    top_logprobs=[TopLogprob(**_token(self._tokenizer, other, lp.logprob)) for other, lp in best],
                )
            )
        return ChatLogprobs(content=content)


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _continued_text(body: ChatCompletionBody) -> str:
    """Return the text of the message that the answer goes on with, if any."""
    if not body.continue_final_message:
        return ""
    content: Any = body.messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts: Sequence[Mapping[str, Any]] = content or []
    return "".join(part["text"] for part in parts)
