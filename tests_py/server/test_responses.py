"""/v1/responses: items and events, whole and streamed, also through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness import Maker, Scripted, running_server, until

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
LOGPROBS = ["message.output_text.logprobs"]
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


def stream(server: Scripted, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream after checking how they are numbered and named."""
    answer = server.post("/v1/responses", {**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs from one to the next."""
    items = [{key: item[key] for key in item if key not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "output": items}


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that the events of a stream make, checked against each item's last event."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        index = event.get("output_index")
        if event["type"] == "response.output_item.added":
            items[index] = event["item"]
        elif event["type"] == "response.content_part.added":
            items[index]["content"].append(event["part"])
        elif event["type"] in ("response.output_text.delta", "response.reasoning_text.delta"):
            part = items[index]["content"][event["content_index"]]
            part["text"] += event["delta"]
            if event["type"] == "response.output_text.delta":
                part["logprobs"] += event["logprobs"]
        elif event["type"] == "response.function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
        elif event["type"] in ("response.output_text.done", "response.reasoning_text.done"):
            part = items[index]["content"][0]
            assert part["text"] == event["text"]
            if event["type"] == "response.output_text.done":  # the last tokens may have no text
                assert event["logprobs"][: len(part["logprobs"])] == part["logprobs"]
                part["logprobs"] = event["logprobs"]
        elif event["type"] == "response.function_call_arguments.done":
            assert items[index]["arguments"] == event["arguments"]
        elif event["type"] == "response.output_item.done":
            assert {**items[index], "status": event["item"]["status"]} == event["item"]
            items[index] = event["item"]
        if index is not None and "item_id" in event:
            assert event["item_id"] == items[index]["id"]
    return [items[index] for index in sorted(items)]


def both_ways(server: Scripted, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response after checking that the stream says the same."""
    whole = server.post("/v1/responses", body)
    assert whole.status_code == 200, whole.text
    response: dict[str, Any] = whole.json()
    events = stream(server, body)
    last = events[-1]
    assert last["type"] == f"response.{response['status']}"
    assert put_together(events) == last["response"]["output"]
    assert plain(last["response"]) == plain(response)
    return response


@pytest.mark.parametrize("step_size", [1, 2, 7])
def test_text(make: Maker, step_size: int) -> None:
    server = make("A ďog 🌶.<|im_end|>", engine={"step_size": step_size})
    response = both_ways(server, {"input": "Hi", "instructions": "Be kind.", "metadata": {"a": "b"}})
    (message,) = response["output"]
    assert message["content"] == [{"type": "output_text", "text": "A ďog 🌶.", "annotations": [], "logprobs": []}]
    assert (message["role"], message["status"], response["status"]) == ("assistant", "completed", "completed")
    assert response["usage"]["output_tokens"] + response["usage"]["input_tokens"] == response["usage"]["total_tokens"]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert response["metadata"] == {"a": "b"}
    prompt = next(iter(server.engine.seen.values())).prompt_token_ids
    text = server.llm.get_tokenizer().decode(prompt)
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("step_size", [1, 3])
def test_log_probabilities_of_a_message(make: Maker, step_size: int) -> None:
    """They are those of the same answer as a chat."""
    server = make("A ďog 🌶 ran.<|im_end|>", engine={"step_size": step_size})
    body = {"input": "Hi", "include": LOGPROBS, "top_logprobs": 2, "seed": 1}
    response = both_ways(server, body)
    found = response["output"][0]["content"][0]["logprobs"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2, "seed": 1}
    expected = server.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert found == expected
    assert len(found) == response["usage"]["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in found)
    assert response["top_logprobs"] == 2
    assert (
        both_ways(server, {"input": "Hi", "include": LOGPROBS})["output"][0]["content"][0]["logprobs"][0][
            "top_logprobs"
        ]
        == []
    )
    assert both_ways(server, {"input": "Hi"})["output"][0]["content"][0]["logprobs"] == []


def test_log_probabilities_are_not_those_of_reasoning_and_calls(make: Maker, tool_model: Callable[[str], Path]) -> None:
    server = make(f"<think>\nHm.\n</think>\n\nWell.\n{CALL}<|im_end|>", model=tool_model("tags"))
    _, message, call = both_ways(server, {"input": "Hi", "tools": TOOLS, "include": LOGPROBS})["output"]
    said = b"".join(bytes(entry["bytes"]) for entry in message["content"][0]["logprobs"])
    assert said.decode().strip() == "Well."
    assert "logprobs" not in call


@pytest.mark.parametrize("step_size", [1, 3])
def test_reasoning_text_and_calls(make: Maker, tool_model: Callable[[str], Path], step_size: int) -> None:
    server = make(
        f"<think>\nHm.\n</think>\n\nWell.\n{CALL}\n{CALL}<|im_end|>",
        model=tool_model("tags"),
        engine={"step_size": step_size},
    )
    response = both_ways(server, {"input": "Hi", "tools": TOOLS})
    reasoning, message, *calls = response["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Well."
    for call in calls:
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            "function_call",
            "weather",
            {"city": "Rome"},
        )
        assert call["call_id"].startswith("call_")
    assert len(calls) == 2
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_turns_go_back_as_they_came(make: Maker, tool_model: Callable[[str], Path]) -> None:
    server = make(f"Well.{CALL}<|im_end|>", model=tool_model("tags"))
    first = server.post("/v1/responses", {"input": "Hi", "tools": TOOLS}).json()["output"]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        *first,
        {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "sunny"},
    ]
    assert server.post("/v1/responses", {"input": items, "tools": TOOLS}).status_code == 200
    request = list(server.engine.seen.values())[-1]
    text = server.llm.get_tokenizer().decode(request.prompt_token_ids)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nWell.{call}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>" in text


def test_answer_that_is_cut_or_empty(make: Maker) -> None:
    cut = both_ways(make("Once upon a time"), {"input": "Hi", "max_output_tokens": 2})
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    empty = both_ways(make("<|im_end|>"), {"input": "Hi"})
    assert empty["output"][0]["content"][0]["text"] == ""


def test_call_that_is_asked_for(make: Maker, tool_model: Callable[[str], Path]) -> None:
    server = make(CALL.removeprefix("<tool_call>\n<function=weather>\n") + "<|im_end|>", model=tool_model("tags"))
    for choice in ({"type": "function", "name": "weather"},):
        (call,) = both_ways(server, {"input": "Hi", "tools": TOOLS, "tool_choice": choice})["output"]
        assert json.loads(call["arguments"]) == {"city": "Rome"}
    server = make("No.<|im_end|>", model=tool_model("tags"))
    body = {"input": "Hi", "tools": TOOLS, "tool_choice": "required"}
    assert server.post("/v1/responses", body).status_code == 422
    last = stream(server, body)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "tool_call_failed"


def test_shutdown_ends_a_stream_with_an_event(make: Maker) -> None:
    server = make(lambda *_: [7] * 100_000, engine={"on_step": lambda: __import__("time").sleep(0.01)})

    async def run() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app), base_url="http://test") as client:
            body = {"input": "x", "stream": True}
            streamed = asyncio.ensure_future(client.post("/v1/responses", json=body))
            while not server.engine.running:
                await asyncio.sleep(0.002)
            await asyncio.to_thread(server.llm.shutdown)
            return (await streamed).text

    last = json.loads(asyncio.run(run()).strip().split("\n")[-1].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine was shut down"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, "input: "),
        ({"input": []}, "input must hold at least 1 item"),
        ({"input": [5]}, "input[0]: "),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] is of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] is of type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text must be"),
        ({"input": [{"role": "robot", "content": "x"}]}, "role must be one of"),
        ({"input": [{"type": "function_call", "name": 5}]}, "must be {'function'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{bad"}]}, "arguments is not JSON"),
        ({"input": "\ud800"}, "lone surrogate"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] must be {'type': 'function', 'name': ...}"),
        ({"tools": TOOLS}, "the model's chat template writes none"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"background": True}, "background is not supported"),
        (
            {"include": ["file_search_call.results"]},
            "include: 'file_search_call.results' is not supported; this version",
        ),
        ({"truncation": "auto"}, "truncation must be disabled"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format other than text"),
        ({"top_logprobs": 2}, "top_logprobs needs include = ['message.output_text.logprobs']"),
        ({"include": LOGPROBS, "top_logprobs": -1}, "top_logprobs must be at least 0, got -1"),
        ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs must be at most max_logprobs = 20, got 21"),
        ({"include": LOGPROBS, "top_logprobs": "2"}, "top_logprobs: "),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"max_output_tokens": 0}, "max_output_tokens must be an integer in [1, 2147483647], got 0"),
        ({"max_output_tokens": 10**21}, "max_output_tokens must be an integer in [1, 2147483647], got 10000000"),
        ({"max_tokens": 5}, "max_tokens is max_output_tokens"),
        ({"n": 2}, "n must be 1"),
        ({"metadata": {"a": 5}}, "metadata.a"),
    ],
    ids=str,
)
def test_wrong_bodies(make: Maker, fields: dict[str, Any], words: str) -> None:
    server = make()
    content = json.dumps({"input": "Hi", **fields})
    for more in (content, json.dumps({"input": "Hi", **fields, "stream": True})):
        (answer,) = server.ask(
            ("POST", "/v1/responses", {"content": more, "headers": {"content-type": "application/json"}})
        )
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"], answer.text
    assert server.engine.seen == {}


def test_stream_options_need_a_stream(make: Maker) -> None:
    body = {"input": "Hi", "stream_options": {"include_usage": True}}
    answer = make().post("/v1/responses", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


def test_official_client(make: Maker, tool_model: Callable[[str], Path]) -> None:
    server = make(f"<think>Hm.</think>Well.{CALL}<|im_end|>", model=tool_model("tags"))
    with (
        running_server(server.llm, server.settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        fields: dict[str, Any] = {"model": "toy", "input": "Hi", "tools": TOOLS}
        response = client.responses.create(**fields)
        assert response.output_text == "Well."
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        with client.responses.stream(**fields) as events:
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            final = events.get_final_response()
        assert text == final.output_text == "Well."
        assert final.output[-1].type == "function_call"
        assert final.output[-1].arguments == '{"city": "Rome"}'
        said = client.responses.create(**fields, include=LOGPROBS, top_logprobs=1).output[1]
        assert said.type == "message"
        assert said.content[0].type == "output_text"
        assert said.content[0].logprobs
        assert len(said.content[0].logprobs[0].top_logprobs) == 1
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(**fields, previous_response_id="resp_1")
        until(lambda: server.llm.num_unfinished == 0)


def test_speech_of_a_text_model(make: Maker) -> None:
    server = make()
    refused = server.post("/v1/audio/speech", {"model": "toy", "input": "Hi", "voice": "alloy"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the model toy writes text and makes no speech"
    assert refused.json()["error"]["param"] == "model"
    assert server.post("/v1/audio/speech", {"model": "tts-1", "input": "Hi"}).status_code == 404
    assert server.post("/v1/audio/speech", {"input": 5}).status_code == 400
