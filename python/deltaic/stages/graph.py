"""Which stages a pipeline has, and what passes between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deltaic import _core
from deltaic.stages.payload import Key


@dataclass(frozen=True, slots=True)
class Full:
    """An edge that hands over once, when the source has ended."""


@dataclass(frozen=True, slots=True)
class Chunked:
    """An edge that hands over rows as they come: `first` of them at once, then `size` a chunk.

    `left_context` rows before a chunk are given again: the target then decodes each chunk anew, with no state of its
    own but what these rows give it.
    """

    first: int
    size: int
    left_context: int = 0

    def __post_init__(self) -> None:
        for name, least in (("first", 1), ("size", 1), ("left_context", 0)):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} of a chunked edge must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{name} of a chunked edge must be at least {least}, got {value}")
            if value >= 1 << 31:
                raise ValueError(f"{name} of a chunked edge must be below 2^31, got {value}")


@dataclass(frozen=True, slots=True)
class Edge:
    """From one stage to another: how, and which keys of the payload."""

    source: str
    target: str
    keys: tuple[Key, ...]
    mode: Full | Chunked = Full()

    def make(self, *, deadline_s: float | None = None, replace_keys: Iterable[Key] = ()) -> _core.StageEdge:
        """Return the edge that stages put into and take from. ValueError for a replaced key that it does not carry."""
        replace_keys = list(replace_keys)
        for key in replace_keys:
            if key not in self.keys:
                raise ValueError(f"edge {self.source} -> {self.target} replaces {key!r}, which it does not carry")
        mode = _core.EdgeMode()
        if isinstance(self.mode, Chunked):
            mode = _core.EdgeMode(
                is_full=False, first=self.mode.first, size=self.mode.size, left_context=self.mode.left_context
            )
        return _core.StageEdge(
            mode,
            name=f"{self.source} -> {self.target}",
            keys=list(self.keys),
            replace_keys=replace_keys,
            deadline_s=deadline_s,
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One model of a pipeline."""

    name: str
    inputs: tuple[Key, ...] = ()  # keys that it needs of other stages
    outputs: tuple[Key, ...] = ()  # keys that it makes
    answers_client: bool = False
    has_sound: bool = False  # left out by requests that want text alone


class StageGraph:
    """Stages and edges, checked once. Raises ValueError naming the stage or the edge that is wrong."""

    def __init__(self, stages: Iterable[Stage], edges: Iterable[Edge]) -> None:
        self.stages = tuple(stages)
        self.edges = tuple(edges)
        self._by_name = {stage.name: stage for stage in self.stages}
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage")
        if len(self._by_name) != len(self.stages):
            names = [stage.name for stage in self.stages]
            raise ValueError(f"two stages are called {next(name for name in names if names.count(name) > 1)!r}")
        if not any(stage.answers_client for stage in self.stages):
            raise ValueError("no stage answers the client")
        self._check_stages()
        self._check_edges()
        self.order = self._sort()
        self._check_use()

    def __getitem__(self, name: str) -> Stage:
        return self._by_name[name]

    def outgoing(self, name: str) -> tuple[Edge, ...]:
        """Return the edges that a stage feeds."""
        return tuple(edge for edge in self.edges if edge.source == name)

    def incoming(self, name: str) -> tuple[Edge, ...]:
        """Return the edges that feed a stage."""
        return tuple(edge for edge in self.edges if edge.target == name)

    def is_producer(self, name: str) -> bool:
        """Return whether a stage hands something to another one."""
        return bool(self.outgoing(name))

    def active(self, *, wants_sound: bool) -> tuple[str, ...]:
        """Return the stages that a request passes through, in their order."""
        return tuple(name for name in self.order if wants_sound or not self._by_name[name].has_sound)

    def _check_stages(self) -> None:
        for stage in self.stages:
            if not isinstance(stage.name, str) or not stage.name:
                raise ValueError(f"the name of a stage must be a string, got {stage.name!r}")
            for field in ("inputs", "outputs"):
                _check_keys(f"{field} of stage {stage.name!r}", getattr(stage, field))
            for field in ("answers_client", "has_sound"):
                if not isinstance(getattr(stage, field), bool):
                    value = getattr(stage, field)
                    raise ValueError(f"{field} of stage {stage.name!r} must be true or false, got {value!r}")

    def _check_edges(self) -> None:
        seen = set()
        brought: dict[tuple[str, Key], str] = {}  # target and key -> source
        for edge in self.edges:
            label = f"edge {edge.source} -> {edge.target}"
            for name in (edge.source, edge.target):
                if name not in self._by_name:
                    raise ValueError(f"{label}: there is no stage {name!r}")
            if edge.source == edge.target:
                raise ValueError(f"{label}: a stage cannot feed itself")
            if (edge.source, edge.target) in seen:
                raise ValueError(f"{label} is there twice")
            seen.add((edge.source, edge.target))
            mode: Any = edge.mode
            if not isinstance(mode, (Full, Chunked)):
                raise ValueError(f"mode of {label} must be Full() or Chunked(first, size), got {mode!r}")
            if not edge.keys:
                raise ValueError(f"{label} carries no key")
            _check_keys(f"keys of {label}", edge.keys)
            for key in edge.keys:
                other = brought.setdefault((edge.target, key), edge.source)
                if other != edge.source:
                    raise ValueError(f"{label}: stage {edge.target!r} has {'.'.join(key)} of stage {other!r} already")
                if key not in self._by_name[edge.source].outputs:
                    raise ValueError(f"{label}: stage {edge.source!r} does not make {'.'.join(key)}")
                if key not in self._by_name[edge.target].inputs:
                    raise ValueError(f"{label}: stage {edge.target!r} does not take {'.'.join(key)}")

    def _sort(self) -> tuple[str, ...]:
        """Return the stages with each behind those that feed it."""
        order: list[str] = []
        waiting = [stage.name for stage in self.stages]
        while waiting:
            ready = [n for n in waiting if all(edge.source in order for edge in self.incoming(n))]
            if not ready:
                raise ValueError(f"the edges form a circle through {', '.join(waiting)}")
            order.append(ready[0])
            waiting.remove(ready[0])
        return tuple(order)

    def _check_use(self) -> None:
        for stage in self.stages:
            given = {key for edge in self.incoming(stage.name) for key in edge.keys}
            missing = [key for key in stage.inputs if key not in given]
            if missing:
                raise ValueError(f"stage {stage.name!r} needs {'.'.join(missing[0])}, which no edge brings")
        for edge in self.edges:
            if self[edge.source].has_sound and not self[edge.target].has_sound:
                raise ValueError(
                    f"edge {edge.source} -> {edge.target}: requests of text alone leave out stage {edge.source!r}, and "
                    f"stage {edge.target!r} would wait for it"
                )
        for stage in self.stages:
            if not stage.answers_client and not self.is_producer(stage.name):
                raise ValueError(f"what stage {stage.name!r} makes reaches nobody")


def _check_keys(what: str, keys: Any) -> None:
    """Raise ValueError unless keys are pairs of strings, each there once."""
    if not isinstance(keys, tuple):
        raise ValueError(f"{what} must be a tuple of (section, name), got {keys!r}")
    for key in keys:
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) and part for part in key)):
            raise ValueError(f"{what} must be (section, name), got {key!r}")
    repeated = [key for key in keys if keys.count(key) > 1]
    if repeated:
        raise ValueError(f"{what} has {'.'.join(repeated[0])} twice")
