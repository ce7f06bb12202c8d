"""What a stream of server-sent events says."""

from __future__ import annotations

import json
from typing import Any

from harness import Scripted


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


def both_ways(server: Scripted, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer after checking that the stream says the same."""
    whole, streamed = server.ask(
        ("POST", path, {"json": body}),
        ("POST", path, {"json": {**body, "stream": True, "stream_options": {"include_usage": True}}}),
    )
    assert whole.status_code == streamed.status_code == 200
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = read_events(streamed.text)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole.json()["usage"]
    assert len({event["id"] for event in events}) == 1
    choices: list[dict[str, Any]] = whole.json()["choices"]
    flat = []
    for choice in choices:
        flat.append({**choice, **choice.pop("message", {})})
        flat[-1].pop("message", None)
    told = [{key: value for key, value in choice.items() if value not in (None, "")} for choice in flat]
    joined = [
        {key: value for key, value in choice.items() if value not in (None, "")} for choice in join_choices(events)
    ]
    assert joined == told
    return flat


def chat_both_ways(server: Scripted, body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the message and the finish reason, the same with a stream and without."""
    whole = server.post("/v1/chat/completions", body)
    assert whole.status_code == 200, whole.text
    (choice,) = whole.json()["choices"]
    message = choice["message"]
    told = {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [call["function"] for call in message.get("tool_calls", [])],
        "finish_reason": choice["finish_reason"],
    }
    streamed: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for event in read_events(server.post("/v1/chat/completions", {**body, "stream": True}).text):
        (choice,) = event["choices"]
        streamed["content"] += choice["delta"].get("content", "")
        streamed["reasoning"] += choice["delta"].get("reasoning_content", "")
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["id"].startswith("call_")
                streamed["calls"].append({"name": call["function"]["name"], "arguments": ""})
            assert call["index"] == len(streamed["calls"]) - 1
            streamed["calls"][-1]["arguments"] += call["function"]["arguments"]
        streamed["finish_reason"] = choice["finish_reason"]
    assert streamed == told
    return told
