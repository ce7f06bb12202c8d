"""Calls of tools in what a model says, in the two formats that Qwen's templates ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltaic.chat import ToolFormat
from deltaic.server.reasoning import num_open_chars

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\s*(.*?)\s*</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # a JSON object


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a tool that is no function with a name and, if any, an object of parameters."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise ValueError(f"tools[{i}] must be {{'type': 'function', 'function': ...}}, got {tool!r:.80}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"tools[{i}].function.name must be a string, got {function.get('name')!r:.80}")
        if not isinstance(function.get("parameters", {}), (Mapping, type(None))):
            raise ValueError(f"tools[{i}].function.parameters must be an object")


class ToolCallSplitter:
    """Split a growing text into what is said and the calls between <tool_call> and </tool_call>.

    A call is returned when it is complete; one that cannot be read, or that is cut, is text like any other. White
    space around calls is dropped. How the text is cut into pieces does not matter.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> None:
        self._form = form
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._held = ""
        self._after_call = False

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Take a piece; return the text and the calls that it completes."""
        self._held += text
        said, calls = "", list[Call]()
        while True:
            if self._after_call:
                self._held = self._held.lstrip()
            start = self._held.find(OPEN)
            end = self._held.find(CLOSE, start) if start >= 0 else -1
            if end < 0:
                before = start if start >= 0 else len(self._held) - num_open_chars(self._held, OPEN)
                said += self._take(len(self._held[:before].rstrip()))
                return said, calls
            call = self._parse(self._held[start + len(OPEN) : end])
            if call is None:
                said += self._take(end + len(CLOSE))
                continue
            said += self._take(len(self._held[:start].rstrip()))
            self._held = self._held[self._held.index(CLOSE) + len(CLOSE) :]
            self._after_call = True
            calls.append(call)

    def end(self) -> str:
        """Return what was held back; the text has ended."""
        return self._take(len(self._held))

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        self._after_call = self._after_call and not taken
        return taken

    def _parse(self, text: str) -> Call | None:
        return _parse_json(text) if self._form == "json" else self._parse_tags(text)

    def _parse_tags(self, text: str) -> Call | None:
        function = _FUNCTION.fullmatch(text)
        if function is None:
            return None
        name, body = function[1], function[2]
        properties = _mapping(_mapping(self._schemas.get(name)).get("properties"))
        arguments: dict[str, Any] = {}
        position = 0
        while position < len(body):
            found = _PARAMETER.match(body, position)
            if found is None:
                return None
            # The template puts one line break on either side of a value.
            value = found[2].removeprefix("\n").removesuffix("\n")
            arguments[found[1]] = _typed(value, _mapping(properties.get(found[1])))
            position = found.end()
        return Call(name, json.dumps(arguments, ensure_ascii=False))


def _parse_json(text: str) -> Call | None:
    try:
        value = _read(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _read(text: str) -> Any:
    """Return a JSON value; ValueError also for NaN and infinity, which JSON does not have."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a value of the first of a schema's types that it can be; text if it can be none."""
    types = _types(schema)
    for kind in (["null"] if "null" in types else []) + types:
        if kind == "string":
            return text
        try:
            value = _read(text.lower() if kind in ("boolean", "null") else text)
        except (ValueError, RecursionError):
            continue
        if kind == "any" or kind in _kinds(value):
            return int(value) if kind == "integer" else value
    return text


def _types(schema: Mapping[str, Any]) -> list[str]:
    found = schema.get("type")
    if isinstance(found, str):
        return [found]
    if isinstance(found, list):
        return [kind for kind in found if isinstance(kind, str)]
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        if isinstance(choices, list):
            return [kind for choice in choices for kind in _types(_mapping(choice))]
    return ["any"] if schema.keys() & {"$ref", "allOf", "properties", "items"} else ["string"]


def _kinds(value: Any) -> tuple[str, ...]:
    """Return the types of JSON schema that a value of JSON has."""
    if value is None or isinstance(value, bool):
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, (int, float)):
        return ("number", "integer") if value == int(value) else ("number",)
    return ("object",) if isinstance(value, dict) else ("array",) if isinstance(value, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
