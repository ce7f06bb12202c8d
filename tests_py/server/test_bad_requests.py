"""Bodies that are wrong: each is 400 in OpenAI's form, nothing of it runs, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deltaic.server.protocol import ChatCompletionBody, CompletionBody
from deltaic.server.responses_protocol import ResponsesBody
from harness import Maker, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
HUGE = 5279552648203111001

# What both endpoints refuse: the fields, and words of the message.
COMMON: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be"),  # D105
    ({"temperature": 2.1}, "temperature must be"),
    ({"temperature": float("nan")}, "temperature must be a finite number"),
    ({"temperature": float("inf")}, "temperature must be a finite number"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": "1"}, "temperature: Input should be a valid number"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p must be"),
    ({"top_p": 1.1}, "top_p must be"),
    ({"top_k": -2}, "top_k must be"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p must be"),
    ({"repetition_penalty": 0}, "repetition_penalty must be"),
    ({"repetition_penalty": float("-inf")}, "repetition_penalty must be"),
    ({"presence_penalty": 2.5}, "presence_penalty must be"),
    ({"frequency_penalty": -3}, "frequency_penalty must be"),
    ({"n": 0}, "n must be"),
    ({"n": -1}, "n must be"),
    ({"n": 10**9}, "n must be"),
    ({"n": 5000}, "n times the number of prompts must be at most 1032, got 5000"),
    ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
    ({"n": "2"}, "n: "),
    ({"max_tokens": -1}, "max_tokens must be"),
    ({"max_tokens": 0}, "max_tokens must be"),
    ({"max_tokens": 1e3}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens must be"),
    ({"max_tokens": 2**31}, "max_tokens must be an integer in [1, 2147483647], got 2147483648"),
    ({"max_tokens": 10**21}, "max_tokens must be an integer in [1, 2147483647], got 1000000000000000000000"),
    ({"max_tokens": -(10**400)}, "max_tokens must be an integer in [1, 2147483647], got "),
    ({"min_tokens": 2**31}, "min_tokens must be an integer in [0, 2147483647], got 2147483648"),
    ({"top_k": 2**31}, "top_k must be an integer in [-1, 2147483647], got 2147483648"),
    ({"top_k": 10**400}, "top_k must be an integer in [-1, 2147483647], got one of 1329 bits"),
    ({"n": 10**400}, "n must be"),
    ({"priority": 2**31}, "priority: Input should be less than or equal to 2147483647"),
    ({"priority": -(10**400)}, "priority: Input should be greater than or equal to -2147483647"),
    ({"stop_token_ids": [10**400]}, "stop_token_ids[0] must be"),
    ({"seed": 2**63}, "seed must be"),
    ({"seed": -(10**400)}, "seed must be"),
    ({"seed": "x"}, "seed"),
    ({"stop": [""]}, "stop[0] must not be empty"),  # D94
    ({"stop": ""}, "stop[0] must not be empty"),
    ({"stop": "ab\ud800"}, "stop is no text: it has a lone surrogate at character 2"),
    ({"stop": ["a", "\udfff"]}, "stop[1] is no text: it has a lone surrogate at character 0"),
    ({"bad_words": ["a", "\ud83d "]}, "bad_words[1] is no text: it has a lone surrogate at character 0"),
    ({"user": "\udc00"}, "user is no text"),
    ({"metadata": {"a": [{"b": "ď\ud83d"}]}}, "metadata.a[0].b is no text: it has a lone surrogate at character 1"),
    ({"metadata": {"\ud83d": 1}}, "metadata.\\ud83d is no text"),
    ({"logit_bias": {"\ud83d": 1}}, "logit_bias.\\ud83d is no text"),
    ({"model": "toy\ud83d"}, "model is no text"),
    ({"\ud83d" * 1000: 1}, "is no text: it has a lone surrogate at character 0"),
    ({"stop": 5}, "stop: "),
    ({"stop": ["a", 5]}, "stop[1]: "),
    ({"stop": ["a"] * 65}, "stop: "),
    ({"stop_token_ids": [4096]}, "stop_token_ids[0] must be"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] must be"),
    ({"logit_bias": {"x": 1}}, "logit_bias key must be a token id, got 'x'"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias key"),
    ({"logit_bias": {"4096": 1}}, "logit_bias key must be in [0, vocab_size = 4096), got 4096"),  # D106
    ({"logit_bias": {"-1": 1}}, "logit_bias key"),
    ({"logit_bias": {str(HUGE): 1}}, "logit_bias key"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias key"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias[5] must be a finite number"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids must hold at least 1"),
    ({"allowed_token_ids": [HUGE]}, "allowed_token_ids[0]"),
    ({"bad_words": [" "]}, "bad_words[0] must hold more than spaces"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"model": 5}, "model: "),
    ({"priority": "high"}, "priority"),
    ({"best_of": 2}, "best_of is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs is not supported"),
    ({"guided_json": {}}, "guided_json is not supported"),
    ({"prompt_embeds": "x"}, "prompt_embeds is not supported"),
    ({"thinking_token_budget": 5}, "thinking_token_budget is not supported"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt: "),
    ({"prompt": ""}, "the prompt must hold at least 1 token"),
    ({"prompt": []}, "prompt must hold at least 1 prompt"),
    ({"prompt": [[]]}, "at least 1 token"),
    ({"prompt": ["good", ""]}, "prompt[1]: the prompt must hold"),
    ({"prompt": 5}, "prompt: "),
    ({"prompt": {"text": "x"}}, "prompt: "),
    ({"prompt": ["a", 5]}, "prompt[1]: "),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [5.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [4096]}, "prompt_token_ids[0] must be in [0, vocab_size = 4096), got 4096"),  # D106
    ({"prompt": [-1]}, "got -1"),
    ({"prompt": [[1], [HUGE]]}, f"got {HUGE}"),
    ({"prompt": ["a"] * 1_000_000}, "prompt: List should have at most 2048 items"),  # D105
    ({"prompt": [[1]] * 1_000_000}, "prompt: List should have at most 2048 items"),
    ({"prompt": "a" * 1_000_000}, "the prompt has at least 23810 tokens, and max_model_len = 4096"),  # D104
    ({"prompt": [7] * 4096}, "the prompt has 4096 tokens, and max_model_len = 4096"),
    ({"prompt": "a\ud800"}, "lone surrogate at character 1"),
    ({"logprobs": 10**400}, "logprobs must be an integer in [-1, 2147483647], got one of 1329 bits"),
    ({"logprobs": 21}, "logprobs must be at most max_logprobs = 20, got 21"),
    ({"logprobs": -2}, "logprobs must be"),
    ({"logprobs": True}, "logprobs: "),
    ({"suffix": "end"}, "suffix is not supported"),
    ({"echo": "yes"}, "echo: "),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages: "),
    ({"messages": []}, "messages must hold at least 1 message"),
    ({"messages": "Hi"}, "messages: "),
    ({"messages": ["Hi"]}, "messages[0]: "),
    ({"messages": [{}]}, "messages[0].role must be one of"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "got 'robot'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "reads text only"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text must be"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content is no text: it has a lone surrogate"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "content[0].text is no text"),
    ({"messages": [{**HI[0], "name": "\ud800"}]}, "messages[0].name is no text"),
    (
        {"tools": [{"type": "function", "function": {"name": "\ud800"}}], "tool_choice": "none"},
        "function.name is no text",
    ),
    ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs.a is no text"),
    ({"max_completion_tokens": 10**21}, "max_completion_tokens must be an integer in [1, 2147483647], got 1000000"),
    ({"max_completion_tokens": 5, "max_tokens": 10**21}, "max_tokens must be an integer in [1, 2147483647]"),
    ({"logprobs": True, "top_logprobs": 10**400}, "top_logprobs must be at most max_logprobs = 20, got 1000000"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "max_model_len = 4096"),
    (
        {"messages": [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}]},
        "arguments is not JSON",  # D101
    ),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": 5}]}, ""),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: the model's chat template writes none"),
    ({"tools": "f"}, "tools: "),
    ({"tool_choice": "required"}, "tool_choice: a call is asked for, and tools is empty"),
    ({"functions": [{"name": "f"}]}, "functions is not supported"),
    ({"audio": {"voice": "x"}}, "audio is not supported"),
    ({"modalities": ["audio"]}, "modalities is not supported"),
    ({"chat_template": "{{ x }}"}, "chat_template is not supported"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs: "),
    ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be at most max_logprobs = 20, got 21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be at least 0"),
    ({"logprobs": 1}, "logprobs: "),
    ({"max_completion_tokens": 0}, "max_completion_tokens must be"),
    ({"echo": True}, "echo is not supported for chat"),
]
CASES = [
    *(("/v1/completions", {"prompt": "x", **fields}, words) for fields, words in (*COMMON, *COMPLETIONS)),
    *(("/v1/chat/completions", {"messages": HI, **fields}, words) for fields, words in (*COMMON, *CHAT)),
    *(("/v1/completions", {"prompt": "x", "stream": True, **fields}, words) for fields, words in COMMON[:3]),
    ("/tokenize", {}, "prompt or messages must be given"),
    ("/tokenize", {"prompt": "x", "messages": HI}, "prompt or messages must be given, and not both"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/tokenize", {"prompt": "\ud800"}, "lone surrogate"),
    ("/detokenize", {}, "tokens: Field required"),
    ("/detokenize", {"tokens": [4096]}, "tokens[0] must be in [0, vocab_size = 4096), got 4096"),
    ("/detokenize", {"tokens": [HUGE]}, "tokens[0]"),
    ("/detokenize", {"tokens": ["x"]}, "tokens[0]: "),
]
RAW = [
    b"",
    b"{",
    b"null",
    b"5",
    b'"text"',
    b"[]",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud83d"}',
    b'{"prompt": "x", "stop": "\xed\xa0\x80"}',
    b'{"prompt": "\\uZZZZ"}',
    b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
]


def test_wrong_bodies(make: Maker) -> None:
    assert len(CASES) > 150
    server = make()
    json_type = {"content-type": "application/json"}
    answers = server.ask(
        *(("POST", path, {"content": json.dumps(body), "headers": json_type}) for path, body, _ in CASES)
    )
    for (path, body, words), answer in zip(CASES, answers, strict=True):
        told = answer.text[:300]
        shown = f"{path} {body!r:.200}: {told}"
        assert answer.status_code == 400, shown
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, shown
        assert error["type"] == "invalid_request_error", shown
        assert words in error["message"], shown
        assert "\n" not in error["message"], shown
        assert len(error["message"]) <= 500, shown
    assert server.engine.seen == {}
    assert server.llm.num_unfinished == 0
    assert server.post("/v1/completions", {"prompt": "x"}).json()["choices"][0]["text"] == "fine"


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/audio/speech", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_no_json(make: Maker, path: str) -> None:
    server = make()
    requests: list[Any] = [
        ("POST", path, {"content": raw, "headers": {"content-type": "application/json"}}) for raw in RAW
    ]
    requests.append(("POST", path, {"content": b'{"prompt": "x"}', "headers": {"content-type": "text/plain"}}))
    for raw, answer in zip([*RAW, b"as text"], server.ask(*requests), strict=True):
        assert answer.status_code == 400, (raw[:50], answer.text[:300])
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert server.engine.seen == {}
    assert server.get("/health").status_code == 200


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([HUGE, -HUGE, 1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted(
    {*ChatCompletionBody.model_fields, *CompletionBody.model_fields, *ResponsesBody.model_fields, "role", "suffix"}
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
        optional={"content": JSON, "tool_calls": JSON, "name": JSON},
    ),
    max_size=3,
)


def test_any_json_gets_an_answer_or_400(make: Maker) -> None:
    server = make()

    @given(
        st.sampled_from(PATHS),
        st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
        st.sampled_from([{"prompt": "x"}, {"tokens": [1]}, {"input": "x"}, {"input": HI}, {}]),
        MESSAGES | st.just(HI),
    )
    @settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
    def ask(path: str, fields: dict[str, Any], prompt: dict[str, Any], messages: Any) -> None:
        content = json.dumps({"messages": messages, **prompt, **fields})
        headers = {"content-type": "application/json"}
        (answer,) = server.ask(("POST", path, {"content": content, "headers": headers}))
        assert answer.status_code in (200, 400, 404), answer.text

    ask()
    until(lambda: server.llm.num_unfinished == 0)
    assert server.get("/health").status_code == 200


def test_what_only_the_engine_refuses(make: Maker) -> None:
    server = make()

    def add_request(*_: Any, **__: Any) -> None:
        raise ValueError("request 'x' can never fit: 5 prompt tokens need 3 blocks, the cache has 2")

    server.engine.add_request = add_request  # type: ignore[method-assign]
    for stream in (False, True):
        answer = server.post("/v1/completions", {"prompt": "x", "stream": stream})
        assert answer.status_code == 400
        assert "can never fit" in answer.json()["error"]["message"]


def test_field_at_fault_is_named(make: Maker) -> None:
    server = make()
    for fields, param in (
        ({"temperature": 3}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"n": "2"}, "n"),
        ({"best_of": 2}, "best_of"),
    ):
        assert server.post("/v1/completions", {"prompt": "x", **fields}).json()["error"]["param"] == param


def test_what_asks_for_nothing_is_taken(make: Maker) -> None:
    server = make()
    harmless = {
        **dict.fromkeys(("suffix", "stop", "logit_bias", "seed", "n", "temperature", "stream_options", "best_of")),
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "some_new_field": [1],
        "response_format": {"type": "text"},
        "tools": [],
        "parallel_tool_calls": False,
        "service_tier": "auto",
    }
    assert server.post("/v1/completions", {"prompt": "x", "model": "toy", **harmless}).status_code == 200
    assert server.post("/v1/chat/completions", {"messages": HI, "tool_choice": "none", **harmless}).status_code == 200


def test_templates_own_refusals(make: Maker, thinking_model: Any) -> None:
    """D102: what the template raises is told in its words."""
    server = make(model=thinking_model)
    for messages, words in (
        ([*HI, {"role": "system", "content": "Be brief."}], "System message must be at the beginning."),
        ([{"role": "assistant", "content": "Hi"}], "No user query found in messages."),
    ):
        answer = server.post("/v1/chat/completions", {"messages": messages})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_unknown_models_paths_and_methods(make: Maker) -> None:
    server = make()
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/audio/speech", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = server.post(path, {"model": "other\ud800" if path == "never" else "other", **body})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "'other' does not exist; this server has toy" in answer.json()["error"]["message"]
    for answer, status in ((server.get("/v1/nothing"), 404), (server.get("/v1/completions"), 405)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
