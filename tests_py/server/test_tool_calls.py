"""Calls of tools: what a model says to OpenAI's fields, with streams and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from deltaic.server.tool_calls import Call, ToolCallSplitter
from events import read_events
from harness import Maker, Scripted, running_server
from hypothesis import given
from hypothesis import strategies as st

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "metric": {"type": "boolean"},
    "where": {"type": "object"},
    "hours": {"type": "array"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "both": {"type": ["number", "null"]},
    "other": {"$ref": "#/defs/x"},
    "odd": 5,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now"}},
]
HI = [{"role": "user", "content": "Hi"}]


def split(form: Any, pieces: list[str]) -> tuple[str, list[Call]]:
    splitter = ToolCallSplitter(form, TOOLS)
    parts = [splitter.feed(piece) for piece in pieces]
    return "".join(said for said, _ in parts) + splitter.end(), [call for _, calls in parts for call in calls]


def tags(name: str, value: str) -> str:
    return f"<tool_call>\n<function=weather>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("city", "Paris", "Paris"),
        ("city", "5", "5"),
        ("city", "\n two\nlines \n", "\n two\nlines \n"),  # only the template's own line breaks go
        ("city", 'a < b </b> {x} "q" ď', 'a < b </b> {x} "q" ď'),
        ("city", "", ""),
        ("days", "5", 5),
        ("days", "5.0", 5),
        ("days", "many", "many"),
        ("share", "0.5", 0.5),
        ("share", "NaN", "NaN"),
        ("share", "1e999", "1e999"),
        ("metric", "True", True),
        ("metric", "false", False),
        ("where", '{"a": [1]}', {"a": [1]}),
        ("where", "{bad", "{bad"),
        ("hours", "[1, 2]", [1, 2]),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("both", "None", "None"),
        ("both", "2.5", 2.5),
        ("other", '{"a": 1}', {"a": 1}),
        ("other", "text", "text"),
        ("odd", "5", "5"),
        ("unknown", "5", "5"),
    ],
)
def test_values_have_the_schemas_types(name: str, value: str, expected: Any) -> None:
    """D97."""
    said, (call,) = split("tags", [tags(name, value)])
    assert said == ""
    assert call.name == "weather"
    assert json.loads(call.arguments) == {name: expected}
    assert type(json.loads(call.arguments)[name]) is type(expected)


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (
            "tags",
            "Hm.\n\n" + tags("city", "Rome") + "\n" + tags("days", "2"),
            "Hm.",
            ['{"city": "Rome"}', '{"days": 2}'],
        ),
        ("tags", "<tool_call><function=now></function></tool_call>", "", ["{}"]),
        ("tags", "<tool_call>\n<function=now>\n</function>\n</tool_call> So.", "So.", ["{}"]),
        ("tags", "no calls \n", "no calls \n", []),
        ("json", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", ["{}"]),
        ("json", '{"name": "now"}', '{"name": "now"}', []),
        ("json", 'A <tool_call>{"name": "now"}</tool_call>\n', "A", ["{}"]),
    ],
)
def test_calls(form: str, text: str, said: str, calls: list[str]) -> None:
    found = split(form, [text])
    assert (found[0], [call.arguments for call in found[1]]) == (said, calls)
    assert split(form, list(text)) == found


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("tags", "<tool_call><function=weather><parameter=city\nRome</parameter></function></tool_call>"),
        ("tags", "<tool_call><function=weather><parameter=city>Rome</function></tool_call>"),
        ("tags", "<tool_call><function=weather>Rome</function></tool_call>"),
        ("tags", "<tool_call>weather</tool_call>"),
        ("tags", "A <tool_call><function=weather>"),
        ("tags", "A <tool_c"),
        ("tags", "A  \n<tool_call>"),
        ("json", "<tool_call>{bad}</tool_call>"),
        ("json", '<tool_call>["now"]</tool_call>'),
        ("json", '<tool_call>{"name": 5}</tool_call>'),
        ("json", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>'),
        ("json", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
        ("json", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ],
)
def test_what_is_no_call_is_text(form: str, text: str) -> None:
    """D97, D99."""
    assert split(form, [text]) == (text, [])
    assert split(form, [text[i : i + 3] for i in range(0, len(text), 3)]) == (text, [])


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "now"}', " ", "\n", "a", "<", "<tool", "{"]),
        max_size=12,
    ),
    st.integers(1, 9),
)
def test_cuts_do_not_matter(words: list[str], size: int) -> None:
    text = "".join(words)
    whole = split("json", [text])
    assert split("json", [text[i : i + size] for i in range(0, len(text), size)]) == whole
    assert split("json", words) == whole


def both_ways(server: Scripted, body: dict[str, Any]) -> dict[str, Any]:
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
            assert call["index"] == len(streamed["calls"])
            assert call["id"].startswith("call_")
            streamed["calls"].append(call["function"])
        streamed["finish_reason"] = choice["finish_reason"]
    assert streamed == told
    return told


@pytest.mark.parametrize("step_size", [1, 2, 7])
@pytest.mark.parametrize("form", ["json", "tags"])
def test_calls_over_http(make: Maker, tool_model: Callable[[str], Path], form: str, step_size: int) -> None:
    """D98, D100: in pieces of any size; the reasoning ends at a call."""
    call = {"json": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'}
    call["tags"] = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    says = f"<think>\nHm.\n{call[form]}\n{call[form]}<|im_end|>"
    server = make(says, model=tool_model(form), engine={"step_size": step_size})
    told = both_ways(server, {"messages": HI, "tools": TOOLS})
    assert told["reasoning"] == "Hm."
    assert told["content"] == ""
    assert told["finish_reason"] == "tool_calls"
    assert [json.loads(each["arguments"]) for each in told["calls"]] == [{"city": "Rome", "days": 2}] * 2
    untouched = both_ways(server, {"messages": HI, "tools": TOOLS, "tool_choice": "none"})
    assert untouched["calls"] == []
    assert untouched["finish_reason"] == "stop"


def test_call_that_is_cut_is_text(make: Maker, tool_model: Callable[[str], Path]) -> None:
    """D99."""
    server = make("Well <tool_call>\n{", model=tool_model("json"))
    for max_tokens in range(1, 12):
        told = both_ways(server, {"messages": HI, "tools": TOOLS, "max_tokens": max_tokens})
        assert told["calls"] == []
        assert told["finish_reason"] == "length"
        assert "Well <tool_call>\n{".startswith(told["content"])


def test_history_with_calls(make: Maker, tool_model: Callable[[str], Path]) -> None:
    """D101: arguments come back as the JSON text that the client got."""
    server = make(model=tool_model("json"))

    def messages(arguments: str) -> list[dict[str, Any]]:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]

    assert both_ways(server, {"messages": messages('{"city": "Rome"}'), "tools": TOOLS})["content"] == "fine"
    prompt = next(iter(server.engine.seen.values())).prompt_token_ids
    assert '"arguments": {"city": "Rome"}' in server.llm.get_tokenizer().decode(prompt)
    bad = server.post("/v1/chat/completions", {"messages": messages("{bad"), "tools": TOOLS})
    assert bad.status_code == 400
    assert "arguments is not JSON" in bad.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([{}], "tools[0] must be {'type': 'function'"),
        ([*TOOLS, {"type": "web_search"}], "tools[2] must be"),
        ([{"type": "function", "function": {"name": 5}}], "tools[0].function.name must be a string, got 5"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters must be"),
        ([5], "tools[0]: "),
    ],
)
def test_wrong_tools(make: Maker, tool_model: Callable[[str], Path], tools: Any, words: str) -> None:
    server = make(model=tool_model("json"))
    answer = server.post("/v1/chat/completions", {"messages": HI, "tools": tools})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "tools"


def test_template_with_another_format(make: Maker, tool_model: Callable[[str], Path]) -> None:
    server = make(model=tool_model("unknown"))
    answer = server.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS})
    assert answer.status_code == 400
    assert "in a form that is not known" in answer.json()["error"]["message"]


def test_official_client(make: Maker, tool_model: Callable[[str], Path]) -> None:
    server = make(tags("city", "Rome") + "<|im_end|>", model=tool_model("tags"))
    with (
        running_server(server.llm, server.settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        fields: dict[str, Any] = {"model": "toy", "messages": HI, "tools": TOOLS}
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        with client.chat.completions.stream(**fields) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.tool_calls is not None
        assert final.tool_calls[0].function.arguments == call.function.arguments
