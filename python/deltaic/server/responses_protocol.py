"""The body of /v1/responses, and the conversation that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from deltaic import _core
from deltaic.server.protocol import ChatCompletionBody, GenerationBody, Objects, Strings, Texts
from deltaic.server.serving import check_max_tokens

_TEXT_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
# The absence of the second changes nothing: reasoning comes as plain text in any case.
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")


class ResponsesBody(GenerationBody):
    """Fields that are not OpenAI's are those of chat completions."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    include: Strings | None = None
    metadata: Texts | None = None
    background: bool | None = None
    store: bool | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or [])

    def to_chat(self) -> ChatCompletionBody:
        """Return the same request in the form of chat completions; ValueError, TypeError or Unsupported."""
        self.refuse_unsupported()
        self._refuse_more()
        kwargs = dict(self.chat_template_kwargs or {})
        if (self.reasoning or {}).get("effort") == "none":
            kwargs.setdefault("enable_thinking", False)
        shared = {name: getattr(self, name) for name in GenerationBody.model_fields if name not in ("stream", "stop")}
        return ChatCompletionBody(
            **shared,
            stop=self.stop,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            stream=True,  # the answer is put together from its events
            messages=_messages(self.instructions, self.input),
            tools=None if self.tools is None else [_tool(i, tool) for i, tool in enumerate(self.tools)],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_completion_tokens=self.max_output_tokens,
            chat_template_kwargs=kwargs,
        )

    def _refuse_more(self) -> None:
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise _core.Unsupported(
                    f"{name} is not supported: this server keeps no responses; send the whole input"
                )
        if self.background:
            raise _core.Unsupported("background is not supported by this version of deltaic; leave it out")
        if self.top_logprobs and not self.wants_logprobs:
            raise ValueError(f"top_logprobs needs include = [{_LOGPROBS!r}]")
        for name in self.include or []:
            if name not in _INCLUDES:
                raise _core.Unsupported(
                    f"include: {name!r:.80} is not supported; this version of deltaic has {', '.join(_INCLUDES)}"
                )
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        if self.truncation not in (None, "disabled"):
            raise _core.Unsupported(f"truncation must be disabled, got {self.truncation!r:.80}")
        form = (self.text or {}).get("format")
        if form is not None and form != {"type": "text"}:
            raise _core.Unsupported("text.format other than text is not supported by this version of deltaic")
        if self.n not in (None, 1):
            raise ValueError(f"n must be 1 for responses, got {self.n}")
        check_max_tokens("max_output_tokens", self.max_output_tokens)
        if self.max_tokens is not None:
            raise ValueError("max_tokens is max_output_tokens for responses")


def _messages(instructions: str | None, given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise ValueError("input must hold at least 1 item, got 0")
    reasoning = ""
    for i, item in enumerate(given):
        name, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message":
            message = {"role": item.get("role"), "content": _text(f"{name}.content", item.get("content"))}
            if message["role"] == "assistant" and reasoning:
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "reasoning":
            reasoning += _text(f"{name}.content", item.get("content") or [])
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function"}
            call["function"] = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            # Calls of one turn stand in one message.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if reasoning:
                messages[-1]["reasoning_content"], reasoning = reasoning, ""
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _text(f"{name}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise _core.Unsupported(f"{name} is of type {kind!r:.80}: this version of deltaic reads messages and calls")
    return messages


def _text(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TypeError(f"{name} must be a string or a list of text parts, got {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in (*_TEXT_PARTS, "reasoning_text"):
            raise _core.Unsupported(f"{name}[{i}] is of type {kind!r:.80}: this version of deltaic reads text only")
        text = part.get("text")
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}].text must be a string, got {type(text).__name__}")
        texts.append(text)
    return "".join(texts)


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ValueError(f"tools[{i}] must be {{'type': 'function', 'name': ...}}, got {dict(tool)!r:.80}")
    fields = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": fields}


class ResponseObject(BaseModel):
    """What /v1/responses answers; `output` holds items of type reasoning, message and function_call."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None
