"""Load and its numbers, on a server that answers as a test tells it to."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltaic import _core, cli
from deltaic.bench.ceilings import Ceilings
from deltaic.bench.http_client import HttpError, Url, authority, request, server_sent_events
from deltaic.bench.load import Answer, LoadRequest, Target, arrival_times, ask, make_requests, run_load
from deltaic.bench.serve import Load, parse_goodput, parse_metrics, parse_percentiles
from deltaic.bench.serve_bound import ServerBound
from deltaic.bench.serving import describe, measure_answers, sweep_table
from deltaic.engine_config import EngineConfig

Handler = Callable[[bytes, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def server(handler: Handler) -> Iterator[str]:
    """Run a raw server in a thread; the handler gets the request line, the JSON body and the writer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        await handler(head[0], json.loads(body or b"{}"), writer)
        await writer.drain()
        writer.close()

    started = threading.Event()
    state: dict[str, Any] = {}

    async def main() -> None:
        state["stop"] = asyncio.Event()
        state["loop"] = asyncio.get_running_loop()
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        state["port"] = listener.sockets[0].getsockname()[1]
        started.set()
        await state["stop"].wait()
        listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait(20)
    try:
        yield f"http://127.0.0.1:{state['port']}"
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join()


def plain(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def say(writer: asyncio.StreamWriter, count: int, *, first_s: float, gap_s: float, usage: bool = True) -> None:
    writer.write(STREAM)
    for i in range(count):
        await asyncio.sleep(gap_s if i else first_s)
        writer.write(chunk(event({"choices": [{"text": f" {i}"}]})))
        await writer.drain()
    if usage:
        tokens = {"prompt_tokens": 7, "completion_tokens": 2 * count}
        writer.write(chunk(event({"choices": [], "usage": tokens})))
    writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def target(url: str, **fields: Any) -> Target:
    return Target(url=Url.parse(url), endpoint="/v1/completions", model="m", **({"timeout_s": 20.0} | fields))


def ask_once(url: str, **fields: Any) -> Answer:
    return asyncio.run(ask(target(url, **fields), LoadRequest([1, 2, 3], 3, 5)))


# ---- the client ------------------------------------------------------------------------------------------------------


def test_events_are_put_together_from_pieces_of_any_size() -> None:
    async def pieces() -> Any:
        for piece in (b"da", b'ta: {"a"', b": 1}\n", b"\n: comment\n\ndata: x\n\ndata:", b"y\r\n\r\n"):
            yield piece

    async def collect() -> list[bytes]:
        return [data async for data in server_sent_events(pieces())]

    assert asyncio.run(collect()) == [b'{"a": 1}', b"x", b"y"]


def test_bodies_with_a_length_with_chunks_and_until_the_end() -> None:
    async def answer(line: bytes, _: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        kind = line.split()[1]
        if kind.endswith(b"length"):
            writer.write(plain("200 OK", b"abc"))
        elif kind.endswith(b"chunked"):
            writer.write(STREAM + chunk(b"ab") + chunk(b"c") + b"0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")

    async def get(url: str, path: str) -> bytes:
        return b"".join([p async for p in request(Url.parse(url + "/base/"), "GET", path, headers={}, timeout_s=20)])

    with server(answer) as url:
        for path in ("/length", "/chunked", "/close"):
            assert asyncio.run(get(url, path)) == b"abc"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://host:port"])
def test_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        Url.parse(url)


def test_what_goes_wrong_is_in_the_answer() -> None:
    async def answer(_: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        match body["model"]:
            case "status":
                writer.write(plain("429 Too Many", b'{"error": "full"}'))
            case "broken":
                writer.write(STREAM + b"ff\r\nda")
            case "error":
                writer.write(STREAM + chunk(event({"error": {"message": "died"}})) + b"0\r\n\r\n")
            case "nothing":
                writer.write(STREAM + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            case "garbage":
                writer.write(b"what?\r\n\r\n")
            case "silent":
                await asyncio.sleep(5)

    with server(answer) as url:
        errors = {}
        for model in ("status", "broken", "error", "nothing", "garbage"):
            given = Target(Url.parse(url), "/v1/completions", model, timeout_s=20)
            errors[model] = asyncio.run(ask(given, LoadRequest([1], 1, 1))).error
        silent = Target(Url.parse(url), "/v1/completions", "silent", timeout_s=0.1)
        errors["silent"] = asyncio.run(ask(silent, LoadRequest([1], 1, 1))).error
    assert errors["status"] == 'HTTP 429: {"error": "full"}'
    assert "the connection broke" in errors["broken"]
    assert "died" in errors["error"]
    assert errors["nothing"] == "the stream held no token"
    assert "the connection broke" in errors["garbage"]
    assert errors["silent"] == "no answer within 0.1 s"
    assert "cannot connect" in ask_once("http://127.0.0.1:9").error  # the discard port: nobody listens


# ---- one request -----------------------------------------------------------------------------------------------------


def test_times_and_counts_of_a_stream() -> None:
    seen: list[dict[str, Any]] = []

    async def answer(_: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(body)
        await say(writer, 4, first_s=0.2, gap_s=0.05)

    with server(answer) as url:
        got = ask_once(url, ignore_eos=True, temperature=0.5)
    assert (got.error, got.text, got.output_len, got.prompt_len) == ("", " 0 1 2 3", 8, 7)
    assert 0.2 <= got.ttft < 0.2 + 0.1
    assert len(got.itls) == 3
    assert got.latency == pytest.approx(got.ttft + sum(got.itls))
    assert got.tpot == pytest.approx((got.latency - got.ttft) / 7)
    (body,) = seen
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "ignore_eos": True,
    }


def test_role_that_opens_a_chat_is_no_token() -> None:
    async def answer(_: bytes, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})))
        await writer.drain()
        for text in ("a", "b"):
            await asyncio.sleep(0.1)
            writer.write(chunk(event({"choices": [{"delta": {"content": text}}]})))
            await writer.drain()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    with server(answer) as url:
        got = ask_once(url)
    assert (got.error, got.text, got.output_len) == ("", "ab", 2)
    assert got.ttft >= 0.1
    assert len(got.itls) == 1


def test_server_without_usage_gives_a_token_an_event() -> None:
    async def answer(_: bytes, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await say(writer, 3, first_s=0, gap_s=0, usage=False)

    with server(answer) as url:
        got = ask_once(url)
    assert (got.output_len, got.prompt_len) == (3, 3)


def test_chat_asks_with_messages_and_a_key() -> None:
    given = Target(Url.parse("http://x"), "/v1/chat/completions", "m", api_key="secret", ignore_eos=False)
    body = given.body(LoadRequest("a b", 2, 9))
    assert body["messages"] == [{"role": "user", "content": "a b"}]
    assert "prompt" not in body
    assert "ignore_eos" not in body
    assert given.headers() == {"Authorization": "Bearer secret"}


# ---- a load ----------------------------------------------------------------------------------------------------------


def test_gaps_between_requests_have_the_asked_for_mean_and_spread() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        times = arrival_times(20_000, 50.0, burstiness, seed=1)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert times[0] == 0.0
        assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
        assert statistics.stdev(gaps) == pytest.approx(1 / 50 / math.sqrt(burstiness), rel=0.05)
    assert arrival_times(3, math.inf, 1.0, seed=1) == [0.0, 0.0, 0.0]


def test_requests_have_lengths_in_the_range_and_repeat() -> None:
    requests = make_requests(200, 100, 10, 0.5, as_text=False, vocab_size=17, seed=3)
    assert requests == make_requests(200, 100, 10, 0.5, as_text=False, vocab_size=17, seed=3)
    assert {len(r.prompt) for r in requests} <= set(range(50, 151))
    assert min(r.output_len for r in requests) == 5
    assert max(r.output_len for r in requests) == 15
    assert all(0 <= token < 17 for r in requests for token in r.prompt)  # type: ignore[operator]
    (text,) = make_requests(1, 12, 1, 0.0, as_text=True, vocab_size=1, seed=0)
    assert len(str(text.prompt).split()) == text.prompt_len == 12


def test_no_more_than_max_concurrency_run_at_once() -> None:
    now = most = 0

    async def answer(_: bytes, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await say(writer, 2, first_s=0.02, gap_s=0.02)
        await writer.drain()
        now -= 1

    requests = [LoadRequest([1], 1, 2)] * 12
    done: list[int] = []
    with server(answer) as url:
        answers, duration = asyncio.run(run_load(target(url), requests, [0.0] * 12, 3, done.append))
    assert most == 3
    assert sum(done) == len(answers) == 12
    assert all(a.succeeded for a in answers)
    assert duration >= 12 / 3 * 0.04
    assert measure_answers(answers, duration, (99,))["max_concurrent_requests"] <= 3


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_numbers_of_answers_worked_out_by_hand() -> None:
    answers = [
        Answer(10, 5, started=0.0, ttft=0.1, itls=[0.1, 0.1, 0.1, 0.1], latency=0.5),
        Answer(20, 3, started=0.2, ttft=0.3, itls=[0.2, 0.2], latency=0.7),
        Answer(30, 1, started=1.0, ttft=0.2, latency=0.2),
        Answer(40, error="HTTP 500"),
    ]
    found = measure_answers(answers, 2.0, (50, 90), {"ttft": 200.0, "tpot": 150.0})
    assert found["max_output_tokens_per_s"] == 8  # all but the one at 1.2 s
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (60, 9)
    assert (found["request_throughput"], found["output_throughput"]) == (1.5, 4.5)
    assert found["total_token_throughput"] == 34.5
    assert found["max_concurrent_requests"] == 2
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["median_tpot_ms"] == pytest.approx(150)  # of 100 and 200: a single token has no next one
    assert found["mean_itl_ms"] == pytest.approx(800 / 6)
    assert found["p90_e2el_ms"] == pytest.approx(1e3 * (0.5 + 0.8 * 0.2))
    assert found["request_goodput"] == 1.0  # the second is too slow
    table = describe(found | {"max_concurrency": 4, "request_rate": 2.5}, ["ttft", "e2el"], (50, 90))
    lines = table.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     3" in lines
    assert "Mean TTFT (ms):                          200.00" in lines
    assert "P90 E2EL (ms):                           660.00" in lines
    assert "Request rate configured (RPS):           2.50" in lines
    assert not any("TPOT" in line or "bound" in line.lower() for line in lines)


def test_nothing_that_succeeded_gives_zeros() -> None:
    found = measure_answers([Answer(1, error="x")], 1.0, (99,))
    assert (found["completed"], found["failed"], found["mean_ttft_ms"], found["p99_itl_ms"]) == (0, 1, 0.0, 0.0)


def test_settings_that_are_none_are_refused_by_name() -> None:
    assert parse_goodput(["ttft:200", "e2el:1e3"]) == {"ttft": 200.0, "e2el": 1000.0}
    assert parse_metrics("ttft, itl") == ["ttft", "itl"]
    assert parse_percentiles("50,99.9") == [50.0, 99.9]
    for call in (
        lambda: parse_goodput(["itl:3"]),
        lambda: parse_goodput(["ttft"]),
        lambda: parse_goodput(["ttft:nan"]),
    ):
        with pytest.raises(ValueError, match="goodput must be"):
            call()
    with pytest.raises(ValueError, match="percentile_metrics must be of"):
        parse_metrics("latency")
    for text in ("x", "101", "-1", "nan"):
        with pytest.raises(ValueError, match="metric_percentiles must be"):
            parse_percentiles(text)
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="request_rate must be above 0"):
            Load(rate, None)


# ---- the command -----------------------------------------------------------------------------------------------------


async def openai(line: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if line.startswith(b"GET /v1/models"):
        writer.write(plain("200 OK", json.dumps({"data": [{"id": "org/toy"}]}).encode()))
    else:
        await say(writer, body["max_tokens"], first_s=0.01, gap_s=0.001)


def test_command_sweeps_loads_and_saves_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(openai) as url:
        code = cli.run(
            [
                *("bench", "serve", "--base-url", url, "--num-prompts", "6", "--random-input-len", "4"),
                *("--random-output-len", "3", "--request-rate", "200", "inf", "--max-concurrency", "2", "4"),
                *("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "results")),
                *("--plot", str(tmp_path / "load.png"), "--metric-percentiles", "50,99"),
            ]
        )
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.count("Serving Benchmark Result") == 4
    assert "P50 TTFT (ms):" in out
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "results").iterdir())]
    assert {(r["request_rate"], r["max_concurrency"]) for r in results} == {
        (rate, most) for rate in (200.0, "inf") for most in (2, 4)
    }
    for result in results:
        assert (result["model_id"], result["completed"], result["failed"]) == ("org/toy", 6, 0)
        assert result["total_output_tokens"] == 6 * 2 * 3
        for name in ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"):
            assert len(result[name]) == 6
        assert result.keys() >= VLLMS_NAMES
        assert (result["tokenizer_id"], result["num_prompts"], result["burstiness"]) == (None, 6, 1.0)
    table = out.splitlines()[-5:]
    assert table[0].split()[-4:] == ["ms", "share", "of", "bound"]
    assert [line.split()[:2] for line in table[1:]] == [["200.0", "2"], ["200.0", "4"], ["inf", "2"], ["inf", "4"]]
    assert all(line.endswith(" -") for line in table[1:])  # of a model that is not known
    assert any(path.name.startswith("openai-infqps-concurrency4-toy-") for path in (tmp_path / "results").iterdir())


VLLMS_NAMES = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}


def test_bound_of_a_server_worked_out_by_hand(default_model: Path) -> None:
    """Of answers that decode two at once on average."""
    bound = ServerBound.find(
        default_model, EngineConfig(device="cpu"), Url.parse("http://127.0.0.1:1"), bandwidth=10, flops=0.1
    )
    assert bound.ceilings == Ceilings(10e9, 0.1e12, "given")
    answers = [
        Answer(100, 11, cached_len=cached, started=0.0, ttft=0.25, itls=[0.1] * 10, latency=1.25) for cached in (0, 64)
    ]
    answers.append(Answer(100, error="HTTP 500"))
    found = bound.shares(answers, 1.0, 2)
    costs, limits = bound.costs, (10e9, 0.1e12)
    prefills = [costs.prefill(num_tokens) for num_tokens in (100, 36)]
    assert found["bound_ttft_ms"] == pytest.approx(1e3 * statistics.mean(cost.seconds(*limits) for cost in prefills))
    assert found["ttft_share_of_bound"] == pytest.approx(found["bound_ttft_ms"] / 250)
    step = costs.decode_step(2, 105.5).seconds(*limits)
    assert found["bound_tpot_ms"] == pytest.approx(1e3 * step)
    assert found["tpot_share_of_bound"] == pytest.approx(step / 0.1)
    assert found["share_of_bound"] == pytest.approx(sum(cost.num_flops for cost in prefills) / 0.1e12 + 10 * step)
    file_bytes = sum(path.stat().st_size for path in default_model.glob("*.safetensors"))
    every_weight = _core.load_model_config(default_model).num_parameters()
    assert costs.decode_step(1, 0).num_bytes < 1.3 * file_bytes  # weights as they are stored, not as f32
    assert costs.decode_step(1, 0).num_bytes > every_weight
    assert bound.shares(answers[2:], 1.0, 1) == {}


def test_bound_of_another_machine_must_be_given(default_model: Path) -> None:
    there = Url.parse("http://gpu-server:8000")
    with pytest.raises(ValueError, match="the server is on gpu-server: give --bandwidth and --flops of its device"):
        ServerBound.find(default_model, EngineConfig(device="cpu"), there, bandwidth=10, flops=None)
    given = ServerBound.find(default_model, EngineConfig(device="cpu"), there, bandwidth=10, flops=1)
    assert given.ceilings.source == "given"


def test_command_shows_shares_of_the_bound(
    tmp_path: Path, default_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(openai) as url:
        args = ["bench", "serve", "--base-url", url, "--num-prompts", "4", "--random-input-len", "4"]
        args += ["--random-output-len", "3", "--max-concurrency", "1", "2", "--dataset-name", "random"]
        args += ["--model-config", str(default_model), "--device", "cpu", "--bandwidth", "10", "--flops", "0.1"]
        assert cli.run([*args, "--backend", "vllm", "--save-result", "--result-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"Share of the bound, whole load \(%\): +[0-9.]+\n", out)
    assert re.search(r"Bound of TPOT \(ms\): +[0-9.]+\nShare of the bound, median TPOT \(%\): +[0-9.]+\n", out)
    assert all(re.search(r" [0-9]+ %$", line) for line in out.splitlines()[-2:])
    assert "bound: 10.0 GB/s, 0.10 TFLOP/s (given)" in err
    for path in tmp_path.iterdir():
        saved = json.loads(path.read_text())
        assert saved["share_of_bound"] == pytest.approx(saved["bound_duration"] / saved["duration"])
        assert saved["ceilings"]["bytes_per_second"] == 10e9


def test_no_answer_has_no_share() -> None:
    found = measure_answers([Answer(1, error="x")], 1.0, (99,)) | {"request_rate": "inf", "max_concurrency": None}
    assert sweep_table([found]).splitlines()[1].split()[-1] == "-"
    assert found["max_output_tokens_per_s"] == 0.0


def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for args, code, words in (
        (["--base-url", "nowhere"], 2, "base_url must be"),
        (["--backend", "grpc"], 2, "backend must be one of openai, openai-chat, vllm, got 'grpc'"),
        (["--dataset-name", "sonnet"], 2, "dataset_name must be random: prompts of random tokens, got 'sonnet'"),
        (["--model-config", "/no/such/model"], 2, "/no/such/model"),
        (["--request-rate", "0"], 2, "request_rate must be above 0"),
        (["--random-range-ratio", "1"], 2, "random_range_ratio must be in"),
        (["--burstiness", "0"], 2, "burstiness must be above 0"),
        (["--bandwidth", "inf"], 2, "bandwidth must be a finite number above 0"),
        (["--request-timeout-sec", "0"], 2, "request_timeout_sec must be above 0"),
        (["--ready-check-timeout-sec", "nan"], 2, "ready_check_timeout_sec must be at least 0"),
        (["--save-result", "--result-dir", "/dev/null"], 2, "/dev/null/result.json cannot be written: "),
        (["--request-rate", "1", "2", "--result-filename", "x.json"], 2, "2 loads are asked for"),
        (["--port", "9", "--ready-check-timeout-sec", "0"], 1, "is not ready: cannot connect to 127.0.0.1:9"),
    ):
        assert cli.run(["bench", "serve", *args]) == code
        assert words in capsys.readouterr().err


def test_server_that_refuses_everything_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(line: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if line.startswith(b"GET"):
            await openai(line, body, writer)
        else:
            writer.write(plain("500 Oops", b"no"))

    with server(refuse) as url:
        args = ["bench", "serve", "--base-url", url, "--num-prompts", "2", "--num-warmups", "0"]
        assert cli.run(args) == 1
    out, err = capsys.readouterr()
    assert "Failed requests:                         2" in out
    assert err == "error: no request succeeded; the first error: HTTP 500: no\n"


def test_refusal_ends_the_wait_for_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[bytes] = []

    async def refuse(line: bytes, _: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(line)
        # A server that starts, one that is busy, and one that will not change its mind.
        answers = [("503 Busy", b"starting"), ("429 Busy", b"a full queue"), ("401 No", b"a key is missing")]
        writer.write(plain(*answers[min(len(asked), 3) - 1]))

    with server(refuse) as url:
        began = time.monotonic()
        assert cli.run(["bench", "serve", "--base-url", url, "--ready-check-timeout-sec", "60"]) == 1
    assert time.monotonic() - began < 30
    assert asked == [b"GET /v1/models HTTP/1.1"] * 3
    assert "HTTP 401: a key is missing" in capsys.readouterr().err


def test_path_may_lack_its_slash(capsys: pytest.CaptureFixture[str]) -> None:
    with server(openai) as url:
        command = ["bench", "serve", "--base-url", url, "--num-prompts", "2", "--endpoint", "v1/completions"]
        assert cli.run(command) == 0


def test_hosts_of_ipv6_are_written_in_brackets() -> None:
    seen: list[str] = []

    async def main() -> Answer:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
            await say(writer, 1, first_s=0, gap_s=0)
            writer.close()

        listener = await asyncio.start_server(serve, "::1", 0)
        port = listener.sockets[0].getsockname()[1]
        answer = await ask(target(f"http://{authority('::1', port)}"), LoadRequest([1], 1, 1))
        listener.close()
        assert f"\r\nHost: [::1]:{port}\r\n" in seen[0]
        return answer

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert asyncio.run(main()).error == ""


def test_host_of_ipv6_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = ["bench", "serve", "--host", "::1", "--port", str(port), "--ready-check-timeout-sec", "0"]
    assert cli.run(command) == 1
    assert f"cannot connect to [::1]:{port}: " in capsys.readouterr().err


def test_waits_and_breaks_are_told_in_words() -> None:
    async def hang_up(_: bytes, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")

    with server(hang_up) as url:
        assert re.fullmatch("the connection broke: .+", ask_once(url).error)
        assert ask_once(url, timeout_s=1e-9).error.endswith(": timed out")


def test_events_of_another_form_are_errors_of_their_request() -> None:
    for odd in ([1], 5, {"choices": ["x"]}, {"choices": {"a": 1}}, {"choices": [{"delta": 3}]}):

        async def answer(_: bytes, __: dict[str, Any], writer: asyncio.StreamWriter, odd: Any = odd) -> None:
            writer.write(STREAM + chunk(event(odd)) + b"0\r\n\r\n")

        with server(answer) as url:
            assert ask_once(url).error, odd


def test_http_error_names_the_server_that_has_no_models() -> None:
    async def empty(_: bytes, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(plain("200 OK", b'{"data": []}'))

    from deltaic.bench.load import served_model

    with server(empty) as url, pytest.raises(HttpError, match="names no model"):
        asyncio.run(served_model(Url.parse(url), None, 20.0))
