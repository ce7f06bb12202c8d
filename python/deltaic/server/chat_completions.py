"""/v1/chat/completions: the answer to a conversation."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from deltaic.async_llm import OutputStream
from deltaic.outputs import CompletionOutput
from deltaic.server.chat_answer import AnswerReader, ChatInput, chat_input
from deltaic.server.errors import EVENT_STREAM, client_errors
from deltaic.server.event_stream import EventStream, unless_disconnected
from deltaic.server.protocol import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionBody,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
)
from deltaic.server.serving import Serving, TokenCounts, now
from deltaic.server.token_text import chat_logprobs
from deltaic.server.tool_calls import CallPiece


def chat_completions_router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=EVENT_STREAM)
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        """Answer a conversation; with stream as server-sent events."""
        return await unless_disconnected(request, _answer(serving, body))

    return router


async def _answer(serving: Serving, body: ChatCompletionBody) -> Response:
    serving.check_model(body.model)
    serving.check_room()
    with client_errors():
        chat = await asyncio.to_thread(chat_input, serving.llm, body)
    name, stream = await serving.submit([chat.given], "chatcmpl", body.priority)
    answer = _Answer(serving, body, chat, name)
    if body.stream:
        return EventStream(answer.events(stream))
    return Response(await answer.whole(stream), media_type="application/json")


class _Answer:
    """The answer to one request, whole or in events."""

    def __init__(self, serving: Serving, body: ChatCompletionBody, chat: ChatInput, name: str) -> None:
        self._serving = serving
        self._body = body
        self._given = chat.given
        self._frame: dict[str, Any] = {"id": name, "created": now(), "model": body.model or serving.model_name}
        self._tokenizer = serving.llm.get_tokenizer()
        self._readers = [AnswerReader(chat) for _ in range(chat.given.sampling_params.n)]
        self._counts = TokenCounts([chat.given])

    async def whole(self, stream: OutputStream) -> str:
        choices = []
        async for completion in self._completions(stream):
            reader = self._readers[completion.index]
            said = reader.read(completion)
            calls: list[ToolCall] = []
            for part in said.parts:
                if isinstance(part, CallPiece):
                    if part.name is not None:
                        calls.append(ToolCall(**_new_call(part.name)))
                    calls[-1].function.arguments += part.arguments
            message = ChatMessage(role="assistant", content=said.content, refusal=None)
            if said.reasoning:
                message.reasoning_content = said.reasoning
            if calls:
                message.content, message.tool_calls = said.content or None, calls
            choices.append(
                ChatChoice(
                    index=completion.index,
                    message=message,
                    logprobs=self._logprobs(completion),
                    finish_reason=reader.finish_reason(completion),
                    stop_reason=reader.stop_reason(completion),
                )
            )
        choices.sort(key=lambda choice: choice.index)
        return ChatCompletion(
            **self._frame, object="chat.completion", choices=choices, usage=self._counts.usage
        ).model_dump_json(exclude_unset=True)

    async def events(self, stream: OutputStream) -> AsyncGenerator[str, None]:
        for index in range(len(self._readers)):
            yield self._event(index, ChatMessage(role="assistant", content=""), None)
        async for completion in self._completions(stream):
            reader = self._readers[completion.index]
            num_calls = reader.num_calls
            said = reader.read(completion)
            delta: dict[str, Any] = {}
            if said.reasoning:
                delta["reasoning_content"] = said.reasoning
            if content := said.content:
                delta["content"] = content
            if calls := _call_deltas(said.parts, num_calls):
                delta["tool_calls"] = calls
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
            finish_reason=None if completion is None else self._readers[index].finish_reason(completion),
            stop_reason=None if completion is None else self._readers[index].stop_reason(completion),
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

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not completion.logprobs:
            return None
        return ChatLogprobs(content=chat_logprobs(self._tokenizer, completion, self._body.top_logprobs or 0))


def _new_call(name: str) -> dict[str, Any]:
    function = CalledFunction(name=name, arguments="")
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _call_deltas(parts: list[str | CallPiece], num_calls: int) -> list[ToolCall]:
    """Return what is new of the calls; num_calls began before. A call's first piece has its id and name."""
    deltas: dict[int, ToolCall] = {}
    for part in parts:
        if not isinstance(part, CallPiece):
            continue
        if part.name is not None:
            deltas[num_calls] = ToolCall(index=num_calls, **_new_call(part.name))
            num_calls += 1
        index = num_calls - 1
        if index not in deltas:
            deltas[index] = ToolCall(index=index, function=CalledFunction(arguments=""))
        deltas[index].function.arguments += part.arguments
    return list(deltas.values())
