"""/v1/chat/completions: the answer to a conversation."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from deltaic import _core
from deltaic.async_llm import AsyncLLM, OutputStream
from deltaic.input_processor import EngineInput
from deltaic.outputs import CompletionOutput
from deltaic.server.errors import client_errors
from deltaic.server.protocol import (
    CalledFunction,
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
    ToolCall,
    TopLogprob,
)
from deltaic.server.reasoning import ReasoningSplitter, opens_reasoning
from deltaic.server.responses import EventStream, unless_disconnected
from deltaic.server.serving import Serving, TokenCounts, now, sampling_params
from deltaic.server.token_text import finite, token_name
from deltaic.server.tool_calls import OPEN, ToolCallSplitter, check_tools
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


def tools_of(body: ChatOptions | TokenizeBody) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call."""
    return None if getattr(body, "tool_choice", None) == "none" else body.tools or None


def render(llm: AsyncLLM, body: ChatOptions | TokenizeBody) -> str:
    """Return the text that a body's messages become."""
    continued = body.continue_final_message is True
    tools = tools_of(body)
    check_tools(tools or [])
    return llm.render_chat(
        body.messages or [],
        tools=tools,
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
    if tools_of(body) is not None and llm.tool_format() is None:
        raise _core.Unsupported("tools: the model's chat template asks for calls in a form that is not known")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None and "max_tokens" not in llm.default_fields:
        max_tokens = llm.max_model_len  # up to the context
    params = sampling_params(
        llm, body, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    return llm.inputs.process(prompt, params, add_special_tokens=body.add_special_tokens is True)


@dataclass(slots=True)
class _Said:
    """A piece of an answer, or all of it."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]


class _Parser:
    """Tell apart, piece by piece, what one completion thinks, says and calls."""

    def __init__(self, reasoning: ReasoningSplitter, calls: ToolCallSplitter | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._num_calls = 0

    def read(self, text: str, *, ended: bool) -> _Said:
        reasoning, content = self._reasoning.feed(text)
        if ended:
            last_reasoning, last_content = self._reasoning.end()
            reasoning, content = reasoning + last_reasoning, content + last_content
        if self._calls is None:
            return _Said(reasoning, content, [])
        content, found = self._calls.feed(content)
        if ended:
            content += self._calls.end()
        calls = []
        for call in found:
            function = CalledFunction(name=call.name, arguments=call.arguments)
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            calls.append(ToolCall(index=self._num_calls, id=call_id, type="function", function=function))
            self._num_calls += 1
        return _Said(reasoning, content, calls)

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        reason = completion.finish_reason
        return "tool_calls" if reason == "stop" and self._num_calls else reason


class _Answer:
    """The answer to one request, whole or in events."""

    def __init__(self, serving: Serving, body: ChatCompletionBody, given: EngineInput, name: str) -> None:
        self._serving = serving
        self._body = body
        self._given = given
        self._frame: dict[str, Any] = {"id": name, "created": now(), "model": body.model or serving.model_name}
        self._tokenizer = serving.llm.get_tokenizer()
        opened = opens_reasoning(given.prompt or "", _continued_text(body))
        tools, form = tools_of(body), None
        if tools is not None:
            form = serving.llm.tool_format()
        self._parsers = [
            _Parser(
                ReasoningSplitter(opened=opened, until=None if form is None else OPEN),
                None if form is None else ToolCallSplitter(form, tools or []),
            )
            for _ in range(given.sampling_params.n)
        ]
        self._counts = TokenCounts([given])

    async def whole(self, stream: OutputStream) -> str:
        choices = []
        async for completion in self._completions(stream):
            parser = self._parsers[completion.index]
            said = parser.read(completion.text, ended=True)
            content = None if said.tool_calls and not said.content else said.content
            message = ChatMessage(role="assistant", content=content, refusal=None)
            if said.reasoning:
                message.reasoning_content = said.reasoning
            if said.tool_calls:
                message.tool_calls = [
                    ToolCall(id=call.id, type="function", function=call.function) for call in said.tool_calls
                ]
            choices.append(
                ChatChoice(
                    index=completion.index,
                    message=message,
                    logprobs=self._logprobs(completion),
                    finish_reason=parser.finish_reason(completion),
                    stop_reason=completion.stop_reason,
                )
            )
        choices.sort(key=lambda choice: choice.index)
        return ChatCompletion(
            **self._frame, object="chat.completion", choices=choices, usage=self._counts.usage
        ).model_dump_json(exclude_unset=True)

    async def events(self, stream: OutputStream) -> AsyncGenerator[str, None]:
        for index in range(len(self._parsers)):
            yield self._event(index, ChatMessage(role="assistant", content=""), None)
        async for completion in self._completions(stream):
            said = self._parsers[completion.index].read(completion.text, ended=completion.finished)
            delta: dict[str, Any] = {}
            if said.reasoning:
                delta["reasoning_content"] = said.reasoning
            if said.content:
                delta["content"] = said.content
            if said.tool_calls:
                delta["tool_calls"] = said.tool_calls
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
            finish_reason=None if completion is None else self._parsers[index].finish_reason(completion),
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
