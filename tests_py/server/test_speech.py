"""/v1/audio/speech of a model that speaks: random weights, so what it says is noise."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import signal
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from deltaic.server import ServerSettings
from deltaic.server.speech_app import create_speech_app
from deltaic.server.speech_engine import SpeechEngine
from deltaic.stages.speech import SpeechParams, SpeechPipeline
from deltaic.stages.speech.audio import to_pcm16
from harness import metric, running_app, serve, until

ROOT = Path(__file__).parents[2]


def write_checkpoint(folder: Path, **options: Any) -> Path:
    spec = importlib.util.spec_from_file_location("make_tiny_speech", ROOT / "examples" / "make_tiny_speech.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written: Path = module.write_checkpoint(folder, **options)
    return written


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that speaks the text that it is given."""
    return write_checkpoint(tmp_path_factory.mktemp("speech"), with_thinker=False)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[SpeechEngine]:
    with SpeechEngine(SpeechPipeline(checkpoint, max_num_seqs=4, max_frames=60), max_utterances=6) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: SpeechEngine) -> Iterator[str]:
    with running_app(create_speech_app(engine, ServerSettings(served_model_names=["voice"]))) as url:
        yield url


def offline(checkpoint: Path, text: str, seed: int) -> bytes:
    pipeline = SpeechPipeline(checkpoint, max_num_seqs=1, max_frames=60)
    chunks = pipeline.stream(text, SpeechParams(max_frames=60, seed=seed))
    return to_pcm16(np.concatenate([chunk.samples for chunk in chunks]))


def test_official_client_gets_what_the_pipeline_says(url: str, checkpoint: Path, engine: SpeechEngine) -> None:
    expected = offline(checkpoint, "Hello there", 3)
    fields: dict[str, Any] = {"model": "voice", "input": "Hello there", "voice": None, "extra_body": {"seed": 3}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["voice"]
        data = client.audio.speech.create(**fields, response_format="wav").content
        with wave.open(io.BytesIO(data)) as sound:
            assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
            assert sound.getframerate() == engine.pipeline.config.sample_rate
            assert sound.readframes(sound.getnframes()) == expected
        with client.audio.speech.with_streaming_response.create(**fields, response_format="pcm") as response:
            pieces = [piece for piece in response.iter_bytes() if piece]
        assert b"".join(pieces) == expected
        with pytest.raises(openai.NotFoundError):
            client.audio.speech.create(**{**fields, "model": "tts-1"})
    until(lambda: engine.num_unfinished == 0)
    assert metric(url, "audio_seconds_total") > 0
    assert metric(url, "request_success_total", finished_reason="error") == 0


def test_companions_change_nothing(url: str, checkpoint: Path) -> None:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            bodies = [{"input": f"Number {i}", "response_format": "pcm", "seed": i} for i in range(6)]
            return await asyncio.gather(*(client.post("/v1/audio/speech", json=body) for body in bodies))

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200] * 6
    for i in (0, 5):
        assert answers[i].content == offline(checkpoint, f"Number {i}", i)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": " "}, "input is empty"),
        ({"input": 5}, "input: "),
        ({"input": "a" * 4097}, "at most 4096 characters, got 4097"),
        ({"input": "\ud800"}, ""),
        ({"response_format": "mp3"}, "response_format must be wav or pcm, got 'mp3'"),
        ({"speed": 2}, "speed must be 1"),
        ({"speed": float("nan")}, "speed must be 1"),
        ({"stream_format": "sse"}, "stream_format must be audio"),
        ({"voice": "nobody"}, "nobody"),
        ({"voice": {"id": "x"}}, "voice must be the name of a speaker"),
        ({"language": "Klingon"}, "Klingon"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 10**30}, "seed must be"),
        ({"model": "tts-1"}, ""),
    ],
    ids=str,
)
def test_wrong_bodies(url: str, engine: SpeechEngine, fields: dict[str, Any], words: str) -> None:
    for sound in ({}, {"response_format": "pcm"}):
        content = json.dumps({"input": "Hi", **sound, **fields})
        answer = httpx.post(
            f"{url}/v1/audio/speech", content=content, headers={"content-type": "application/json"}, timeout=60
        )
        assert answer.status_code == (404 if "model" in fields else 400), answer.text
        error = answer.json()["error"]
        assert words in error["message"]
        assert error["param"] == next(iter(fields))
    until(lambda: engine.num_unfinished == 0)
    assert httpx.get(f"{url}/health").status_code == 200


def test_client_that_goes_ends_its_utterance(url: str, engine: SpeechEngine) -> None:
    before = metric(url, "request_success_total")
    body = {"input": "A long one", "response_format": "pcm"}
    with httpx.stream("POST", f"{url}/v1/audio/speech", json=body, timeout=60) as response:
        next(response.iter_raw())
    until(lambda: engine.num_unfinished == 0 and not engine.pipeline.has_unfinished_requests())
    until(lambda: metric(url, "request_success_total") == before + 1)  # "abort", or what it ended by before that


def test_status_and_models_are_those_of_any_server(url: str) -> None:
    card = httpx.get(f"{url}/v1/models/voice").json()
    assert (card["id"], card["root"], card["max_model_len"]) == ("voice", "voice", 60)
    assert httpx.get(f"{url}/v1/models/other").json()["error"]["code"] == "model_not_found"
    for method, path in (("HEAD", "/health"), ("HEAD", "/ping"), ("POST", "/ping"), ("GET", "/version")):
        answer = httpx.request(method, f"{url}{path}")
        assert answer.status_code == 200, path
        assert bool(answer.content) == (method != "HEAD")


def test_full_queue_and_shutdown(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, release = SpeechPipeline(checkpoint, max_num_seqs=1, max_frames=2000), threading.Event()
    step = pipeline.step
    monkeypatch.setattr(pipeline, "step", lambda: step() if release.wait(0.05) else [])
    engine = SpeechEngine(pipeline, max_utterances=1)
    with running_app(create_speech_app(engine)) as url:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/audio/speech", json={"input": "A long one"}, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: engine.num_unfinished == 1)
        busy = httpx.post(f"{url}/v1/audio/speech", json={"input": "x"})
        assert busy.status_code == 429
        assert busy.headers["retry-after"] == "1"
        assert httpx.get(f"{url}/health").status_code == 200
        engine.shutdown()
        thread.join()
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "the engine was shut down"
        assert httpx.get(f"{url}/health").status_code == 503


@pytest.mark.parametrize("sound", ["wav", "pcm"])
def test_an_answer_that_cannot_be_spoken_is_a_status_in_any_format(tmp_path: Path, sound: str) -> None:
    """Although the thinker's text came before."""
    pipeline = SpeechPipeline(write_checkpoint(tmp_path), max_num_seqs=1, max_frames=60)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no air")

    pipeline._start_talker = refuse  # type: ignore[method-assign]
    with SpeechEngine(pipeline) as engine, running_app(create_speech_app(engine)) as url:
        body = {"input": "Hi", "seed": 1, "response_format": sound}
        answer = httpx.post(f"{url}/v1/audio/speech", json=body, timeout=60)
        assert answer.status_code == 500
        assert "stage 'talker' failed: no air" in answer.json()["error"]["message"]


def test_command_serves_a_model_that_speaks_its_answer(tmp_path: Path) -> None:
    with serve(str(write_checkpoint(tmp_path)), "--served-model-name", "voice") as (process, url):
        answer = httpx.post(f"{url}/v1/audio/speech", json={"model": "voice", "input": "Hi", "seed": 1}, timeout=60)
        assert answer.status_code == 200
        assert answer.content.startswith(b"RIFF")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
