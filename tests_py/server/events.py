"""What a stream of server-sent events says."""

from __future__ import annotations

import json
from typing import Any


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-2])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def join_choices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put a stream's choices together, as the answer without stream has them, without what streams lack."""
    joined: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            whole = joined.setdefault(choice["index"], {"index": choice["index"], "finish_reason": None})
            assert whole["finish_reason"] is None  # nothing comes after the end
            for key, value in (choice.get("delta") or {"text": choice.get("text")}).items():
                if key == "role":
                    whole[key] = value
                elif value is not None:
                    whole[key] = whole.get(key, "") + value
            _join_logprobs(whole, choice["logprobs"])
            whole["finish_reason"] = choice["finish_reason"]
            whole["stop_reason"] = choice["stop_reason"]
    return [joined[index] for index in sorted(joined)]


def _join_logprobs(whole: dict[str, Any], logprobs: dict[str, list[Any]] | None) -> None:
    if logprobs is not None:
        known = whole.setdefault("logprobs", {key: [] for key in logprobs})
        for key, values in logprobs.items():
            known[key] = known[key] + values
