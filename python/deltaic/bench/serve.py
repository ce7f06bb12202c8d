"""`deltaic bench serve`: one load after the other on one server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltaic.bench.http_client import HttpError, Url
from deltaic.bench.load import Answer, Target, arrival_times, ask, make_requests, run_load, served_model
from deltaic.bench.serving import METRICS, measure_answers
from deltaic.progress import ProgressBar

# vllm is that tool's name for the first.
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "vllm": "/v1/completions"}
_READY_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    request_rate: float  # a second; inf: all at once
    max_concurrency: int | None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ValueError(f"request_rate must be above 0, got {self.request_rate}")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What all loads share. Raises ValueError naming the field."""

    base_url: str
    backend: str
    endpoint: str | None
    model: str | None
    api_key: str | None
    num_prompts: int
    burstiness: float
    input_len: int
    output_len: int
    range_ratio: float
    vocab_size: int
    ignore_eos: bool
    temperature: float
    seed: int
    num_warmups: int
    ready_timeout_s: float
    request_timeout_s: float
    goodput: Mapping[str, float]
    metrics: Sequence[str]
    percentiles: Sequence[float]

    def __post_init__(self) -> None:
        Url.parse(self.base_url)
        if self.backend not in ENDPOINTS:
            raise ValueError(f"backend must be one of {', '.join(ENDPOINTS)}, got {self.backend!r}")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"burstiness must be above 0, got {self.burstiness}")
        if not 0.0 <= self.range_ratio < 1.0:
            raise ValueError(f"random_range_ratio must be in [0, 1), got {self.range_ratio}")
        if not self.ready_timeout_s >= 0:
            raise ValueError(f"ready_check_timeout_sec must be at least 0, got {self.ready_timeout_s}")
        if not self.request_timeout_s > 0:
            raise ValueError(f"request_timeout_sec must be above 0, got {self.request_timeout_s}")

    def target(self, model: str) -> Target:
        return Target(
            url=Url.parse(self.base_url),
            endpoint=f"/{(self.endpoint or ENDPOINTS[self.backend]).lstrip('/')}",
            model=model,
            api_key=self.api_key,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            timeout_s=self.request_timeout_s,
        )


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return limits in ms by metric, of "ttft:200"."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limit >= 0:
            raise ValueError(f"goodput must be ttft, tpot or e2el with its ms (ttft:200), got {pair!r}")
        limits[name] = limit
    return limits


def parse_metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ValueError(f"percentile_metrics must be of {','.join(METRICS)}, got {name!r}")
    return names


def parse_percentiles(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",") if share.strip()]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 100 for share in shares):
        raise ValueError(f"metric_percentiles must be numbers from 0 to 100 (50,99), got {text!r}")
    return shares


def run(settings: ServeSettings, loads: Sequence[Load]) -> Iterator[tuple[dict[str, Any], list[Answer]]]:
    """Yield the result of each load and its answers; RuntimeError when the server does not answer at all."""
    try:
        model = asyncio.run(_wait_until_ready(settings))
    except HttpError as error:
        raise RuntimeError(f"{settings.base_url} is not ready: {error}") from error
    for load in loads:
        yield _run_load(settings, settings.target(model), load)


async def _wait_until_ready(settings: ServeSettings) -> str:
    """Return the name of the model, once the server has answered the warm-up requests."""
    deadline = time.monotonic() + settings.ready_timeout_s
    url = Url.parse(settings.base_url)
    while True:
        try:
            model = settings.model or await served_model(url, settings.api_key, settings.request_timeout_s)
            break
        except HttpError as error:
            if error.is_final or time.monotonic() + _READY_CHECK_S > deadline:
                raise
        await asyncio.sleep(_READY_CHECK_S)
    target = settings.target(model)
    for given in _requests(settings, settings.num_warmups, settings.seed + 1):
        answer = await ask(target, given)
        if not answer.succeeded:
            raise HttpError(f"a warm-up request failed: {answer.error}")
    return model


def _requests(settings: ServeSettings, count: int, seed: int) -> Any:
    return make_requests(
        count,
        settings.input_len,
        settings.output_len,
        settings.range_ratio,
        as_text=settings.target("").is_chat,
        vocab_size=settings.vocab_size,
        seed=seed,
    )


def _run_load(settings: ServeSettings, target: Target, load: Load) -> tuple[dict[str, Any], list[Answer]]:
    requests = _requests(settings, settings.num_prompts, settings.seed)
    times = arrival_times(settings.num_prompts, load.request_rate, settings.burstiness, settings.seed)
    with ProgressBar(len(requests), None, f"{load.request_rate:g} requests/s") as bar:
        answers, duration = asyncio.run(run_load(target, requests, times, load.max_concurrency, bar.advance))
    errors = [answer.error for answer in answers if answer.error]
    facts = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": settings.backend,
        "base_url": settings.base_url,
        "endpoint_type": settings.backend,
        "label": None,
        "model_id": target.model,
        "tokenizer_id": None,  # prompts are token ids, or words
        "num_prompts": settings.num_prompts,
        "request_rate": "inf" if load.request_rate == math.inf else load.request_rate,
        "burstiness": settings.burstiness,
        "max_concurrency": load.max_concurrency,
        "first_error": errors[0] if errors else None,
    }
    return facts | measure_answers(answers, duration, settings.percentiles, settings.goodput), answers


def file_name(result: Mapping[str, Any]) -> str:
    """Return vLLM's name for the file of a load."""
    concurrency = "" if result["max_concurrency"] is None else f"-concurrency{result['max_concurrency']}"
    model = str(result["model_id"]).split("/")[-1]
    return f"{result['backend']}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"
