"""Calls of tools in what a model says, in the two formats that Qwen's templates ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltaic.chat import ToolFormat
from deltaic.reasoning import num_open_chars
from deltaic.server.tool_arguments import CLOSE, ArgumentReader, JsonArguments, TagArguments, read_json

OPEN = "<tool_call>"
_STRING = r'"(?:[^"\\]|\\.)*"'
# A call is announced when its name and the start of its first argument are known.
_JSON_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"arguments"\s*:\s*'
    rf'(?=\{{\s*{_STRING}\s*:\s*(?:["{{\[]|-?\d|true|false|null))',
    re.DOTALL,
)
_TAGS_HEAD = re.compile(r"\s*<function=([^<>\s]+)>\s*(?=<parameter=[^<>\s]+>)")
# What is known of a call that is cut before that.
_CUT_JSON = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_STRING})(?:\s*,\s*"arguments"\s*:\s*(\{{.*))?', re.DOTALL)
_CUT_TAGS = re.compile(r"\s*<function=([^<>\s]+)>(\s*</function>)?")
_TAGS_WITHOUT_ARGUMENTS = re.compile(r"\s*<function=([^<>\s]+)>\s*</function>\s*")


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call: with a name it begins one, without it goes on with the last."""

    name: str | None
    arguments: str  # JSON, or a piece of it


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
        try:
            json.dumps(tool, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"tools[{i}] holds a number that JSON does not have") from error


class ToolCallSplitter:
    """Split a growing text into what is said and the calls between <tool_call> and </tool_call>.

    What cannot be read as a call, or is cut before its first argument, is text like any other; a call that is cut
    later has arguments that are cut. White space around calls is dropped. How the text is cut into pieces does not
    matter.

    A `forced` text begins with the opening of a call, which the caller put there and nobody said: until the first call
    it is never text, and one that is cut is that call, with what there is of its arguments, once its name is known.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Mapping[str, Any]], *, forced: bool = False) -> None:
        self._form = form
        self._forced = forced  # and no call has been read yet
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._held = ""
        self._after_call = False
        self._reader: ArgumentReader | None = None  # of the call that was announced and is not complete

    def feed(self, text: str) -> list[str | CallPiece]:
        """Take a piece; return the text and the parts of calls that it adds, in order."""
        self._held += text
        parts: list[str | CallPiece] = []
        while self._read_arguments(parts):
            if self._after_call:
                self._held = self._held.lstrip()
            start = self._held.find(OPEN)
            if start < 0:
                self._say(parts, len(self._held) - num_open_chars(self._held, OPEN))
                break
            end = self._held.find(CLOSE, start)
            if self._announce(parts, start, len(self._held) if end < 0 else end):
                continue
            if end < 0:
                self._say(parts, start)
                break
            call = self._parse(self._held[start + len(OPEN) : end])
            if call is None:
                unreadable = self._take(end + len(CLOSE))
                parts.append("" if self._forced else unreadable)
                self._forced = False
                continue
            self._say(parts, start)
            self._held = self._held[self._held.index(CLOSE) + len(CLOSE) :]
            self._after_call, self._forced = True, False
            parts.append(call)
        return [part for part in parts if part]

    def end(self) -> list[str | CallPiece]:
        """Return what was held back; the text has ended."""
        if self._reader is not None:
            cut = self._reader.end()
            return [*([CallPiece(None, cut)] if cut else []), *([self._reader.rest] if self._reader.rest else [])]
        if self._forced:
            call = self._cut_call()
            return [] if call is None else [call]
        return [self._held] if self._held else []

    def _read_arguments(self, parts: list[str | CallPiece]) -> bool:
        """Go on with the call that was announced; return whether none is open any more."""
        if self._reader is None:
            return True
        made = self._reader.feed(self._held)
        self._held = ""
        if made:
            parts.append(CallPiece(None, made))
        if self._reader.rest is None:
            return False
        self._held, self._reader, self._after_call = self._reader.rest, None, True
        return True

    def _announce(self, parts: list[str | CallPiece], start: int, end: int) -> bool:
        """Begin the call whose head stands behind the <tool_call> at `start` and before `end`, if one does."""
        head = (_JSON_HEAD if self._form == "json" else _TAGS_HEAD).match(self._held, start + len(OPEN), end)
        name = None if head is None else head[1] if self._form == "tags" else _string(head[1])
        if head is None or name is None:
            return False
        self._reader = JsonArguments() if self._form == "json" else TagArguments(self._schemas.get(name))
        rest = self._held[head.end() :]
        self._say(parts, start)
        self._held, self._forced = rest, False
        parts.append(CallPiece(name, ""))
        return True

    def _cut_call(self) -> CallPiece | None:
        """Return what there is of the call that the text begins with; None before its name is complete."""
        head = (_CUT_JSON if self._form == "json" else _CUT_TAGS).match(self._held, len(OPEN))
        if head is None:
            return None
        if self._form == "tags":
            return CallPiece(head[1], "{}" if head[2] else "")
        name, reader = _string(head[1]), JsonArguments()
        return None if name is None else CallPiece(name, reader.feed(head[2] or "") + reader.end())

    def _say(self, parts: list[str | CallPiece], end: int) -> None:
        """Let go of the text up to `end`, but not of white space before it."""
        parts.append(self._take(len(self._held[:end].rstrip())))

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        self._after_call = self._after_call and not taken
        return taken

    def _parse(self, text: str) -> CallPiece | None:
        """Return a complete call whose head was not enough to announce it: without arguments, or in another order."""
        if self._form == "tags":
            function = _TAGS_WITHOUT_ARGUMENTS.fullmatch(text)
            return None if function is None else CallPiece(function[1], "{}")
        try:
            value = read_json(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        return CallPiece(value["name"], json.dumps(arguments, ensure_ascii=False))


def _string(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None
