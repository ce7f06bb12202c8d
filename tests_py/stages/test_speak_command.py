from __future__ import annotations

import json
import os
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic.cli import run


def speak(folder: Path, *options: str) -> int:
    return run(["speak", "Once upon a time", "--model", str(folder), "--seed", "3", "--num-threads", "2", *options])


def read(path: Path) -> tuple[int, Any]:
    with wave.open(str(path), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_a_text_becomes_a_wav_file(tiny_tts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.wav"
    assert speak(tiny_tts, "-o", str(path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    rate, samples = read(path)
    assert rate == report["sample_rate"] == 200
    assert len(samples) == report["num_samples"] == 16 * report["num_frames"] > 0
    assert samples.std() > 100
    assert report["finish_reason"] in ("stop", "length")


def test_row_28_no_async_chunk_takes_effect_and_sounds_the_same(
    tiny_speech: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports, sounds = [], []
    for flag in ("--async-chunk", "--no-async-chunk"):
        path = tmp_path / f"{flag}.wav"
        assert speak(tiny_speech, "-o", str(path), "--json", flag, "--chunk-size", "3", "--max-seconds", "4") == 0
        reports.append(json.loads(capsys.readouterr().out))
        sounds.append(read(path)[1])
    assert reports[0]["num_chunks"] > 1
    assert reports[1]["num_chunks"] == 1
    assert np.array_equal(*sounds)


def test_samples_stream_to_stdout(tiny_tts: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / "out.wav"
    assert speak(tiny_tts, "-o", str(path)) == 0
    capfdbinary.readouterr()
    assert speak(tiny_tts, "-o", "-") == 0
    assert capfdbinary.readouterr().out == read(path)[1].tobytes()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--speaker", "nobody"], 1, "there is no speaker 'nobody'; the checkpoint has ann, bob"),
        (["--language", "klingon"], 1, "does not speak 'klingon'"),
        (["-o", "-", "--json"], 2, "both write to stdout"),
    ],
)
def test_mistakes_are_one_line(
    tiny_tts: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str, tmp_path: Path
) -> None:
    assert speak(tiny_tts, *(["-o", str(tmp_path / "x.wav")] if "-o" not in options else []), *options) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_row_20_a_text_model_says_that_it_does_not_speak(
    default_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speak(default_model) == 1
    assert "which does not speak" in capsys.readouterr().err


def test_a_refused_text_leaves_the_file_that_is_there(tiny_tts: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    path.write_bytes(b"precious")
    assert speak(tiny_tts, "-o", str(path), "--speaker", "nobody") != 0
    assert path.read_bytes() == b"precious"


def test_a_pipe_is_refused_as_a_wav_file(tiny_tts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    keeps_open = os.open(tmp_path / "pipe", os.O_RDWR)  # or opening it would wait for a reader
    try:
        assert speak(tiny_tts, "-o", str(tmp_path / "pipe")) == 2
    finally:
        os.close(keeps_open)
    assert "where a WAV file has no end: '-' writes samples" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "/nonexistent/x.wav"), "there is no folder '/nonexistent'"),
        (("-o", "/"), "must name a file"),
        (("-o", ""), "must name a file"),
        (("--device", "cuda"), "a model that speaks runs on the CPU, got --device cuda"),
        (("--max-seconds", "inf"), "--max-seconds must be finite"),
        (("--max-seconds", "1e9"), "--max-seconds is 1e+09, more frames than an utterance may have"),
        (("--chunk-first", "3000000000"), "first of a chunked edge must be below 2^31, got 3000000000"),
        (("--chunk-size", "3000000000"), "size of a chunked edge must be below 2^31, got 3000000000"),
        (("--max-leading-silence", "inf"), "max_leading_silence_s must be finite"),
    ],
)
def test_what_cannot_be_is_one_line(
    tiny_tts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert speak(tiny_tts, *options) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "speech.wav").exists()
