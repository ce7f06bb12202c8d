"""What other servers got wrong, one test an entry of docs/known_bugs.md: over HTTP, with a stream and without."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from deltaic.tokenizer import Tokenizer
from events import both_ways, chat_both_ways, read_events
from harness import Maker, Scripted, until

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
HUGE = 5279552648203111001
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "one": {"oneOf": [{"type": "array"}, {"type": "string"}]},
                    "object": {"type": "object"},
                },
            },
        },
    }
]


def refused(server: Scripted, path: str, body: dict[str, Any], words: str) -> None:
    """Check that a body is 400 with a stream and without, and leaves the engine as it was."""
    num_seen = len(server.engine.seen)
    for stream in (False, True):
        content = json.dumps({**body, "stream": stream})
        (answer,) = server.ask(("POST", path, {"content": content, "headers": {"content-type": "application/json"}}))
        assert answer.status_code == 400, answer.text[:300]
        assert words in answer.json()["error"]["message"], answer.text[:300]
    assert len(server.engine.seen) == num_seen
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("says", "stop", "text", "with_stop", "reason"),
    [
        (" The user is a", ["a", "is"], " The user ", " The user is", "is"),
        (" The user is a", ["is", "a"], " The user ", " The user is", "is"),
        ("abc", ["abc", "b"], "a", "ab", "b"),
        ("ab", ["ab", "b"], "", "ab", "ab"),
        ("ab", ["b", "ab"], "a", "ab", "b"),
        ("hello world.", ["."], "hello world", "hello world.", "."),
    ],
)
def test_d92_stop_string_that_is_complete_first(
    make: Maker, says: str, stop: list[str], text: str, with_stop: str, reason: str
) -> None:
    """D92: of several in one step the first to be complete wins, ties by the list's order."""
    server = make(says, engine={"step_size": 99})
    for include, expected in ((False, text), (True, with_stop)):
        body = {"prompt": "x", "stop": stop, "include_stop_str_in_output": include}
        (choice,) = both_ways(server, "/v1/completions", body)
        assert (choice["text"], choice["stop_reason"]) == (expected, reason)


@pytest.mark.parametrize("step_size", [1, 3])
def test_d93_no_part_of_a_stop_string_is_streamed(make: Maker, step_size: int) -> None:
    """D93: what may begin the stop string waits; the deltas are the final text."""
    server = make("one ##E two ###END three", engine={"step_size": step_size})
    body = {"prompt": "x", "stop": "###END", "max_tokens": 99}
    (choice,) = both_ways(server, "/v1/completions", body)
    assert choice["text"] == "one ##E two "
    events = read_events(server.post("/v1/completions", {**body, "stream": True}).text)
    shown = ""
    for event in events:
        shown += event["choices"][0]["text"]
        assert "one ##E two ".startswith(shown)


@pytest.mark.parametrize("stop", [[""], "", ["a", ""]])
def test_d94_empty_stop_string(make: Maker, stop: Any) -> None:
    """D94: it would match everywhere."""
    server = make()
    refused(server, "/v1/completions", {"prompt": "x", "stop": stop}, "must not be empty")
    refused(server, "/v1/chat/completions", {"messages": HI, "stop": stop}, "must not be empty")


@pytest.mark.parametrize("step_size", [1, 4])
def test_d95_stop_string_in_the_reasoning(make: Maker, thinking_model: Path, step_size: int) -> None:
    """D95: it holds there too, the same both ways, and the content stays empty."""
    server = make("Hm, END of it.</think>Yes.", model=thinking_model, engine={"step_size": step_size})
    told = chat_both_ways(server, {"messages": HI, "stop": "END"})
    assert told == {"reasoning": "Hm,", "content": "", "calls": [], "finish_reason": "stop"}


@pytest.mark.parametrize("step_size", [1, 2, 50])
def test_d96_characters_over_several_tokens(make: Maker, tokenizer: Tokenizer, step_size: int) -> None:
    """D96: split characters and bytes that are none, in 10,000 random tokens; joined deltas are the whole text."""
    rng = random.Random(9)
    ids = tokenizer.encode("ď 🌶 👩‍👩‍👧‍👦 ") + [
        rng.randrange(256) if rng.random() < 0.5 else rng.randrange(4093) for _ in range(10_000)
    ]
    server = make(ids, engine={"step_size": step_size, "max_model_len": 20_000})
    (choice,) = both_ways(server, "/v1/completions", {"prompt": "x", "max_tokens": len(ids)})
    assert choice["text"] == tokenizer.decode(ids)


def call(*parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("says", "arguments"),
    [
        (call(("text", "a"), ("count", "5")), '{"text": "a", "count": 5}'),
        (call(("text", "\n keeps its \n lines\n")), '{"text": "\\n keeps its \\n lines\\n"}'),
        (call(("text", "5")), '{"text": "5"}'),
        (call(("text", 'q"<b>\\ ď')), '{"text": "q\\"<b>\\\\ ď"}'),
        (call(("any", "7")), '{"any": 7}'),
        (call(("any", "null")), '{"any": null}'),
        (call(("one", "[1, 2]")), '{"one": [1, 2]}'),
        (call(("one", "none")), '{"one": "none"}'),
        (call(("object", '{"a": {"b": []}}')), '{"object": {"a": {"b": []}}}'),
        (call(("flag", "True"), ("share", "0.25")), '{"flag": true, "share": 0.25}'),
        (call(("count", "many")), '{"count": "many"}'),
        (call(), "{}"),
        ("<tool_call>\n<function=f>\n<parameter=text\nx\n</parameter>\n</function>\n</tool_call>", None),
        ("<tool_call>\nf(text)\n</tool_call>", None),
        ("<tool_call>\n<function=f\n</function>\n</tool_call>", None),
    ],
)
@pytest.mark.parametrize("step_size", [1, 6])
def test_d97_calls_in_tags(
    make: Maker, tool_model: Callable[[str], Path], says: str, arguments: str | None, step_size: int
) -> None:
    """D97: exact arguments for each output of a model; what is malformed is content."""
    server = make(f"{says}<|im_end|>", model=tool_model("tags"), engine={"step_size": step_size})
    told = chat_both_ways(server, {"messages": HI, "tools": TOOLS, "max_tokens": 500})
    if arguments is None:
        assert (told["content"], told["calls"], told["finish_reason"]) == (says, [], "stop")
    else:
        assert (told["content"], told["calls"]) == ("", [{"name": "f", "arguments": arguments}])
        assert told["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("step_size", [1, 5])
def test_d98_end_of_the_reasoning(make: Maker, tool_model: Callable[[str], Path], step_size: int) -> None:
    """D98: a call ends it; tags in the prompt do not begin or end it; without thinking all is content."""
    model, engine = tool_model("tags"), {"step_size": step_size}
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 500}
    ends = make(f"<think>\nHm.\n{call(('text', 'a'))}<|im_end|>", model=model, engine=engine)
    told = chat_both_ways(ends, {"messages": HI, **fields})
    assert (told["reasoning"], told["content"], len(told["calls"])) == ("Hm.", "", 1)

    example = [{"role": "system", "content": f"Say <think> or {call(('text', 'x'))} or </think>."}, *HI]
    plain = make("Fine.<|im_end|>", model=model, engine=engine)
    told = chat_both_ways(plain, {"messages": example, **fields})
    assert (told["reasoning"], told["content"], told["calls"]) == ("", "Fine.", [])


@pytest.mark.parametrize("step_size", [1, 5])
def test_d98_thinking_that_is_off(make: Maker, thinking_model: Path, step_size: int) -> None:
    """D98: with enable_thinking false the template closes the reasoning, and all that comes is content."""
    server = make("Fine.<|im_end|>", model=thinking_model, engine={"step_size": step_size})
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert chat_both_ways(server, {"messages": HI, **off})["content"] == "Fine."
    assert chat_both_ways(server, {"messages": HI})["reasoning"] == "Fine."


def test_d99_answer_that_is_cut_in_an_opener(make: Maker, tool_model: Callable[[str], Path]) -> None:
    """D99: whatever max_tokens leaves of <tool_call> is content, the same both ways."""
    server = make("Well <tool_call>", model=tool_model("tags"))
    contents = set()
    for max_tokens in range(1, 12):
        told = chat_both_ways(server, {"messages": HI, "tools": TOOLS, "max_tokens": max_tokens})
        assert told["calls"] == []
        assert "Well <tool_call>".startswith(told["content"])
        contents.add(told["content"])
    assert len(contents) > 3
    assert "Well <tool_call>" in contents


@pytest.mark.parametrize("form", ["json", "tags"])
@pytest.mark.parametrize("step_size", [1, 2, 7])
def test_d100_pieces_of_arguments(make: Maker, tool_model: Callable[[str], Path], form: str, step_size: int) -> None:
    """D100: deltas of 1, 2 and 7 tokens; joined they are JSON."""
    arguments = {"text": 'a "long" {text}\n' * 5, "count": 5}
    says = call(("text", arguments["text"]), ("count", "5"))
    if form == "json":
        says = f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments})}\n</tool_call>"
    server = make(f"{says}<|im_end|>", model=tool_model(form), engine={"step_size": step_size})
    body = {"messages": HI, "tools": TOOLS, "max_tokens": 500}
    (found,) = chat_both_ways(server, body)["calls"]
    assert json.loads(found["arguments"]) == arguments
    events = read_events(server.post("/v1/chat/completions", {**body, "stream": True}).text)
    assert sum("tool_calls" in event["choices"][0]["delta"] for event in events) > 5


def test_d101_history_with_bad_arguments(make: Maker, tool_model: Callable[[str], Path]) -> None:
    """D101: 400, never 500."""
    server = make(model=tool_model("json"))
    for arguments in ("{bad", "[1]", "5", "NaN", '{"a": '):
        calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        messages = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]
        body = {"messages": messages, "tools": TOOLS}
        refused(server, "/v1/chat/completions", body, "messages[1].tool_calls[0].function.arguments")


def test_d102_forms_of_content(make: Maker, thinking_model: Path) -> None:
    """D102: a string and text parts are the same prompt; the template's refusals are 400 in its words."""
    server = make(model=thinking_model)
    for content in ("What is this?", [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]):
        chat_both_ways(server, {"messages": [{"role": "user", "content": content}]})
    prompts = [request.prompt_token_ids for request in server.engine.seen.values()]
    assert len(prompts) == 4
    assert all(prompt == prompts[0] for prompt in prompts)
    late = [*HI, {"role": "system", "content": "Be brief."}]
    refused(server, "/v1/chat/completions", {"messages": late}, "System message must be at the beginning.")
    alone = [{"role": "assistant", "content": "Hi"}]
    refused(server, "/v1/chat/completions", {"messages": alone}, "No user query found in messages.")


def test_d103_stop_ids_of_the_model_and_of_the_request(make: Maker, tokenizer: Tokenizer) -> None:
    """D103: neither set replaces the other."""
    stop = 300
    for ids, own, reason in (([7, 4093, 8], [stop], None), ([7, 4095, 8], [stop], None), ([7, stop, 8], [stop], stop)):
        server = make(ids)
        (choice,) = both_ways(server, "/v1/completions", {"prompt": "x", "stop_token_ids": own})
        assert (choice["finish_reason"], choice.get("stop_reason")) == ("stop", reason)
        assert choice["text"] == tokenizer.decode([7])


@pytest.mark.parametrize("stream", [False, True])
def test_d104_prompts_around_the_context(bundled_server: str, stream: bool) -> None:
    """D104: as long as the context, longer: 400 with both lengths; one shorter: one token; echo of nothing new."""
    for length in (4096, 4097, 40_960):
        body = {"prompt": [7] * length, "max_tokens": 5, "stream": stream}
        answer = httpx.post(f"{bundled_server}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert f"{length} tokens, and max_model_len = 4096" in answer.json()["error"]["message"]
    for body, num_tokens in (
        ({"prompt": [7] * 4095, "max_tokens": 5, "ignore_eos": True}, 1),
        ({"prompt": "Once upon", "max_tokens": 0, "echo": True}, 0),
    ):
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = httpx.post(f"{bundled_server}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        events = read_events(answer.text) if stream else [answer.json()]
        assert events[-1]["usage"]["completion_tokens"] == num_tokens
        if body.get("echo"):
            text = "".join(choice["text"] for event in events for choice in event["choices"])
            assert text == "Once upon"


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": value} for value in (float("nan"), float("inf"), -0.1, 2.1)),
        *({"top_p": value} for value in (0, 1.1)),
        {"repetition_penalty": 0},
        {"logit_bias": {"x": 1}},
        {"prompt": ["x"] * 1_000_000},
    ],
    ids=lambda fields: f"{fields!s:.30}",
)
def test_d105_values_out_of_range(make: Maker, fields: dict[str, Any]) -> None:
    """D105: 400 each, and the engine goes on."""
    server = make()
    refused(server, "/v1/completions", {"prompt": "x", **fields}, next(iter(fields)))
    if "prompt" not in fields:
        refused(server, "/v1/chat/completions", {"messages": HI, **fields}, next(iter(fields)))
    assert server.post("/v1/completions", {"prompt": "x"}).json()["choices"][0]["text"] == "fine"
    until(lambda: server.llm.num_unfinished == 0)


@pytest.mark.parametrize("token_id", [4096, -1, HUGE])
def test_d106_ids_outside_the_vocabulary(make: Maker, token_id: int) -> None:
    """D106: in prompts, biases and stops."""
    server = make()
    refused(server, "/v1/completions", {"prompt": [token_id]}, "prompt_token_ids[0] must be in [0, vocab_size = 4096)")
    refused(server, "/v1/completions", {"prompt": "x", "logit_bias": {str(token_id): 1}}, "logit_bias key")
    refused(server, "/v1/chat/completions", {"messages": HI, "stop_token_ids": [token_id]}, "stop_token_ids[0]")


def test_d106_last_id_of_the_vocabulary(make: Maker) -> None:
    """D106: it is taken, whether or not it stands for a text."""
    server = make()
    both_ways(server, "/v1/completions", {"prompt": [4095], "logit_bias": {"4095": 1}})
