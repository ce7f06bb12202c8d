"""Chat messages to the text that a model continues, by the model's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from deltaic import _core
from deltaic.checkpoint import one_line, read_json

Message = Mapping[str, Any]

ToolFormat = Literal["json", "tags"]  # within <tool_call>: a JSON object, or <function=...> and <parameter=...>

ROLES = ("system", "developer", "user", "assistant", "tool")
# Put behind the final message to find its end; the space shows whether the template trims.
_END_MARK = "DELTAIC_END_OF_FINAL_MESSAGE "


class _GenerationTag(jinja2.ext.Extension):
    """Accept {% generation %} around what the assistant says; it marks text for training and changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A chat template, compiled in a sandbox. ValueError with the line for a template that does not compile."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._source = source
            self._names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile, line {error.lineno}: {one_line(error)}") from error

    @property
    def takes_tools(self) -> bool:
        return "tools" in self._names

    @property
    def tool_format(self) -> ToolFormat | None:
        """Return how the template asks for calls; None when it asks for none that is known."""
        if not self.takes_tools or "<tool_call>" not in self._source:
            return None
        return "tags" if "<function=" in self._source else "json"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special_tokens: Mapping[str, str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        With continue_final_message it ends where the last message's content does. Content may be a string or a list
        of text parts; both give the same text. ValueError for messages that are none, and with the template's own
        words for those that it refuses; Unsupported for tools when the template writes none.
        """
        checked = check_messages(messages)
        if tools is not None and not self.takes_tools:
            raise _core.Unsupported("tools: the model's chat template writes none; leave them out")
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError(
                    "continue_final_message and add_generation_prompt exclude each other, got both as True"
                )
            checked[-1]["content"] = (checked[-1].get("content") or "") + _END_MARK
        names = {
            **(special_tokens or {}),
            **(template_kwargs or {}),
            "messages": checked,
            "tools": None if tools is None else list(tools),
            "documents": (template_kwargs or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {one_line(error)}") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the chat template cannot write these messages: {one_line(error)}") from error
        return _cut(text) if continue_final_message else text


def find_chat_template(folder: Path, *, for_tools: bool = False) -> str | None:
    """Return the source of a checkpoint's template: chat_template.jinja, else what tokenizer_config.json holds.

    Of several named ones it is `default`, or `tool_use` for tools. None when the model has none.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {one_line(error)}") from error
    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    if found is None:
        found = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        found = (named.get("tool_use") if for_tools else None) or named.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(f"chat_template of {folder} must be a string, got {type(found).__name__}")
    return found


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies with the content as a string; ValueError or TypeError names the message that is none."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must hold at least 1 message, got 0")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} must be a dict with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{name}.role must be one of {', '.join(ROLES)}, got {role!r}")
    checked = dict(message)
    content = message.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise ValueError(f"{name}.content must be a string or a list of text parts, got None")
    if content is not None:
        checked["content"] = _check_content(f"{name}.content", content)
    if message.get("tool_calls"):
        checked["tool_calls"] = [
            _check_tool_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(message["tool_calls"])
        ]
    return checked


def _check_content(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise TypeError(f"{name} must be a string or a list of text parts, got {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise _core.Unsupported(f"{name}[{i}] is of type {kind!r}: this version of deltaic reads text only")
        text = part.get("text")
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}].text must be a string, got {type(text).__name__}")
        texts.append(text)
    return "".join(texts)


def _check_tool_call(name: str, call: object) -> dict[str, Any]:
    """Return a copy whose arguments are an object: clients send them back as the JSON text that they got."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{name} must be {{'function': {{'name': ..., 'arguments': ...}}}}, got {call!r:.80}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"{name}.function.arguments is not JSON: {one_line(error)}") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{name}.function.arguments must be a JSON object, got {type(arguments).__name__}")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _cut(text: str) -> str:
    """Return the text up to the mark; trimmed as the template trimmed the mark."""
    end = text.rfind(_END_MARK.strip())
    if end < 0:
        raise ValueError("continue_final_message: the chat template does not write the content of the last message")
    head = text[:end]
    return head if text.startswith(_END_MARK, end) else head.rstrip()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON: jinja2's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
