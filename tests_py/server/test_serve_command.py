"""`deltaic serve` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from deltaic import cli
from harness import SMALL, listen, metric, running_server, serve, until

LONG = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "n": 4}


def stream(url: str, lines: list[str]) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(line)


def test_sigterm_ends_live_streams_within_two_seconds() -> None:
    with serve("--served-model-name", "toy") as (process, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "toy"
        streams: list[list[str]] = [[] for _ in range(4)]
        threads = [threading.Thread(target=stream, args=(url, lines)) for lines in streams]
        whole: list[httpx.Response] = []

        def ask() -> None:
            whole.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=60))

        threads.append(threading.Thread(target=ask))
        for thread in threads:
            thread.start()
        until(lambda: all(streams))
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert process.wait(10) == 0
        assert time.monotonic() - started < 2
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    for lines in streams:
        said = [line for line in lines if line]
        assert said[-1] == "data: [DONE]"
        assert json.loads(said[-2].removeprefix("data: "))["error"]["message"] == "the engine was shut down"
        assert len(said) > 2
    assert whole[0].status_code == 503


def test_sigterm_under_load() -> None:
    """Streams that run and streams that wait all get their last event."""
    with serve("--max-num-seqs", "4") as (process, url):
        streams: list[list[str]] = [[] for _ in range(24)]
        threads = [threading.Thread(target=stream, args=(url, lines)) for lines in streams]
        for thread in threads:
            thread.start()
        until(lambda: metric(url, "num_requests_waiting") >= 24 * 4 - 4)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert process.wait(10) == 0
        assert time.monotonic() - started < 2
        assert process.stderr is not None
        assert process.stderr.read() == ""
    for lines in streams:
        said = [line for line in lines if line]
        assert said[-1] == "data: [DONE]"
        assert json.loads(said[-2].removeprefix("data: "))["error"]["message"] == "the engine was shut down"


def test_clients_that_stall_or_are_killed() -> None:
    """A reader that stops reading holds nobody up, the end least of all; a killed one is noticed."""
    code = f"""
import httpx, sys, time
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json={ {**LONG, "stream": True, "max_tokens": 4000}!r}) as r:
    lines = r.iter_lines()
    next(lines)
    print("reading", flush=True)
    time.sleep(60)
"""
    with serve() as (process, url):
        clients = [
            subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "reading\n"
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "The king", "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200
        for client in clients[:1]:
            client.kill()
            client.wait()
        aborted = 'finished_reason="abort",model_name="default_model"} 4.0'
        until(lambda: aborted in httpx.get(f"{url}/metrics").text)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - started < 2
        clients[1].kill()
        for client in clients:
            client.communicate()


def test_ctrl_c_ends_it() -> None:
    with serve("--api-key", "secret") as (process, url):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAIC_API_KEY", " two words ")
    with serve() as (_, url):
        for header, status in (("", 401), ("two", 401), ("words", 401), ("two words", 200)):
            headers = {"authorization": f"Bearer {header}"} if header else {}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{url}/health").status_code == 200


def test_empty_key_in_the_environment_opens_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for empty in ("", " "):
        monkeypatch.setenv("DELTAIC_API_KEY", empty)
        assert cli.run(["serve", "--port", "0"]) == 2
        assert "DELTAIC_API_KEY is set and empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--port", "70000"], 2, "'--port'"),
        (["--max-body-bytes", "0"], 2, "max_body_bytes must be at least 1, got 0"),
        (["--api-key", ""], 2, "api_keys must be"),
        (["--max-model-len", "0"], 2, "max_model_len must be at least 1"),
        (["/no/such/folder"], 1, "does not exist"),
        (["--host", "no.such.host.invalid"], 1, "cannot listen on no.such.host.invalid port 8000: "),
        (["--port", "0", "--max-waiting", "-1"], 2, "max_waiting must be at least 0"),
        (["--port", "0", "--stall-timeout", "nan"], 2, "stall_timeout_s must be more than 0"),
    ],
)
def test_wrong_command_lines(args: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", *args]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
        assert cli.run(["serve", "--port", port]) == 1
    assert capsys.readouterr().err == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_missing_packages_are_named_with_the_remedy(missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from deltaic import cli
sys.exit(cli.run(["serve"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (
        f"serve needs {missing}, which is not installed: {sys.executable} -m pip install 'deltaic[serve]'"
        in done.stderr
    )


def test_two_servers_one_after_the_other_and_at_once() -> None:
    """Two engines of one process; the second's figures are its own."""
    from deltaic import AsyncLLM

    body: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    texts = []
    for _ in range(2):
        with running_server(AsyncLLM(**SMALL)) as first, running_server(AsyncLLM(**SMALL)) as second:
            for url in (first, second):
                texts.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])
                assert (
                    'deltaic:generation_tokens_total{engine="0",model_name="default_model"} 8.0'
                    in httpx.get(f"{url}/metrics").text
                )
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_base_install_needs_none_of_the_packages() -> None:
    code = (
        "import sys, deltaic.cli; from deltaic import LLM, AsyncLLM; "
        "sys.exit(any(m in sys.modules for m in ('fastapi', 'uvicorn', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=60, check=False).returncode == 0


def test_sigterm_within_a_step_that_does_not_end() -> None:
    code = """
import time
from types import SimpleNamespace
from deltaic import AsyncLLM, text_engine
from deltaic.server import ServerSettings
from deltaic.server.run import address, listen, run_server
from scripted_engine import ScriptedEngine

engine = ScriptedEngine(lambda *_: [7] * 9, on_step=lambda: (print("stepping", flush=True), time.sleep(60)))
text_engine.Engine = SimpleNamespace(from_checkpoint=lambda *_: engine)
with listen("127.0.0.1", 0) as sock:
    llm = AsyncLLM()
    print(address(sock), flush=True)
    run_server(llm, ServerSettings(), sock)
"""
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = f"http://{process.stdout.readline().strip()}"
            answers: list[httpx.Response] = []
            body = {"prompt": "x"}
            thread = threading.Thread(
                target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
            )
            thread.start()
            assert process.stdout.readline() == "stepping\n"
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
            assert time.monotonic() - started < 2
            thread.join()
        finally:
            process.kill()
    assert answers[0].status_code == 503
