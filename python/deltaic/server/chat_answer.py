"""A conversation to what the engine is given, and what it says to reasoning, text and calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltaic import _core
from deltaic.async_llm import AsyncLLM
from deltaic.input_processor import EngineInput
from deltaic.outputs import CompletionOutput
from deltaic.reasoning import ReasoningSplitter, opens_reasoning
from deltaic.server.errors import ApiError
from deltaic.server.protocol import ChatCompletionBody, ChatOptions, TokenizeBody
from deltaic.server.serving import check_max_tokens, sampling_params
from deltaic.server.tool_arguments import CLOSE
from deltaic.server.tool_calls import OPEN, CallPiece, ToolCallSplitter, check_tools
from deltaic.server.tool_choice import ToolUse, tool_use


def render(llm: AsyncLLM, body: ChatOptions | TokenizeBody) -> str:
    """Return the text that a body's messages become."""
    continued = body.continue_final_message is True
    tools = None if getattr(body, "tool_choice", None) == "none" else body.tools or None
    check_tools(tools or [])
    return llm.render_chat(
        body.messages or [],
        tools=tools,
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        chat_template_kwargs=body.chat_template_kwargs,
    )


@dataclass(frozen=True, slots=True)
class ChatInput:
    given: EngineInput
    tools: ToolUse | None
    opens_reasoning: bool


def chat_input(llm: AsyncLLM, body: ChatCompletionBody) -> ChatInput:
    """Return what a body asks of the engine; ValueError, TypeError or Unsupported for what is wrong with it."""
    body.refuse_unsupported()
    if body.echo:
        raise _core.Unsupported("echo is not supported for chat; leave it out")
    if body.top_logprobs is not None and not body.logprobs:
        raise ValueError("top_logprobs needs logprobs = true")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise ValueError(f"top_logprobs must be at least 0, got {body.top_logprobs}")
    if body.top_logprobs is not None and body.top_logprobs > (most := llm.inputs.max_logprobs):
        raise ValueError(f"top_logprobs must be at most max_logprobs = {most}, got {body.top_logprobs}")
    prompt = render(llm, body)
    tools = tool_use(llm, body.tools, body.tool_choice, body.parallel_tool_calls is not False)
    opened = opens_reasoning(prompt, _continued_text(body))
    if tools is not None and tools.forced:
        if body.continue_final_message or body.add_generation_prompt is False:
            raise ValueError("tool_choice: a call is asked for, which needs a new message of the assistant's")
        prompt, opened = prompt + tools.prompt_suffix(prompt), False
    check_max_tokens("max_tokens", body.max_tokens)
    check_max_tokens("max_completion_tokens", body.max_completion_tokens)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None and "max_tokens" not in llm.default_fields:
        max_tokens = llm.max_model_len  # up to the context
    params = sampling_params(
        llm, body, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    if tools is not None and tools.single:
        params = dataclasses.replace(params, stop=[*params.stop_strings, CLOSE])
    given = llm.inputs.process(prompt, params, add_special_tokens=body.add_special_tokens is True)
    return ChatInput(given, tools, opened)


def _continued_text(body: ChatCompletionBody) -> str:
    """Return the text of the message that the answer goes on with, if any."""
    if not body.continue_final_message:
        return ""
    content: Any = body.messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts: Sequence[Mapping[str, Any]] = content or []
    return "".join(part["text"] for part in parts)


@dataclass(slots=True)
class Said:
    """A piece of an answer, or all of it: first what it thinks, then what it says and calls, in order."""

    reasoning: str
    parts: list[str | CallPiece]

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


class AnswerReader:
    """Tell apart, piece by piece, what one completion thinks, says and calls."""

    def __init__(self, chat: ChatInput) -> None:
        tools = chat.tools
        self._tools = tools
        self._reasoning = ReasoningSplitter(opened=chat.opens_reasoning, until=None if tools is None else OPEN)
        self._splitter = None if tools is None else ToolCallSplitter(tools.form, tools.tools, forced=tools.forced)
        self._opening = "" if tools is None else tools.opening
        self._cut_at_close = tools is not None and tools.single
        if chat.given.sampling_params.include_stop_str_in_output:
            self._cut_at_close = False
        self._calls: list[tuple[str, list[str]]] = []

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def in_reasoning(self) -> bool:
        return self._reasoning.in_reasoning

    def read(self, completion: CompletionOutput) -> Said:
        """Take a piece. ApiError at the end of an answer that lacks the call that was asked for."""
        text, self._opening = self._opening + completion.text, ""
        if completion.finished and self._cut_at_close and completion.stop_reason == CLOSE:
            text += CLOSE
        reasoning, content = self._reasoning.feed(text)
        if completion.finished:
            last_reasoning, last_content = self._reasoning.end()
            reasoning, content = reasoning + last_reasoning, content + last_content
        if self._splitter is None:
            return Said(reasoning, [content] if content else [])
        parts = self._splitter.feed(content)
        if completion.finished:
            parts += self._splitter.end()
        for part in parts:
            if isinstance(part, CallPiece):
                if part.name is not None:
                    self._calls.append((part.name, []))
                self._calls[-1][1].append(part.arguments)
        if completion.finish_reason == "stop" and completion.stop_reason in (None, CLOSE):  # else cut by the caller
            self._check()
        return Said(reasoning, parts)

    def _check(self) -> None:
        assert self._tools is not None
        try:
            self._tools.check([(name, "".join(pieces)) for name, pieces in self._calls])
        except ValueError as error:
            raise ApiError(422, f"tool_choice: {error}", param="tool_choice", code="tool_call_failed") from error

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        reason = completion.finish_reason
        return "tool_calls" if reason == "stop" and self._calls else reason

    def stop_reason(self, completion: CompletionOutput) -> int | str | None:
        """Return the caller's own stop that ended the answer."""
        return None if self._cut_at_close and completion.stop_reason == CLOSE else completion.stop_reason
