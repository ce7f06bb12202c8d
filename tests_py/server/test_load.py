"""Many clients at once: all requests end, everything is given back, and what is said is what would be said alone."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from deltaic import LLM, SamplingParams
from harness import metric, serve, until

WORDS = tuple("once upon a time the king had a red dog and it ran to the sea with all of his old friends".split())  # noqa: SIM905
BAD: list[dict[str, Any]] = [{"temperature": 3}, {"max_tokens": 0}, {"prompt": [4096]}, {"stop": [""]}, {"n": "2"}]
CACHE_BYTES = 45 << 19  # so little that requests are preempted


@dataclass
class Tally:
    whole: int = 0
    streamed: int = 0
    aborted: int = 0
    refused: int = 0
    sample: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # requests and their texts


def request(rng: random.Random) -> dict[str, Any]:
    start = rng.choice(["A story. ", "Question: ", ""]) * rng.randint(1, 30)  # some prefixes are shared
    prompt = start + " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, 48)}
    if rng.random() < 0.5:
        return {**body, "temperature": 0}
    return {**body, "temperature": 0.8, "seed": rng.randrange(1000), "top_k": 50}


async def run_clients(url: str, num_clients: int, num_requests: int) -> Tally:
    tally, rng = Tally(), random.Random(5)
    todo = [(i, request(rng), rng.random(), rng.random(), rng.randint(1, 6)) for i in range(num_requests)]
    todo.reverse()

    async def one(client: httpx.AsyncClient) -> None:
        while todo:
            i, body, kind, form, num_events = todo.pop()
            if kind < 0.05:
                answer = await client.post("/v1/completions", json={**body, **BAD[i % len(BAD)], "stream": form < 0.5})
                assert answer.status_code == 400
                tally.refused += 1
            elif kind < 0.25:
                await leave(client, {**body, "max_tokens": 400, "ignore_eos": True}, form, num_events)
                tally.aborted += 1
            elif form < 0.5:
                text = await read(client, {**body, "stream": True})
                tally.streamed += 1
                tally.sample.append((body, text))
            else:
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                tally.whole += 1
                tally.sample.append((body, answer.json()["choices"][0]["text"]))

    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(num_clients)))
    return tally


async def leave(client: httpx.AsyncClient, body: dict[str, Any], form: float, num_events: int) -> None:
    """Go in the middle of an answer: a stream after some events, any other soon."""
    if form < 0.8:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                num_events -= line.startswith("data: ")
                if not num_events:
                    return
        raise AssertionError("the stream ended before its client left")
    task = asyncio.ensure_future(client.post("/v1/completions", json=body))
    await asyncio.sleep(form - 0.8)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def read(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text, last = "", ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    text += json.loads(last)["choices"][0]["text"]
    assert last == "[DONE]"
    return text


def load(num_clients: int, num_requests: int, num_compared: int) -> None:
    with serve("--kv-cache-memory-bytes", str(CACHE_BYTES), "--max-num-seqs", "8") as (process, url):
        started = time.monotonic()
        tally = asyncio.run(run_clients(url, num_clients, num_requests))
        seconds = time.monotonic() - started
        until(lambda: metric(url, "num_requests_running") == metric(url, "num_requests_waiting") == 0)
        assert metric(url, "kv_cache_usage_perc") == 0
        num_done = tally.whole + tally.streamed
        assert num_done + tally.aborted + tally.refused == num_requests
        ended = {reason: metric(url, "request_success_total", finished_reason=reason) for reason in REASONS}
        assert ended["stop"] + ended["length"] == num_done
        # A client that left before its request was read left nothing to abort.
        assert 0.7 * tally.aborted <= ended["abort"] <= tally.aborted
        assert ended["error"] == 0
        num_tokens, num_preemptions = metric(url, "generation_tokens_total"), metric(url, "num_preemptions_total")
        print(
            f"{num_requests} requests of {num_clients} clients in {seconds:.0f} s: {tally.whole} whole, "
            f"{tally.streamed} streamed, {tally.aborted} aborted, {tally.refused} refused; {num_tokens:.0f} tokens, "
            f"{num_preemptions:.0f} preemptions"
        )
        # The whole memory is there again: a request that needs nearly all of the context runs.
        max_model_len = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
        large = {"prompt": [7] * (max_model_len - 1), "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=large, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    compare(random.Random(3).sample(tally.sample, num_compared))


REASONS = ("stop", "length", "abort", "error")


def compare(sample: list[tuple[dict[str, Any], str]]) -> None:
    """Check texts against LLM.generate, with nothing else running."""
    llm = LLM(max_num_seqs=1, kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False)
    defaults = llm.get_default_sampling_params()
    for body, text in sample:
        given = {key: value for key, value in body.items() if key != "prompt"}
        params = SamplingParams(**{"top_p": defaults.top_p, "top_k": defaults.top_k, **given})
        assert llm.generate(body["prompt"], params, progress=False)[0].text == text, body


def test_load() -> None:
    load(num_clients=16, num_requests=70, num_compared=6)


@pytest.mark.slow
def test_heavy_load() -> None:
    load(num_clients=64, num_requests=2000, num_compared=60)
