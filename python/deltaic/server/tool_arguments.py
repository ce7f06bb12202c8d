"""The arguments of a call of a tool, turned into JSON while they come."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

CLOSE = "</tool_call>"
_END_PARAMETER, _END_FUNCTION = "</parameter>", "</function>"
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>")
_PARAMETER_HEAD = re.compile(r"<parameter=[^<>\s]*")
# What ends a value. </parameter> alone does not: it may stand in the value. A call that closes ends it in any case.
_END_OF_VALUE = re.compile(
    rf"{_END_PARAMETER}\s*(?=<parameter=[^<>\s]+>|(?:{_END_FUNCTION}\s*)?{CLOSE})|{_END_FUNCTION}\s*(?={CLOSE})|(?={CLOSE})"
)


class ArgumentReader(Protocol):
    """Reads from the first argument on. How the text is cut into pieces does not matter."""

    rest: str | None  # what stands behind the call; None until it is closed

    def feed(self, text: str) -> str:
        """Take a piece; return the JSON that it adds."""
        ...

    def end(self) -> str:
        """Return what was held back of a call that is cut; `rest` may be set then too."""
        ...


class JsonArguments:
    """Arguments that are JSON already: they pass as they are, up to the end of the object.

    What is no JSON passes too, up to </tool_call>: the call was announced, and its reader is told what was written.
    """

    def __init__(self) -> None:
        self.rest: str | None = None
        self._held = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._complete = False

    def feed(self, text: str) -> str:
        held = self._held + text
        end = 0 if self._complete else self._scan(held)
        made, self._held = held[:end], held[end:]
        if self._complete:
            close = self._held.find(CLOSE)
            if close >= 0:
                self.rest = self._held[close + len(CLOSE) :]
        elif self._held.startswith(CLOSE):
            self.rest = self._held[len(CLOSE) :]
        return made

    def _scan(self, text: str) -> int:
        """Return how far the object goes on."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._complete = True
                    return i + 1
            elif char == "<" and (text.startswith(CLOSE, i) or CLOSE.startswith(text[i:])):
                return i
        return len(text)

    def end(self) -> str:
        if not self._complete:
            return self._held
        behind = self._held.lstrip().removeprefix("}").lstrip()
        self.rest = "" if CLOSE.startswith(behind) else behind
        return ""


class TagArguments:
    """Arguments between <parameter=KEY> and </parameter>; values get the types of the tool's schema.

    A value that the schema wants as a string comes in pieces, any other when it is complete.
    """

    def __init__(self, schema: object) -> None:
        self.rest: str | None = None
        self._properties = _mapping(_mapping(schema).get("properties"))
        self._held = ""
        self._made_any = False
        self._schema: Mapping[str, Any] | None = None  # of the value that is read; None between values
        self._started = False  # the value's first character was seen

    def feed(self, text: str) -> str:
        self._held += text
        made = ""
        while self.rest is None:
            if self._schema is None:
                found = _PARAMETER.match(self._held)
                if found is None:
                    return made + self._close()
                made += (", " if self._made_any else "{") + _dump(found[1]) + ": "
                self._schema, self._made_any, self._started = _mapping(self._properties.get(found[1])), True, False
                self._held = self._held[found.end() :]
                if self._is_string:
                    made += '"'
            # The template puts one line break on either side of a value.
            if not self._started:
                if not self._held:
                    return made
                self._started, self._held = True, self._held.removeprefix("\n")
            end = _END_OF_VALUE.search(self._held)
            if end is None:
                if self._is_string:
                    made += self._take(_num_safe_chars(self._held))
                return made
            value, self._held = self._held[: end.start()].removesuffix("\n"), self._held[end.end() :]
            made += _dump(value)[1:] if self._is_string else _dump(typed(value, self._schema))
            self._schema = None
        return made

    @property
    def _is_string(self) -> bool:
        return self._schema is not None and _types(self._schema) == ["string"]

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return _dump(taken)[1:-1]

    def _close(self) -> str:
        self.rest = self._held[self._held.index(CLOSE) + len(CLOSE) :]
        return "}"

    def end(self) -> str:
        return self._take(len(self._held)) if self._is_string else self._held


def _num_safe_chars(text: str) -> int:
    """Return how many characters of a value cannot belong to its end."""
    start = text.find("<")
    while start >= 0 and not _may_end(text[start:]):
        start = text.find("<", start + 1)
    safe = text if start < 0 else text[:start]
    return len(safe.removesuffix("\n"))


def _may_end(text: str) -> bool:
    """Return whether a text may be the start of an end of a value."""
    if any(tag.startswith(text) for tag in (_END_PARAMETER, _END_FUNCTION, CLOSE)):
        return True
    if text.startswith(_END_FUNCTION):
        return CLOSE.startswith(text[len(_END_FUNCTION) :].lstrip())
    if not text.startswith(_END_PARAMETER):
        return False
    behind = text[len(_END_PARAMETER) :].lstrip()
    if "<parameter=".startswith(behind) or _PARAMETER_HEAD.fullmatch(behind):
        return True
    return _END_FUNCTION.startswith(behind) or CLOSE.startswith(behind.removeprefix(_END_FUNCTION).lstrip())


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_json(text: str) -> Any:
    """Return a JSON value; ValueError also for NaN and infinity, which JSON does not have."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a value of the first of a schema's types that it can be; text if it can be none."""
    types = _types(schema)
    for kind in (["null"] if "null" in types else []) + types:
        if kind == "string":
            return text
        try:
            value = read_json(text.lower() if kind in ("boolean", "null") else text)
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


def _kinds(value: Any) -> Sequence[str]:
    """Return the types of JSON schema that a value of JSON has."""
    if value is None or isinstance(value, bool):
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, (int, float)):
        return ("number", "integer") if value == int(value) else ("number",)
    return ("object",) if isinstance(value, dict) else ("array",) if isinstance(value, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
