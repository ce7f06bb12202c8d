"""Updates of a request's input while it lives: new segments of a session, and conditioning that comes with a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deltaic.stages.payload import Key, PayloadBuffers, deserialize


@dataclass(frozen=True, slots=True)
class Envelope:
    """What arrives for a request: bytes or a dict of conditioning, for it alone."""

    req_id: str
    payload: object = None  # bytes of serialize, a dict, or None
    starts_segment: bool = False  # the next segment of a session, not more of this one


@dataclass(slots=True)
class Updates:
    """Applies envelopes to the buffers in the order in which they come.

    A segment's conditioning is merged with what the session carries, or takes its place where the model says so.
    """

    buffers: PayloadBuffers
    keys: tuple[Key, ...]
    replaces: bool = False

    def apply(self, envelopes: Iterable[Envelope]) -> None:
        """Apply each envelope once. Requests that are not live are ignored."""
        for envelope in envelopes:
            if envelope.req_id not in self.buffers:
                continue
            content = deserialize(envelope.payload, self.keys)
            if envelope.starts_segment:
                self._start_segment(envelope.req_id, content)
            else:
                self.buffers.merge(envelope.req_id, content)

    def _start_segment(self, req_id: str, content: Mapping[str, Any]) -> None:
        if self.replaces:
            self.buffers.replace(req_id, content)
        else:
            self.buffers.merge(req_id, content)
        self.buffers.merge(req_id, {"meta": {"num_processed_tokens": 0, "resumable": True}})


def with_request_info(
    payload: dict[str, Any], req_id: str, request: Mapping[str, Any] | None, *, wanted: bool
) -> dict[str, Any]:
    """Return a copy that names the request and has its features, for models that want it.

    The very same object comes back for other models, and where nothing is known of the request.
    """
    if not wanted or request is None:
        return payload
    enriched = dict(payload)
    enriched.setdefault("mm_features", request.get("mm_features"))
    enriched["req_id"] = req_id
    return enriched
