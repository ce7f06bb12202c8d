"""Arguments of a model's position function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_NEVER = frozenset({"self", "input_tokens"})


def filter_position_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Keep the arguments that a position function names.

    The very same object comes back for a function that takes any keyword, or whose signature cannot be read.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return arguments
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in kinds} - _NEVER
    return {name: value for name, value in arguments.items() if name in names}
