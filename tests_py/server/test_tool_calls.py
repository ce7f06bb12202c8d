"""Calls of tools: what a model says to OpenAI's fields, with streams and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from deltaic.server.tool_calls import CallPiece, ToolCallSplitter
from events import chat_both_ways, read_events
from harness import Maker, running_server, until
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


def split(form: Any, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return what is said, and the calls as (name, arguments)."""
    splitter = ToolCallSplitter(form, TOOLS)
    return put_together([part for piece in pieces for part in splitter.feed(piece)] + splitter.end())


def put_together(parts: list[str | CallPiece]) -> tuple[str, list[tuple[str, str]]]:
    said, calls = "", list[tuple[str, str]]()
    for part in parts:
        if isinstance(part, str):
            said += part
        elif part.name is not None:
            calls.append((part.name, part.arguments))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return said, calls


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
    text = tags(name, value)
    said, (call,) = split("tags", [text])
    assert said == ""
    assert call[0] == "weather"
    assert json.loads(call[1]) == {name: expected}
    assert type(json.loads(call[1])[name]) is type(expected)
    assert split("tags", list(text)) == (said, [call])


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
        ("json", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", ['{"a": 1}']),
        (
            "json",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>B',
            "B",
            ['{"a": "</tool_call>"}'],
        ),
        ("json", '<tool_call>{"name": "f", "arguments": {"a": "\\"}{"}}', "", ['{"a": "\\"}{"}']),
        ("json", '<tool_call>{"name": "f", "arguments": {"a": 1}} and so', "and so", ['{"a": 1}']),
        ("json", '<tool_call>{"name": "f", "arguments": {"a": 1, b</tool_call>x', "x", ['{"a": 1, b']),
        ("json", '<tool_call>{"name": "f", "arguments": {"a": "cut', "", ['{"a": "cut']),
        ("tags", "<tool_call><function=f><parameter=a>\n1\n</parameter>\n<parameter=b>x", "", ['{"a": "1", "b": "x']),
        ("tags", "<tool_call><function=f><parameter=a>x</para", "", ['{"a": "x</para']),
        ("tags", "<tool_call><function=f><parameter=a>x</function></tool_call>.", ".", ['{"a": "x"}']),
        ("tags", "<tool_call><function=f><parameter=a>\nx\n</tool_call>.", ".", ['{"a": "x"}']),
        (
            "tags",
            "<tool_call><function=f><parameter=a>a</parameter> <b></function>\n\n</parameter></function></tool_call>",
            "",
            ['{"a": "a</parameter> <b></function>\\n"}'],
        ),
    ],
)
def test_calls(form: str, text: str, said: str, calls: list[str]) -> None:
    found = split(form, [text])
    assert (found[0], [arguments for _, arguments in found[1]]) == (said, calls)
    assert split(form, list(text)) == found


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("tags", "<tool_call><function=weather><parameter=city\nRome</parameter></function></tool_call>"),
        ("tags", "<tool_call><function=weather>\n<parameter=city"),
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


WORDS: dict[Any, list[str]] = {
    "json": [
        "<tool_call>",
        "</tool_call>",
        '{"name": "now"',
        ', "arguments": ',
        '{"a": "',
        '"',
        "}",
        " ",
        "a",
        "<tool",
    ],
    "tags": [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "<parameter=days>"),
        *("</parameter>", " ", "\n", "a", "<", "</"),
    ],
}


@given(st.sampled_from(["json", "tags"]), st.data(), st.integers(1, 9))
def test_cuts_do_not_matter(form: Any, data: st.DataObject, size: int) -> None:
    words = data.draw(st.lists(st.sampled_from(WORDS[form]), max_size=16))
    text = "".join(words)
    whole = split(form, [text])
    assert split(form, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    assert split(form, words) == whole


def test_arguments_come_in_pieces() -> None:
    """A long string is not held back until the call is complete."""
    for form, opening, closing in (
        ("json", '<tool_call>\n{"name": "weather", "arguments": {"city": "', '"}}\n</tool_call>'),
        ("tags", "<tool_call>\n<function=weather>\n<parameter=city>\n", "\n</parameter>\n</function>\n</tool_call>"),
    ):
        splitter = ToolCallSplitter(form, TOOLS)  # type: ignore[arg-type]
        parts = splitter.feed(opening)
        for _ in range(100):
            new = splitter.feed("far ")
            assert new == [CallPiece(None, "far ")]
            parts += new
        parts += splitter.feed(closing) + splitter.end()
        said, (call,) = put_together(parts)
        assert (said, json.loads(call[1])) == ("", {"city": "far " * 100})


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
    told = chat_both_ways(server, {"messages": HI, "tools": TOOLS})
    assert told["reasoning"] == "Hm."
    assert told["content"] == ""
    assert told["finish_reason"] == "tool_calls"
    assert [json.loads(each["arguments"]) for each in told["calls"]] == [{"city": "Rome", "days": 2}] * 2
    untouched = chat_both_ways(server, {"messages": HI, "tools": TOOLS, "tool_choice": "none"})
    assert untouched["calls"] == []
    assert untouched["finish_reason"] == "stop"


def test_call_that_is_cut_in_its_arguments(make: Maker, tool_model: Callable[[str], Path]) -> None:
    server = make(tags("city", "Rome at night"), model=tool_model("tags"))
    whole = json.dumps({"city": "Rome at night"})
    seen = set()
    for max_tokens in range(1, 60):
        told = chat_both_ways(server, {"messages": HI, "tools": TOOLS, "max_tokens": max_tokens})
        assert told["finish_reason"] == "length"
        if told["calls"]:
            seen.add(told["calls"][0]["arguments"])
            assert whole.startswith(told["calls"][0]["arguments"].partition("\\n")[0])
            assert told["content"] == ""
    assert whole in seen
    assert len(seen) > 3


CALL = {
    "json": '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "tags": "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
}
START = {
    ("json", None): '{"name": "',
    ("json", "weather"): '{"name": "weather", "arguments":',
    ("tags", None): "<function=",
    ("tags", "weather"): "<function=weather>\n",
}


@pytest.mark.parametrize("name", [None, "weather"])
@pytest.mark.parametrize("form", ["json", "tags"])
def test_call_that_is_asked_for(make: Maker, tool_model: Callable[[str], Path], form: str, name: str | None) -> None:
    """The call is begun behind the prompt; with a name the answer ends with it."""
    start = START[form, name]
    server = make(CALL[form].removeprefix(start) + f"\n<tool_call>\n{CALL[form]}<|im_end|>", model=tool_model(form))
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    body: dict[str, Any] = {"messages": HI, "tools": TOOLS, "tool_choice": choice, "max_tokens": 400}
    told = chat_both_ways(server, body)
    request = next(iter(server.engine.seen.values()))
    prompt = server.llm.get_tokenizer().decode(request.prompt_token_ids)
    assert prompt.endswith("<|im_start|>assistant\n<tool_call>\n" + start)
    assert told["content"] == ""
    assert told["finish_reason"] == "tool_calls"
    assert [call["name"] for call in told["calls"]] == ["weather"] * (2 if name is None else 1)
    assert json.loads(told["calls"][0]["arguments"]) == {"city": "Rome"}
    one = chat_both_ways(server, {**body, "parallel_tool_calls": False})
    assert one["calls"] == told["calls"][:1]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("I would rather not.<|im_end|>", "holds no call that can be read"),
        ('fly", "arguments": {"to": "Rome"}}\n</tool_call><|im_end|>', "called 'fly', which is none of weather, now"),
        ('now", "arguments": {"a": 1, b}}\n</tool_call><|im_end|>', "call of now are no JSON"),
    ],
)
def test_answer_without_the_call_that_is_asked_for(
    make: Maker, tool_model: Callable[[str], Path], says: str, words: str
) -> None:
    server = make(says, model=tool_model("json"))
    body: dict[str, Any] = {"messages": HI, "tools": TOOLS, "tool_choice": "required"}
    whole = server.post("/v1/chat/completions", body)
    assert whole.status_code == 422
    assert words in whole.json()["error"]["message"]
    assert whole.json()["error"]["code"] == "tool_call_failed"
    assert read_events(server.post("/v1/chat/completions", {**body, "stream": True}).text)[-1] == whole.json()
    cut = chat_both_ways(server, {**body, "max_tokens": 2})  # what is cut says so
    assert (cut["finish_reason"], cut["content"]) == ("length", "")
    until(lambda: server.llm.num_unfinished == 0)


@pytest.mark.parametrize("name", [None, "weather"])
@pytest.mark.parametrize("form", ["json", "tags"])
def test_call_that_is_asked_for_and_cut(
    make: Maker, tool_model: Callable[[str], Path], form: str, name: str | None
) -> None:
    """Its opening, which the model did not write, is no content; a name is there as soon as it is complete."""
    start = START[form, name]
    server = make(CALL[form].removeprefix(start) + "<|im_end|>", model=tool_model(form))
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    body: dict[str, Any] = {"messages": HI, "tools": TOOLS, "tool_choice": choice}
    whole = chat_both_ways(server, body)["calls"][0]["arguments"]
    seen = set()
    max_tokens = 1
    while (told := chat_both_ways(server, {**body, "max_tokens": max_tokens}))["finish_reason"] == "length":
        assert told["content"] == ""
        for call in told["calls"]:
            assert call["name"] == "weather"
            # Tags hold the line break before a closing tag back until they know it.
            assert whole.startswith(call["arguments"].partition("\\n")[0])
            seen.add(call["arguments"])
        assert told["calls"] or name is None
        max_tokens += 1
    assert told["calls"] == [{"name": "weather", "arguments": whole}]
    assert "" in seen
    assert len(seen) > 3
    until(lambda: server.llm.num_unfinished == 0)


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        ("json", '<tool_call>\n{"name": "', "", []),
        ("json", '<tool_call>\n{"name": "wea', "", []),
        ("json", '<tool_call>\n{"name": "weather"', "", [("weather", "")]),
        ("json", '<tool_call>\n{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
        ("json", '<tool_call>\n{"name": "weather", "arguments": {}}\n</too', "", [("weather", "{}")]),
        ("json", '<tool_call>\n{"name": "weather", "arguments": I would', "", [("weather", "")]),
        ("json", '<tool_call>\n{"name": "no call"</tool_call> Sorry. <tool_', "Sorry. <tool_", []),
        (
            "json",
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>',
            "<tool_call>",
            [("now", "{}")],
        ),
        ("tags", "<tool_call>\n<function=", "", []),
        ("tags", "<tool_call>\n<function=weather>\n<param", "", [("weather", "")]),
        ("tags", "<tool_call>\n<function=now>\n</function>\n</tool", "", [("now", "{}")]),
    ],
)
def test_forced_text_that_is_cut(form: Any, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    for size in (1, 3, len(text)):
        splitter = ToolCallSplitter(form, TOOLS, forced=True)
        parts = [part for i in range(0, len(text), size) for part in splitter.feed(text[i : i + size])]
        found = put_together(parts + splitter.end())
        assert (found[0].lstrip(), found[1]) == (said, calls)


def test_forced_call_has_no_reasoning(make: Maker, tool_model: Callable[[str], Path]) -> None:
    folder = tool_model("json")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{{- '<think>\\n' }}")
    server = make('now", "arguments": {}}\n</tool_call><|im_end|>', model=folder)
    told = chat_both_ways(server, {"messages": HI, "tools": TOOLS, "tool_choice": "required"})
    assert (told["reasoning"], [call["name"] for call in told["calls"]]) == ("", ["now"])
    (prompt, _) = [request.prompt_token_ids for request in server.engine.seen.values()]
    assert server.llm.get_tokenizer().decode(prompt).endswith('<think>\n</think>\n\n<tool_call>\n{"name": "')


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "some"}, "tool_choice must be none, auto, required or name a function, got 'some'"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "there is no tool 'fly' in tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be {'type': 'function'"),
        ({"tool_choice": {"type": "allowed_tools", "name": "now"}}, "tool_choice must be {'type': 'function'"),
        ({"tool_choice": {"type": "function", "name": 5}}, "tool_choice must be {'type': 'function'"),
        ({"tool_choice": "required", "tools": []}, "a call is asked for, and tools is empty"),
        ({"tool_choice": "required", "add_generation_prompt": False}, "which needs a new message"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls: "),
    ],
)
def test_wrong_choices(make: Maker, tool_model: Callable[[str], Path], fields: dict[str, Any], words: str) -> None:
    server = make(model=tool_model("json"))
    answer = server.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS, **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert server.engine.seen == {}


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

    assert chat_both_ways(server, {"messages": messages('{"city": "Rome"}'), "tools": TOOLS})["content"] == "fine"
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
