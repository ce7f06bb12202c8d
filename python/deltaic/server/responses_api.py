"""/v1/responses: the answer to a conversation, as items."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from deltaic.async_llm import OutputStream
from deltaic.outputs import CompletionOutput
from deltaic.server.chat_answer import AnswerReader, ChatInput, chat_input
from deltaic.server.errors import EVENT_STREAM, client_errors, to_api_error
from deltaic.server.event_stream import EventStream, unless_disconnected
from deltaic.server.responses_output import Event, ResponseOutput
from deltaic.server.responses_protocol import ResponseObject, ResponsesBody
from deltaic.server.serving import Serving, TokenCounts, now
from deltaic.server.token_text import chat_logprobs


def responses_router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["responses"])

    @router.post("/v1/responses", response_model=ResponseObject, responses=EVENT_STREAM)
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation with items; with stream as server-sent events. Nothing is stored."""
        return await unless_disconnected(request, _answer(serving, body))

    return router


async def _answer(serving: Serving, body: ResponsesBody) -> Response:
    serving.check_model(body.model)
    serving.check_room()
    with client_errors():
        chat = await asyncio.to_thread(lambda: chat_input(serving.llm, body.to_chat()))
    name, stream = await serving.submit([chat.given], "resp", body.priority)
    answer = _Answer(serving, body, chat, name)
    if body.stream:
        return EventStream(answer.stream_events(stream), ends_with=None)
    async for _ in answer.events(stream):
        pass
    return Response(json.dumps(answer.response), media_type="application/json")


class _Answer:
    """The answer to one request: `response` grows with each event."""

    def __init__(self, serving: Serving, body: ResponsesBody, chat: ChatInput, name: str) -> None:
        self._serving = serving
        self._given = chat.given
        self._reader = AnswerReader(chat)
        self._counts = TokenCounts([chat.given])
        self._num_reasoning_tokens = 0
        self._output = ResponseOutput()
        self._num_top = (body.top_logprobs or 0) if body.wants_logprobs else None  # None: no log probabilities
        params = chat.given.sampling_params
        self.response: dict[str, Any] = {
            "id": name.replace("-", "_", 1),
            "object": "response",
            "created_at": now(),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model or serving.model_name,
            "output": self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    async def stream_events(self, stream: OutputStream) -> AsyncGenerator[Event, None]:
        """Yield the events; what goes wrong is the last one."""
        events = self.events(stream)
        try:
            async for event in events:
                yield event
        except Exception as error:
            told = to_api_error(error)
            self.response["status"] = "failed"
            self.response["error"] = {"code": told.code or "server_error", "message": str(told)}
            yield self._response_event("failed")
        finally:
            await events.aclose()

    async def events(self, stream: OutputStream) -> AsyncGenerator[Event, None]:
        outputs = self._serving.outputs(stream, [self._given])
        finish_reason = None
        try:
            yield self._response_event("created")
            yield self._response_event("in_progress")
            async for index, output in outputs:
                self._counts.add(index, output)
                for completion in output.outputs:
                    was_reasoning = self._reader.in_reasoning
                    said = self._reader.read(completion)
                    if said.reasoning or self._reader.in_reasoning:
                        self._num_reasoning_tokens += len(completion.token_ids)
                    logprobs = [] if was_reasoning and not said.parts else self._logprobs(completion)
                    for event in self._output.add(said, logprobs):
                        yield event
                    finish_reason = completion.finish_reason
        finally:
            await outputs.aclose()
        cut = finish_reason == "length"
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = self._usage()
        for event in self._output.end(self.response["status"]):
            yield event
        yield self._response_event(self.response["status"])

    def _logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        if self._num_top is None:
            return []
        tokenizer = self._serving.llm.get_tokenizer()
        return [entry.model_dump() for entry in chat_logprobs(tokenizer, completion, self._num_top)]

    def _response_event(self, status: str) -> Event:
        return self._output.event(f"response.{status}", response=self.response)

    def _usage(self) -> dict[str, Any]:
        usage = self._counts.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }
