"""What a request lets a model call, or makes it call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltaic import _core
from deltaic.async_llm import AsyncLLM
from deltaic.chat import ToolFormat
from deltaic.server.tool_calls import OPEN, check_tools

_CLOSED_REASONING = "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how calls of them are read.

    A call that is asked for is begun in the model's name, behind the prompt: `opening`. What the model makes of it is
    checked when the answer has ended.
    """

    tools: Sequence[Mapping[str, Any]]
    form: ToolFormat
    opening: str = ""  # "" leaves the choice to the model
    only: str | None = None  # the one tool that may be called
    single: bool = False  # the answer ends with the first call

    @property
    def forced(self) -> bool:
        return bool(self.opening)

    def prompt_suffix(self, prompt: str) -> str:
        """Return what is put behind a prompt; reasoning that it opens is closed, as a forced call has none."""
        if not self.forced:
            return ""
        return (_CLOSED_REASONING.lstrip() if prompt.endswith("\n") else _CLOSED_REASONING) * (
            prompt.rstrip().endswith("<think>")
        ) + self.opening

    def check(self, calls: Sequence[tuple[str, str]]) -> None:
        """Raise ValueError unless an answer's calls, as (name, arguments), are what was asked for."""
        if not self.forced:
            return
        if not calls:
            raise ValueError("the model's answer holds no call that can be read")
        names = [tool["function"]["name"] for tool in self.tools] if self.only is None else [self.only]
        for name, arguments in calls:
            if name not in names:
                raise ValueError(f"the model called {name!r:.80}, which is none of {', '.join(names)}")
            try:
                json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the arguments of the model's call of {name} are no JSON: {error}") from error


def tool_use(
    llm: AsyncLLM, tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool
) -> ToolUse | None:
    """Return what a request's `tools`, `tool_choice` and `parallel_tool_calls` ask for; None: no tools.

    ValueError for a choice that names no tool of the request, Unsupported for a form that is not known.
    """
    name = _named(choice)
    forced = name is not None or choice == "required"
    if not tools or choice == "none":
        if forced:
            raise ValueError("tool_choice: a call is asked for, and tools is empty")
        return None
    check_tools(tools)
    names = [tool["function"]["name"] for tool in tools]
    if name is not None and name not in names:
        raise ValueError(f"tool_choice: there is no tool {name!r:.80} in tools, which has {', '.join(names)}")
    form = llm.tool_format()
    if form is None:
        raise _core.Unsupported("tools: the model's chat template asks for calls in a form that is not known")
    opening = _opening(form, name) if forced else ""
    return ToolUse(tools, form, opening, only=name, single=name is not None or not parallel)


def _named(choice: str | Mapping[str, Any] | None) -> str | None:
    """Return the tool that a choice names, in the form of chat completions or in that of responses."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise ValueError(f"tool_choice must be none, auto, required or name a function, got {choice!r:.80}")
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ValueError(
            f"tool_choice must be {{'type': 'function', 'function': {{'name': ...}}}}, got {dict(choice)!r:.80}"
        )
    return name


def _opening(form: ToolFormat, name: str | None) -> str:
    """Return the start of a call, cut where the model's own tokens would be."""
    if form == "tags":
        return f"{OPEN}\n<function=" + ("" if name is None else f"{name}>\n")
    return f'{OPEN}\n{{"name": ' + ('"' if name is None else f'{json.dumps(name, ensure_ascii=False)}, "arguments":')
