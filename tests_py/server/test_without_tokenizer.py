"""A model with no tokenizer, such as one of random weights: token ids in, events without text out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from deltaic import AsyncLLM, cli
from harness import SMALL, running_server
from tiny_model import TINY


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("dummy") / "tiny.json"
    path.write_text(json.dumps(TINY))
    with (
        AsyncLLM(path, device="cpu", load_format="dummy", max_model_len=256, **SMALL) as llm,
        running_server(llm) as url,
    ):
        yield url


def test_load_is_measured_on_random_weights(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "serve", "--base-url", url, "--num-prompts", "12", "--random-input-len", "20", "--ignore-eos"]
    saved = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert cli.run([*args, "--random-output-len", "6", "--max-concurrency", "4", *saved]) == 0
    assert "Successful requests:                     12" in capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 20, 12 * 6)
    assert all(1 <= len(itls) <= 5 for itls in result["itls"])  # steps that end together may come as one event
    assert result["generated_texts"] == [""] * 12


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", {"prompt": [1, 2], "logprobs": 1}),
        ("/v1/completions", {"prompt": [1, 2], "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/tokenize", {"prompt": "text"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_text_is_refused(url: str, path: str, body: dict[str, object]) -> None:
    answer = httpx.post(url + path, json=body, timeout=20)
    assert answer.status_code == 400
    assert "token" in answer.json()["error"]["message"] or "template" in answer.json()["error"]["message"]


def test_token_ids_are_answered_whole(url: str) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=20).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["text"] == ""
