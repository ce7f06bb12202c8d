"""What a server does beside refusing, on an engine that says what it is told."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from deltaic.sampling_params import SamplingParams
from deltaic.server import ServerSettings
from deltaic.tokenizer import Tokenizer
from events import both_ways, read_events
from fastapi import FastAPI
from harness import Maker, until

HI = [{"role": "user", "content": "Hi"}]


def forever(*_: object) -> list[int]:
    return [7] * 100_000


@pytest.mark.parametrize("step_size", [1, 2, 7])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["dog", "###"]},
        {"stop": "never"},
        {"stop": "og 🌶", "include_stop_str_in_output": True},
        {"max_tokens": 4},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True},
        {"echo": True, "n": 2, "logprobs": 1},
        {"n": 3},
        {"prompt": ["a", "b b"], "n": 2},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
    ],
    ids=str,
)
def test_completion_streams_what_it_answers(make: Maker, fields: dict[str, Any], step_size: int) -> None:
    server = make(", there was a ďog 🌶👩‍👧.<|im_end|>", engine={"step_size": step_size})
    body = {"prompt": "Once", "max_tokens": 100, **fields}
    choices = both_ways(server, "/v1/completions", body)
    if not fields:
        assert choices[0]["text"] == ", there was a ďog 🌶👩‍👧."
        assert choices[0]["finish_reason"] == "stop"


@pytest.mark.parametrize("step_size", [1, 5])
def test_any_tokens_are_text(make: Maker, tokenizer: Tokenizer, step_size: int) -> None:
    """D96: characters that never become whole too."""
    rng = random.Random(3)
    ids = [rng.randrange(4093) if rng.random() < 0.5 else rng.randrange(256) for _ in range(600)]
    server = make(ids, engine={"step_size": step_size})
    body = {"prompt": "x", "max_tokens": 600, "logprobs": 1}
    (choice,) = both_ways(server, "/v1/completions", body)
    assert choice["text"] == tokenizer.decode(ids)
    assert len(choice["logprobs"]["tokens"]) == 600
    assert any(token.startswith("bytes:") for token in choice["logprobs"]["tokens"])


@pytest.mark.parametrize("step_size", [1, 3])
@pytest.mark.parametrize(
    ("says", "kwargs", "reasoning", "content"),
    [
        ("Hm.\nWell.\n</think>\n\nYes.<|im_end|>", None, "Hm.\nWell.", "Yes."),
        ("Hm, it is cut", None, "Hm, it is cut", ""),
        ("Yes.<|im_end|>", {"enable_thinking": False}, None, "Yes."),
        ("<think>Hm.</think>Yes.", {"enable_thinking": False}, "Hm.", "Yes."),
        ("Hm </thi", {"enable_thinking": True}, "Hm </thi", ""),
    ],
)
def test_reasoning_is_split(
    make: Maker,
    thinking_model: Path,
    says: str,
    kwargs: dict[str, Any] | None,
    reasoning: str | None,
    content: str,
    step_size: int,
) -> None:
    """D98: the same fields with a stream and without, also when the template opens or closes the reasoning."""
    server = make(says, model=thinking_model, engine={"step_size": step_size})
    (choice,) = both_ways(server, "/v1/chat/completions", {"messages": HI, "chat_template_kwargs": kwargs})
    assert choice.get("reasoning_content") == reasoning
    assert choice["content"] == content


def test_chat_logprobs_and_completions_agree(make: Maker) -> None:
    server = make("A ďog 🌶.<|im_end|>")
    choices = both_ways(server, "/v1/chat/completions", {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2})
    content = choices[1]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == "A ďog 🌶.<|im_end|>"
    assert {len(token["top_logprobs"]) for token in content} == {2}


def test_message_that_is_continued(make: Maker, tokenizer: Tokenizer) -> None:
    server = make("and so on")
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    assert (
        server.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True}).status_code == 200
    )
    (request,) = server.engine.seen.values()
    assert tokenizer.decode(request.prompt_token_ids).endswith("<|im_start|>assistant\nWell,")


def test_parameters_reach_the_engine(make: Maker) -> None:
    server = make()
    body = {"prompt": "x", "top_k": 7, "min_p": 0.1, "logit_bias": {"5": 3}, "stop_token_ids": [9], "priority": 2}
    server.post("/v1/completions", body)
    server.post("/v1/chat/completions", {"messages": HI})
    first, second = server.engine.seen.values()
    assert (first.params.top_k, first.params.min_p, first.params.logit_bias) == (7, 0.1, {5: 3.0})
    assert (first.params.temperature, first.params.top_p, first.params.max_tokens) == (0.7, 0.9, 16)  # the model's
    assert first.params.stop_token_ids == [9]
    assert first.options["priority"] == 2
    assert first.options["eos_token_ids"] == [4093, 4095]
    assert second.params.max_tokens == 4096


def test_tokenize_and_back(make: Maker, tokenizer: Tokenizer) -> None:
    server = make()
    text = "Once upon a ďog 🌶<|im_end|>"
    told = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert told["tokens"] == tokenizer.encode(text)
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 4096)
    assert "<|im_end|>" in told["token_strs"]
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert tokenizer.decode(chat) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_api_keys(make: Maker) -> None:
    server = make(settings=ServerSettings(api_keys=["secret", "other"]))
    body = {"json": {"prompt": "x"}}
    for header, status in (
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer secre\xe9", 401),
        ("Bearer secret", 200),
        ("bearer other", 200),
    ):
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        (answer,) = server.ask(("POST", "/v1/completions", {**body, "headers": headers}))
        assert answer.status_code == status, header
        if status == 401:
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert server.get("/v1/models").status_code == 401
    assert server.get("/openapi.json").status_code == 401
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert server.get(path).status_code == 200


def test_probes_that_ask_by_head(make: Maker) -> None:
    server = make(settings=ServerSettings(api_keys=["secret"]))
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert server.ask(("HEAD", path, {}))[0].status_code == 200, path
    assert server.ask(("HEAD", "/v1/models", {}))[0].status_code == 401


@pytest.mark.parametrize(
    "fields",
    [{"max_body_bytes": 0}, {"max_body_bytes": "large"}, {"max_concurrent_requests": None}, {"api_keys": "secret"}],
)
def test_setting_of_no_meaning_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must be"):
        ServerSettings(**fields)


def test_mounted_server_has_the_same_open_paths(make: Maker) -> None:
    server = make(forever, settings=ServerSettings(api_keys=["secret"], max_concurrent_requests=1))
    outer = FastAPI()
    outer.mount("/llm", server.app)
    server.app = outer
    for path in ("/", "/health", "/ping", "/version", "/metrics"):
        assert server.get(f"/llm{path}").status_code == 200, path
    for path in ("/v1/models", "/openapi.json", "/v1/models/health"):
        assert server.get(f"/llm{path}").status_code == 401, path
    key = {"authorization": "Bearer secret"}
    assert server.get("/llm/v1/models", headers=key).json()["data"][0]["id"] == "default_model"


def test_large_bodies(make: Maker) -> None:
    server = make(settings=ServerSettings(max_body_bytes=1000))

    async def pieces() -> Any:
        for _ in range(50):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    answers = server.ask(
        ("POST", "/v1/completions", {"json": {"prompt": "x" * 2000}}),
        ("POST", "/v1/completions", {"content": pieces(), "headers": headers}),
        ("POST", "/v1/completions", {"json": {"prompt": "x" * 800}}),
    )
    assert [answer.status_code for answer in answers] == [413, 413, 200]
    for answer in answers[:2]:
        assert "larger than 1000 bytes" in answer.json()["error"]["message"]


def test_full_queue_says_when_to_come_back(make: Maker) -> None:
    server = make(forever, engine={"max_num_seqs": 1, "on_step": lambda: time.sleep(0.01)}, max_waiting=0)

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app), base_url="http://test") as client:
            body = {"prompt": "x", "max_tokens": 4000}
            first = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while not server.engine.running:
                await asyncio.sleep(0.002)
            refused = await client.post("/v1/completions", json={**body, "stream": True})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert (
                await client.post("/v1/completions", json={"prompt": ""})
            ).status_code == 429  # no work is spent on it
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    asyncio.run(run())


def test_too_many_requests_at_once(make: Maker) -> None:
    settings = ServerSettings(max_concurrent_requests=2)
    server = make(forever, settings=settings, engine={"on_step": lambda: time.sleep(0.01)})

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app), base_url="http://test") as client:
            body = {"prompt": "x", "max_tokens": 4000}
            running = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(2)]
            while len(server.engine.running) < 2:
                await asyncio.sleep(0.002)
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "too_many_requests"
            assert (await client.get("/health")).status_code == 200
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            while server.engine.running:
                await asyncio.sleep(0.002)
            assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200

    asyncio.run(run())


def test_failed_request_says_so_and_others_go_on(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make()
    good = server.engine._advance
    failing: set[str] = set()

    def advance(req_id: str, request: Any) -> Any:
        server.engine.failing = dict.fromkeys(failing, "OutOfMemory: no memory")
        return good(req_id, request)

    add = server.engine.add_request

    def add_request(req_id: str, prompt: Any, params: Any, **options: Any) -> None:
        add(req_id, prompt, params, **options)
        if params.seed == 13:
            failing.add(req_id)

    server.engine._advance = advance  # type: ignore[method-assign]
    server.engine.add_request = add_request  # type: ignore[method-assign]
    whole, streamed, other = server.ask(
        ("POST", "/v1/completions", {"json": {"prompt": "x", "seed": 13}}),
        ("POST", "/v1/completions", {"json": {"prompt": "x", "seed": 13, "stream": True}}),
        ("POST", "/v1/completions", {"json": {"prompt": "x"}}),
    )
    assert whole.status_code == 500
    assert "OutOfMemory: no memory" in whole.json()["error"]["message"]
    assert read_events(streamed.text)[-1]["error"]["type"] == "internal_error"
    assert other.json()["choices"][0]["text"] == "fine"
    assert 'finished_reason="error",model_name="toy"} 2.0' in server.get("/metrics").text


def test_health_of_a_stuck_and_of_a_dead_loop(make: Maker) -> None:
    release = threading.Event()
    server = make(engine={"on_step": lambda: release.wait(10) and None}, stall_timeout_s=0.05)

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app), base_url="http://test") as client:
            assert (await client.get("/health")).status_code == 200
            waiting = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
            await asyncio.sleep(0.2)
            for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
                stuck = await client.request(method, path)
                assert stuck.status_code == 503
                assert "stuck" in stuck.json()["error"]["message"]
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            release.set()
            assert (await waiting).json()["choices"][0]["text"] == "fine"

    asyncio.run(run())
    until(lambda: server.get("/health").status_code == 200)

    def die() -> None:
        raise IndexError("a defect")

    server.engine.on_step = die
    died = server.post("/v1/completions", {"prompt": "x"})
    assert died.status_code == 503
    assert "the engine died" in died.json()["error"]["message"]
    assert server.get("/health").status_code == 503
    assert server.ask(("HEAD", "/health", {}))[0].status_code == 503


def test_shutdown_ends_streams_with_an_event(make: Maker) -> None:
    server = make(forever, engine={"on_step": lambda: time.sleep(0.01)})

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app), base_url="http://test") as client:
            body = {"prompt": "x", "max_tokens": 4000}
            whole = asyncio.ensure_future(client.post("/v1/completions", json=body))
            streamed = asyncio.ensure_future(client.post("/v1/completions", json={**body, "stream": True}))
            while len(server.engine.running) < 2:
                await asyncio.sleep(0.002)
            await asyncio.to_thread(server.llm.shutdown)
            return await whole, await streamed

    whole, streamed = asyncio.run(run())
    assert whole.status_code == 503
    last = read_events(streamed.text)[-1]
    assert last["error"] == {
        "message": "the engine was shut down",
        "type": "service_unavailable_error",
        "param": None,
        "code": None,
    }
    assert server.engine.running == {}


def test_metrics(make: Maker) -> None:
    server = make("Once upon a time")
    server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})
    server.post("/v1/completions", {"prompt": "a", "stream": True})
    text = server.get("/metrics").text
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    for line in (
        'deltaic:num_requests_running{engine="0",model_name="toy"} 0.0',
        'deltaic:num_requests_waiting{engine="0",model_name="toy"} 0.0',
        'deltaic:kv_cache_usage_perc{engine="0",model_name="toy"} 0.0',
        'deltaic:request_success_total{engine="0",finished_reason="length",model_name="toy"} 5.0',
        'deltaic:time_to_first_token_seconds_count{engine="0",model_name="toy"} 3.0',
        'deltaic:inter_token_latency_seconds_count{engine="0",model_name="toy"} 3.0',
        'deltaic:time_per_output_token_seconds_count{engine="0",model_name="toy"} 3.0',
        'deltaic:e2e_request_latency_seconds_count{engine="0",model_name="toy"} 3.0',
        'deltaic:request_prompt_tokens_sum{engine="0",model_name="toy"} 3.0',
        'deltaic:prompt_tokens_cached_total{engine="0",model_name="toy"} 9.0',
        'deltaic:generation_tokens_total{engine="0",model_name="toy"} 20.0',
        'deltaic:prefix_cache_queries_total{engine="0",model_name="toy"} 0.0',
        'deltaic:num_preemptions_total{engine="0",model_name="toy"} 0.0',
        'deltaic:spec_decode_num_accepted_tokens_total{engine="0",model_name="toy"} 0.0',
        'deltaic:request_max_num_generation_tokens_sum{engine="0",model_name="toy"} 12.0',
        'deltaic:request_prefill_kv_computed_tokens_count{engine="0",model_name="toy"} 3.0',
        'deltaic:request_decode_time_seconds_count{engine="0",model_name="toy"} 3.0',
        'deltaic:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",mamba_block_size="64",model_name="toy",',
    ):
        assert line in text, "\n".join(found for found in text.splitlines() if found.startswith(line.split("{")[0]))


def test_largest_number_of_tokens_is_the_rest_of_the_context(make: Maker) -> None:
    server = make()
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 2**31 - 1}),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 2**31 - 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2**31 - 1}),
    ):
        assert server.post(path, body).status_code == 200
    assert server.llm.num_unfinished == 0


def test_defect_is_logged_and_not_told(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    server = make()
    server.llm.render_chat = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    answer = server.post("/v1/chat/completions", {"messages": HI})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error; the server's log has the details"
    assert "ZeroDivisionError" in caplog.text


def test_openapi_has_every_path(make: Maker) -> None:
    paths = make().get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/health"} <= set(
        paths
    )


@pytest.mark.parametrize(
    "options",
    [
        {"max_body_bytes": 0},
        {"max_concurrent_requests": 0},
        {"api_keys": [""]},
        {"api_keys": ["ü"]},
        {"api_keys": ["ok", "x "]},
        {"served_model_names": ["a\n"]},
    ],
)
def test_bad_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        ServerSettings(**options)


def test_request_cancelled_before_it_is_queued_leaves_nothing(make: Maker) -> None:
    release, stepping = threading.Event(), threading.Event()

    def wait() -> None:
        stepping.set()
        release.wait(20)

    server = make(forever, engine={"on_step": wait})

    async def run() -> None:
        given = server.llm.inputs.process("x", SamplingParams(max_tokens=4000))
        async with await server.llm.submit([given]):
            await asyncio.to_thread(stepping.wait, 20)
            second = asyncio.ensure_future(server.llm.submit([given]))  # waits for the step to end
            await asyncio.sleep(0.05)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            assert second.cancelled()
        release.set()
        while server.llm.num_unfinished:  # within the loop: a closed one ends its requests
            await asyncio.sleep(0.005)

    asyncio.run(run())
    assert all(request.num_said < 4000 for request in server.engine.seen.values())  # none ran to its end
