"""Strings of JSON that are no text: JSON can write half of a surrogate pair, which no tokenizer takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_Path = tuple[Any, str | int] | None  # the path of what holds a value, and its name there


def find_lone_surrogate(fields: Mapping[str, object]) -> tuple[str, int] | None:
    """Return the path of a string or a name that has one, and at which character; None where all is text."""
    waiting: list[tuple[_Path, object]] = [(None, fields)]
    while waiting:
        path, value = waiting.pop()
        inner: Any
        if isinstance(value, Mapping):
            for name in value:
                if (at := _surrogate_at(name)) is not None:
                    return _write((path, name)), at
            inner = value.items()
        else:
            inner = enumerate(value)  # type: ignore[arg-type]  # a list
        for name, each in inner:
            if isinstance(each, str):
                if (at := _surrogate_at(each)) is not None:
                    return _write((path, name)), at
            elif isinstance(each, (dict, list)):
                waiting.append(((path, name), each))
    return None


def _surrogate_at(text: str) -> int | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _write(path: _Path) -> str:
    """Return messages[0].content for a path, in ASCII."""
    parts: list[str] = []
    while path is not None:
        path, name = path
        parts.append(f"[{name}]" if isinstance(name, int) else f".{name[:60]}")
    return "".join(reversed(parts)).removeprefix(".").encode("ascii", "backslashreplace").decode()
