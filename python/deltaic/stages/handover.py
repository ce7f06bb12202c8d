"""What a stage hands to the next one: gathered row by row, joined once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaic.stages.graph import StageGraph
from deltaic.stages.payload import Array, is_tensor, to_host


@dataclass(slots=True)
class Gathered:
    """What one request's steps gave so far."""

    request: Any = None  # the latest object
    rows: dict[str, list[Array]] = field(default_factory=dict)  # appended along dimension 0
    latest: dict[str, Any] = field(default_factory=dict)  # replaced

    def add(self, payload: Mapping[str, Any], request: Any, replace_keys: frozenset[str] = frozenset()) -> None:
        """Append tensors of rank 2 and more, keep the latest of everything else, and pass over None.

        A key whose rows change their shape starts again. Nothing is judged by its content: rows of zeros are rows.
        """
        self.request = request
        for key, value in payload.items():
            if value is None:
                continue
            if key in replace_keys or not is_tensor(value) or len(value.shape) < 2:
                self.rows.pop(key, None)
                self.latest[key] = to_host(value) if is_tensor(value) else value
                continue
            self.latest.pop(key, None)
            rows = self.rows.setdefault(key, [])
            if rows and rows[0].shape[1:] != tuple(value.shape[1:]):
                rows.clear()
            rows.append(to_host(value))

    def join(self) -> dict[str, Any]:
        """Return the payload, each key joined once."""
        joined: dict[str, Any] = dict(self.latest)
        for key, rows in self.rows.items():
            joined[key] = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return joined


class Handover:
    """The payloads of a stage's requests, until they end."""

    def __init__(self, replace_keys: Iterable[str] = ()) -> None:
        self._replace_keys = frozenset(replace_keys)
        self._gathered: dict[str, Gathered] = {}

    def add(self, req_id: str, payload: Mapping[str, Any], request: Any = None) -> None:
        self._gathered.setdefault(req_id, Gathered()).add(payload, request, self._replace_keys)

    def adopt(self, req_id: str, entry: tuple[Mapping[str, Any], Any]) -> None:
        """Take over what was gathered elsewhere, as payload and request; later steps extend it."""
        self.add(req_id, *entry)

    def take(self, req_id: str) -> tuple[dict[str, Any], Any]:
        """Return the joined payload of a request and its latest object, and forget it."""
        gathered = self._gathered.pop(req_id, Gathered())
        return gathered.join(), gathered.request

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._gathered


def crop_codes(
    rows: npt.NDArray[Any], token_ids: npt.NDArray[Any], *, codebook_size: int = 2048
) -> npt.NDArray[np.int64]:
    """Return the frames of rows that belong to output tokens: the consumer's side of a hand-over.

    Of the last rows, one a token, those whose token is a code and whose codes are all in range.
    """
    count = min(len(rows), len(token_ids))
    frames = np.asarray(rows, dtype=np.int64)[len(rows) - count :]
    ids = np.asarray(token_ids, dtype=np.int64)[len(token_ids) - count :]
    keep = (ids >= 0) & (ids < codebook_size) & ((frames >= 0) & (frames < codebook_size)).all(axis=1)
    return frames[keep]


def gathers_payload(
    graph: StageGraph,
    stage: str,
    *,
    make_payload: Callable[..., Any] | None,
    is_chunked: bool = False,
    has_channel: bool = True,
) -> bool:
    """Return whether a stage keeps what its steps give for the next stage.

    It does when it has a function that makes the payload and someone to give it to, whether or not it also answers
    the client. Chunked edges hand over as they go.
    """
    return has_channel and not is_chunked and make_payload is not None and graph.is_producer(stage)


def defers_payload(*, at_request_end: bool, has_prefix_cache: bool, gathers: bool) -> bool:
    """Return whether a payload stays on the device until its request ends: a prefix cache needs each step's rows."""
    return at_request_end and not has_prefix_cache and gathers


def step_payloads(
    build: Callable[[], Mapping[str, Any]],
    *,
    deferred: bool,
    for_stage: bool,
    for_client: bool,
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return what the next stage and the client get of a step: built once at most, not at all when deferred."""
    if deferred or not (for_stage or for_client):
        return None, None
    payload = build()
    return (payload if for_stage else None), (payload if for_client else None)
