"""What a forward returns, and what of it survives the next replay of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from deltaic.stages.payload import Array


class StageOutput(NamedTuple):
    """The result of a stage's forward."""

    hidden: Any
    multimodal: Any = None  # a mapping of tensors for the next stage
    aux_hidden: Any = None
    extra: Any = None


def restore_output(result: Any, *, has_multimodal_outputs: bool) -> Any:
    """Give a plain tuple that a graph replay returned its fields back; anything else is returned as it is.

    A tuple of four whose second field is a tensor is a forward's auxiliary hidden states, no payload.
    """
    is_plain = type(result) is tuple and len(result) == len(StageOutput._fields)
    if has_multimodal_outputs and is_plain and isinstance(result[1], Mapping):
        return StageOutput(*result)
    return result


def extract_multimodal(result: Any, *, has_multimodal_outputs: bool) -> tuple[Any, Mapping[str, Any]]:
    """Return hidden states and payload of any stage's result. ValueError for what is neither tensor nor sequence."""
    if isinstance(result, StageOutput) and has_multimodal_outputs:
        return result.hidden, result.multimodal or {}
    if hasattr(result, "shape"):
        return result, {}
    if isinstance(result, (list, tuple)) and result:
        return result[0], {}
    raise ValueError(f"a forward returns a tensor, a sequence or a StageOutput, got {type(result).__name__}")


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The outputs of one step: named rows, each with its request."""

    step: int
    req_ids: tuple[str, ...]
    fields: Mapping[str, Array]  # [num_rows, ...]


class StepOutputs:
    """Outputs that a graph writes to fixed addresses, twice: a step's are read while the next one is written.

    `capture` names the arrays once; publish() copies what the step wrote to the side of its parity.
    """

    def __init__(self, capture: Mapping[str, Array]) -> None:
        self._source = dict(capture)
        self._sides = tuple({name: np.empty_like(array) for name, array in capture.items()} for _ in range(2))
        self._step = -1

    def publish(self, req_ids: Sequence[str], written: Mapping[str, Array] | None = None) -> OutputRows:
        """Take the rows of the step that just ran. The view is valid until the second step after it.

        written: where the step wrote, if not to the arrays of the capture.
        """
        self._step += 1
        side, count = self._sides[self._step % 2], len(req_ids)
        for name, array in (self._source if written is None else written).items():
            side[name][:count] = array[:count]
        return OutputRows(self._step, tuple(req_ids), {name: array[:count] for name, array in side.items()})

    def is_valid(self, view: OutputRows) -> bool:
        """Return whether the arrays of a view still hold its step."""
        return self._step - view.step < 2
