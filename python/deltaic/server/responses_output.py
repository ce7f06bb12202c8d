"""The items of a response while they grow, and the events that say so."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from deltaic.server.chat_answer import Said
from deltaic.server.tool_calls import CallPiece

Event = tuple[str, str]  # name, JSON

_TEXT_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseOutput:
    """Reasoning, messages and calls in the order in which the model makes them; the last one may be open.

    Log probabilities are a message's: those of the tokens that came with its text or since the item before it.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come yet
        self._num_events = 0

    def event(self, name: str, /, **fields: Any) -> Event:
        """Return an event with the next number."""
        data = json.dumps({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return name, data

    def add(self, said: Said, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        self._logprobs += logprobs
        if (said.reasoning or said.parts) and not any(isinstance(part, str) for part in said.parts):
            self._logprobs = []
        if said.reasoning:
            yield from self._add_text("reasoning", said.reasoning)
        for part in said.parts:
            if isinstance(part, str):
                yield from self._add_text("message", part)
            else:
                yield from self._add_call(part)

    def end(self, status: str) -> Iterator[Event]:
        """Close what is open, with its status; an answer without anything has an empty message."""
        if not self.items:
            yield from self._begin("message")
        if self._open is not None and self._open["type"] == "message":
            self._open["content"][0]["logprobs"] += self._logprobs
        yield from self._close(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        fields = {}
        if kind == "message":
            part["logprobs"] += self._logprobs
            fields["logprobs"], self._logprobs = self._logprobs, []
        yield self._item_event(f"response.{_TEXT_TYPES[kind]}.delta", delta=text, **fields)

    def _add_call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.name is not None:
            yield from self._close("completed")
            yield from self._begin("function_call", call_id=f"call_{uuid.uuid4().hex[:24]}", name=piece.name)
        if piece.arguments:
            assert self._open is not None
            self._open["arguments"] += piece.arguments
            yield self._item_event("response.function_call_arguments.delta", delta=piece.arguments)

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item["arguments"] = ""
        self.items.append(item)
        self._open = item
        yield self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if kind in _TEXT_TYPES:
            part: dict[str, Any] = {"type": _TEXT_TYPES[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"] = [part]
            yield self._item_event("response.content_part.added", part=part)

    def _close(self, status: str) -> Iterator[Event]:
        item, kind = self._open, None if self._open is None else self._open["type"]
        if item is None:
            return
        if kind == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            fields = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield self._item_event(f"response.{part['type']}.done", text=part["text"], **fields)
            yield self._item_event("response.content_part.done", part=part)
        item["status"] = status
        self._open = None
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _item_event(self, name: str, /, **fields: Any) -> Event:
        """Return an event of the open item."""
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self.items) - 1}
        if self._open["type"] in _TEXT_TYPES:
            where["content_index"] = 0
        return self.event(name, **where, **fields)
