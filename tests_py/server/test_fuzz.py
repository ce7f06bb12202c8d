"""Bodies that are wrong in every way, on a socket: all 4xx, the server alive, its memory back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from deltaic.server.protocol import ChatCompletionBody, CompletionBody
from deltaic.server.responses_protocol import ResponsesBody
from harness import metric, serve

HI = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/audio/speech": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
MODELS = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatCompletionBody,
    "/v1/responses": ResponsesBody,
}
HUGE = 5279552648203111001
# Text of JSON, since not all of it is JSON.
VALUES = [
    *("null", "true", "false", "0", "-1", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e-320", "0.1"),
    *("9" * 4000, "-" + "9" * 4000, str(HUGE), str(-HUGE), str(2**63), str(2**64), str(-(2**63) - 1)),
    *(
        '""',
        '"\\u0000"',
        '"\\ud800"',
        '"\\udfff\\ud800"',
        '"\\uZZZZ"',
        '"\\x"',
        '"' + "a" * 5000 + '"',
        '"🌶"',
        '"unclosed',
    ),
    *("[]", "[[]]", "[null]", '["a", 5]', "[-1]", f"[{HUGE}]", "[" + "1," * 5000 + "1]", "[" * 5000 + "]" * 5000),
    *("{}", '{"a": {}}', '{"-1": 1}', '{"9999999": 1}', '{"5": "x"}', '{"": 0}', '{"type": "function"}', "{'a': 1}"),
    *('[{"role": "user"}]', '[{"role": "tool", "content": [{"type": "text", "text": 5}]}]', '[{"type": "message"}]'),
]


def with_field(path: str, name: str, value: str) -> bytes:
    fields = {key: json.dumps(other) for key, other in GOOD[path].items()} | {name: value}
    return ("{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in fields.items()) + "}").encode()


def bodies(path: str, rng: random.Random, number: int) -> Iterator[bytes]:
    """Yield bodies with a wrong field, with two, cut, and with bytes changed."""
    names = [*(MODELS[path].model_fields if path in MODELS else GOOD[path]), "unknown"]
    whole = json.dumps(GOOD[path]).encode()
    for _ in range(number):
        kind = rng.random()
        if kind < 0.6:
            yield with_field(path, rng.choice(names), rng.choice(VALUES))
        elif kind < 0.75:
            first, second = rng.choice(names), rng.choice(VALUES)
            yield with_field(path, first, rng.choice(VALUES))[:-1] + f', "{rng.choice(names)}": {second}}}'.encode()
        elif kind < 0.85:
            yield whole[: rng.randrange(len(whole))]
        else:
            changed = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            yield bytes(changed)


def large_bodies(path: str) -> Iterator[bytes]:
    field = next(iter(GOOD[path]))
    text = b"a" * (10 << 20)
    yield f'{{"{field}": "'.encode() + text + b'"}'
    yield f'{{"{field}": '.encode() + b"[" * (1 << 20) + b"]" * (1 << 20) + b"}"
    yield f'{{"{field}": '.encode() + b'{"a":' * (1 << 20) + b"}" * (1 << 20) + b"}"
    yield f'{{"{field}": ['.encode() + b"7," * (4 << 20) + b"7]}"
    yield f'{{"{field}": ['.encode() + b'"a",' * (2 << 20) + b'"a"]}'
    yield f'{{"{field}": "'.encode() + b"\xff" * (10 << 20) + b'"}'
    yield f'{{"{field}": "'.encode() + b"\\ud83d" * (1 << 20) + b'"}'
    yield f'{{"{field}": '.encode() + b"9" * (10 << 20) + b"}"
    yield json.dumps(GOOD[path])[:-1].encode() + b', "stop": "' + text + b'"}'
    yield b'{"model": "' + text + b'"}'
    yield b" " * (10 << 20)


async def send_all(url: str, requests: list[tuple[str, bytes]]) -> dict[int, int]:
    """Send bodies, a few at a time; return how many answers had each status. None may hang."""
    statuses: dict[int, int] = {}
    limit = asyncio.Semaphore(4)
    headers = {"content-type": "application/json"}

    async def send(client: httpx.AsyncClient, path: str, body: bytes) -> None:
        async with limit:
            answer = await client.post(path, content=body, headers=headers)
        assert answer.status_code in (200, 400, 404, 413, 422), (path, body[:300], answer.text[:300])
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert len(answer.content) < 1000
        elif answer.headers["content-type"].startswith("application/json"):
            answer.json()
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(send(client, path, body) for path, body in requests))
    return statuses


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) << 10


def fuzz(number: int, large: bool, rounds: int) -> None:
    rng = random.Random(7)
    # A small cache: its pages become resident as they are used.
    small = ("--max-num-seqs", "2", "--kv-cache-memory-bytes", str(8 << 20))
    with serve("--max-body-bytes", str(64 << 20), *small) as (process, url):
        levels = []
        for _ in range(rounds):
            requests = [(path, body) for path in GOOD for body in bodies(path, rng, number)]
            if large:
                requests += [(path, body) for path in GOOD for body in large_bodies(path)]
            rng.shuffle(requests)
            statuses = asyncio.run(send_all(url, requests))
            assert statuses[400] > len(requests) / 3
            assert httpx.get(f"{url}/health").status_code == 200
            answer = httpx.post(f"{url}/v1/completions", json=GOOD["/v1/completions"], timeout=60)
            assert answer.status_code == 200
            levels.append(resident_bytes(process.pid))
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert metric(url, name) == 0
        # The first rounds grow pools of threads and of memory to their size; what a round leaves varies.
        first, last = levels[: rounds // 2], levels[rounds // 2 :]
        assert min(last) < max(first) + (16 << 20), [level >> 20 for level in levels]
        process.terminate()
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_wrong_bodies_on_a_socket() -> None:
    fuzz(25, large=False, rounds=4)


@pytest.mark.slow
def test_many_and_large_wrong_bodies_on_a_socket() -> None:
    fuzz(250, large=True, rounds=6)
