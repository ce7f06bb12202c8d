"""The official client against a server on a socket, with the bundled model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from deltaic import AsyncLLM, RequestOutputKind, SamplingParams
from deltaic.checkpoint import read_json
from harness import metric, until
from openai.types.chat import ChatCompletionUserMessageParam

FRANCE: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
END_OF_TEXT, IM_END = 4093, 4095


@pytest.fixture(scope="module")
def client(bundled_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def golden(default_model: Path) -> list[dict[str, Any]]:
    return list(read_json(default_model / "golden.json")["prompts"])


def offline(llm: AsyncLLM, prompt: Any, **fields: Any) -> str:
    async def run() -> str:
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **fields)
        return [output async for output in llm.generate(prompt, params)][-1].text

    return asyncio.run(run())


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy", "alias"]
    assert client.models.retrieve("alias").owned_by == "deltaic"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt")
    assert caught.value.code == "model_not_found"


def test_completion_is_the_golden_text(
    client: openai.OpenAI, golden: list[dict[str, Any]], bundled_llm: AsyncLLM
) -> None:
    case = golden[0]
    expected = bundled_llm.get_tokenizer().decode(case["greedy"][:24], skip_special_tokens=True)
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    for prompt in (case["prompt"], [case["prompt"]], case["ids"], [case["ids"]]):
        answer = client.completions.create(model="toy", prompt=prompt, **fields)
        assert [choice.text for choice in answer.choices] == [expected]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(case["ids"])
        assert answer.usage.completion_tokens == 24
        assert answer.usage.total_tokens == len(case["ids"]) + 24


def test_stream_is_the_whole_text(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "toy", "prompt": "Once upon a time", "max_tokens": 30, "seed": 5}
    whole = client.completions.create(**fields)
    events = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert len(events) > 10
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert whole.usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(event.usage is None for event in events[:-1])


def test_several_prompts_and_completions(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "toy", "prompt": ["Once", "The king"], "n": 2, "seed": 3, "max_tokens": 8}
    first = [choice.text for choice in client.completions.create(**fields).choices]
    assert len(set(first)) == 4
    assert [choice.text for choice in client.completions.create(**fields).choices] == first
    streamed = [""] * 4
    for event in client.completions.create(**fields, stream=True):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == first
    alone = client.completions.create(**{**fields, "prompt": "The king", "n": 1})
    assert alone.choices[0].text == first[2]


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "toy", "prompt": "Once upon a time", "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**fields, max_tokens=4, echo=True).choices[0]
    assert answer.text.startswith("Once upon a time,")
    logprobs = answer.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == answer.text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert [answer.text[i:].startswith(token) for i, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    only_prompt = client.completions.create(**fields, max_tokens=0, echo=True)
    choice = only_prompt.choices[0]
    assert choice.text == "Once upon a time"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == logprobs.token_logprobs[: len(choice.logprobs.tokens or [])]
    assert only_prompt.usage is not None
    assert only_prompt.usage.completion_tokens == 0


def test_stop(client: openai.OpenAI, bundled_llm: AsyncLLM) -> None:
    fields: dict[str, Any] = {"model": "toy", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**fields).choices[0].text
    word = whole.split()[5]
    stopped = client.completions.create(**fields, stop=[word, "never"])
    assert stopped.choices[0].text == whole[: whole.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = "".join(event.choices[0].text for event in client.completions.create(**fields, stop=word, stream=True))
    assert streamed == stopped.choices[0].text


def test_model_and_request_stop_ids_both_stop(client: openai.OpenAI, bundled_llm: AsyncLLM) -> None:
    """D103."""
    full_stop = bundled_llm.get_tokenizer().encode(" Paris")[0]
    for own, reason in (([full_stop], full_stop), ([7], None)):
        choice = client.chat.completions.create(
            model="toy", messages=FRANCE, temperature=0, max_tokens=60, extra_body={"stop_token_ids": own}
        ).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.model_extra is not None
        assert choice.model_extra["stop_reason"] == reason


def test_chat(client: openai.OpenAI, bundled_llm: AsyncLLM) -> None:
    expected = offline(bundled_llm, FRANCE, temperature=0, max_tokens=40)
    assert "Paris" in expected
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": FRANCE[0]["content"]}]}]
    for messages in (FRANCE, parts):  # D102: both forms of content are one prompt
        answer = client.chat.completions.create(model="toy", messages=messages, temperature=0, max_completion_tokens=40)
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
    events = list(client.chat.completions.create(model="toy", messages=FRANCE, temperature=0, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    assert events[-1].choices[0].finish_reason == "stop"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "toy", "messages": FRANCE, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**fields).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    text = b"".join(bytes(token.bytes or []) for token in content).decode()
    assert text == f"{choice.message.content}<|im_end|>"
    for token in content:
        assert token.top_logprobs[0].token == token.token  # greedy
        assert len(token.top_logprobs) == 3
    streamed = [
        token
        for event in client.chat.completions.create(**fields, stream=True)
        if event.choices[0].logprobs is not None
        for token in event.choices[0].logprobs.content or []
    ]
    assert [token.token for token in streamed] == [token.token for token in content]
    assert [token.logprob for token in streamed] == [token.logprob for token in content]


def test_prefix_hits_are_told(client: openai.OpenAI) -> None:
    prompt = [7 + i % 50 for i in range(700)]
    for expected in (False, True):
        usage = client.completions.create(model="toy", prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) is expected


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be a finite number") as bad:
        client.completions.create(model="toy", prompt="x", temperature=2.1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist"):
        client.chat.completions.create(model="gpt", messages=FRANCE)
    with pytest.raises(openai.BadRequestError, match="tools: the model's chat template writes none"):
        client.chat.completions.create(
            model="toy", messages=FRANCE, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError, match="at least 1 token, got 0"):
        client.completions.create(model="toy", prompt="", stream=True)


def test_many_clients_get_what_one_would(bundled_server: str, bundled_llm: AsyncLLM) -> None:
    prompts = [f"{word} {number}" for word in ("Once", "The king", "A dog", "Red") for number in range(6)]

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{bundled_server}/v1", api_key="x", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model="toy", prompt=prompt, max_tokens=12, temperature=0)
                    for prompt in prompts
                )
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(run()) == [offline(bundled_llm, prompt, temperature=0, max_tokens=12) for prompt in prompts]


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_goes_gives_every_block_back(bundled_server: str, bundled_llm: AsyncLLM, stream: bool) -> None:
    before = httpx.get(f"{bundled_server}/metrics").text
    body = {"prompt": "Once", "n": 4, "max_tokens": 4000, "ignore_eos": True, "stream": stream}

    async def run() -> None:
        async with httpx.AsyncClient(base_url=bundled_server) as client:
            if stream:
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        break
                return
            task = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while bundled_llm.stats().num_running < 4:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    until(lambda: bundled_llm.num_unfinished == 0)
    until(lambda: bundled_llm.stats().num_free_blocks == bundled_llm.stats().num_total_blocks)

    def metric(text: str, name: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    after = httpx.get(f"{bundled_server}/metrics").text
    assert metric(after, "deltaic:num_requests_running{") == 0
    assert metric(after, "deltaic:kv_cache_usage_perc{") == 0
    aborted = 'deltaic:request_success_total{engine="0",finished_reason="abort"'
    assert metric(after, aborted) - metric(before, aborted) == 4


def test_times_and_steps_are_counted(bundled_server: str) -> None:
    names = ("queue", "prefill", "decode", "inference")
    before = {name: metric(bundled_server, f"request_{name}_time_seconds_sum") for name in names}
    steps, tokens = (metric(bundled_server, f"iteration_tokens_total_{what}") for what in ("count", "sum"))
    body = {"prompt": [7] * 20, "max_tokens": 5, "ignore_eos": True}
    httpx.post(f"{bundled_server}/v1/completions", json=body, timeout=60)
    spent = {name: metric(bundled_server, f"request_{name}_time_seconds_sum") - before[name] for name in names}
    assert all(seconds > 0 for seconds in spent.values())
    assert spent["inference"] == pytest.approx(spent["prefill"] + spent["decode"])
    # A step that verifies drafts has more tokens and gives more.
    assert metric(bundled_server, "iteration_tokens_total_count") - steps >= 2
    assert metric(bundled_server, "iteration_tokens_total_sum") - tokens >= 20 + 4
    assert metric(bundled_server, "cache_config_info", block_size="16") == 1
