"""Send requests to a server as users would: at random times, some at once, each with its clock."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltaic.bench.http_client import HttpError, Url, request, server_sent_events
from deltaic.bench.lengths import random_requests

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to ask for: token ids for completions, words for a chat."""

    prompt: list[int] | str
    prompt_len: int
    output_len: int


@dataclass(slots=True)
class Answer:
    """What came of a request; times in seconds."""

    prompt_len: int
    output_len: int = 0
    cached_len: int = 0  # of the prompt, in the server's cache
    started: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Return the seconds a token after the first; None for a single one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is asked."""

    url: Url
    endpoint: str  # /v1/completions or /v1/chat/completions
    model: str
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float | None = 0.0
    timeout_s: float = 600.0

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, given: LoadRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": given.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": given.prompt}]
        else:
            body["prompt"] = given.prompt
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


def make_requests(
    count: int, input_len: int, output_len: int, range_ratio: float, *, as_text: bool, vocab_size: int, seed: int
) -> list[LoadRequest]:
    """Return random prompts: token ids below vocab_size, or as many common words; lengths as random_requests draws."""
    rng = random.Random(seed)
    lengths = random_requests(count, input_len, output_len, range_ratio, seed)
    requests = []
    for length in lengths:
        prompt: list[int] | str = [rng.randrange(vocab_size) for _ in range(length.prompt_len)]
        if as_text:
            prompt = " ".join(rng.choice(WORDS) for _ in range(length.prompt_len))
        requests.append(LoadRequest(prompt, length.prompt_len, length.output_len))
    return requests


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when each request is sent, in seconds: all at once for an infinite rate.

    Gaps have a gamma distribution of shape `burstiness`, which 1 makes a Poisson process; below 1 requests come in
    bursts, above 1 evenly.
    """
    if request_rate == float("inf"):
        return [0.0] * count
    rng = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (request_rate * burstiness))
    return times


async def ask(target: Target, given: LoadRequest) -> Answer:
    """Send one request and time its stream; what goes wrong is in the answer's error."""
    answer = Answer(given.prompt_len)
    answer.started = last = time.perf_counter()
    try:
        events = server_sent_events(_post(target, given))
        async for data in events:
            if data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise HttpError(f"error in the stream: {event['error']}")
            if usage := event.get("usage"):
                answer.output_len = usage["completion_tokens"]
                answer.prompt_len = usage.get("prompt_tokens", answer.prompt_len)
                answer.cached_len = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if not (choices := event.get("choices")) or _only_opens(choices[0]):
                continue
            now = time.perf_counter()
            if answer.ttft == 0.0:
                answer.ttft = now - answer.started
            else:
                answer.itls.append(now - last)
            last = now
            answer.text += _text(choices[0])
    except (HttpError, ValueError, LookupError, TypeError, AttributeError) as error:
        answer.error = f"{type(error).__name__}: {error}" if not isinstance(error, HttpError) else str(error)
    answer.latency = last - answer.started
    if answer.succeeded and answer.ttft == 0.0:
        answer.error = "the stream held no token"
    if answer.succeeded and answer.output_len == 0:
        answer.output_len = 1 + len(answer.itls)  # a server without usage: one token an event
    return answer


def _post(target: Target, given: LoadRequest) -> AsyncIterator[bytes]:
    body = json.dumps(target.body(given)).encode()
    return request(target.url, "POST", target.endpoint, headers=target.headers(), body=body, timeout_s=target.timeout_s)


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _only_opens(choice: dict[str, Any]) -> bool:
    """Say whether the event of a chat names the role alone: servers send it before the first token."""
    delta = choice.get("delta") or {}
    return "role" in delta and not any(delta.get(part) for part in ("content", "reasoning_content", "tool_calls"))


async def served_model(url: Url, api_key: str | None, timeout_s: float) -> str:
    """Return the first model of /v1/models; HttpError where the server does not say."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = b"".join([piece async for piece in request(url, "GET", "/v1/models", headers=headers, timeout_s=timeout_s)])
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise HttpError("/v1/models names no model: give --model") from error


async def run_load(
    target: Target,
    requests: Sequence[LoadRequest],
    times: Sequence[float],
    max_concurrency: int | None,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[list[Answer], float]:
    """Send each request at its time, at most max_concurrency at once; return the answers and the seconds it took."""
    gate = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    started = time.perf_counter()

    async def send(given: LoadRequest, at: float) -> Answer:
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        async with gate:
            answer = await ask(target, given)
        advance(1)
        return answer

    answers = await asyncio.gather(*(send(given, at) for given, at in zip(requests, times, strict=True)))
    return answers, time.perf_counter() - started
