"""Random weights in the shapes of a config.json: no tokenizer, no file but that one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from deltaic import LLM, SamplingParams, cli
from deltaic.checkpoint import resolve_model
from tiny_model import TINY

PARITY = Path(__file__).parent / "data" / "parity"
SMALL: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_num_seqs": 4, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompt(length: int, vocab_size: int) -> dict[str, list[int]]:
    rng = random.Random(length)
    return {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "some-model.json"
    path.write_text(json.dumps(TINY))
    return path


def test_config_file_under_any_name_is_a_model(config_file: Path, tmp_path: Path) -> None:
    """And so is a folder with nothing else in it; both have the same weights, every time."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    tokens = []
    for model in (config_file, str(config_file), folder):
        llm = LLM(model, **SMALL)
        outputs = llm.generate([prompt(150, 4096), prompt(3, 4096)], GREEDY)
        tokens.append([output.outputs[0].token_ids for output in outputs])
        assert [len(ids) for ids in tokens[-1]] == [12, 12]
    assert tokens[0] == tokens[1] == tokens[2]
    assert resolve_model(config_file, "dummy") == config_file
    with pytest.raises(ValueError, match=r"is a file: give the folder .* load_format dummy"):
        LLM(config_file, device="cpu")
    with pytest.raises(ValueError, match="has no tokenizer"):
        LLM(config_file, **SMALL).get_tokenizer()


def test_text_without_a_tokenizer_is_refused(config_file: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(config_file, **SMALL).generate("Hello", GREEDY)


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in PARITY.glob("*/*/config.json")), ids=lambda p: p.parent.name + "-" + p.name
)
def test_every_architecture_says_something_finite(folder: Path) -> None:
    llm = LLM(folder / "config.json", **SMALL)
    vocab_size = llm.engine.vocab_size
    for output in llm.generate([prompt(70, vocab_size), prompt(1, vocab_size)], GREEDY):
        assert output.outputs[0].error is None
        assert len(output.outputs[0].token_ids) == 12


def test_bf16_weights_stay_bf16(config_file: Path, tmp_path: Path) -> None:
    full = tmp_path / "full.json"
    full.write_text(json.dumps(TINY | {"dtype": "float32"}))
    sizes = [LLM(path, **SMALL).engine.runner.weight_bytes for path in (config_file, full)]
    assert sizes[0] < 0.6 * sizes[1]


def test_weights_beyond_the_machine_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parent.parent / "bench" / "configs" / "qwen3_5_35b_a3b.json"
    args = ["bench", "latency", "--model", str(config), "--load-format", "dummy", "--device", "cpu"]
    assert cli.run([*args, "--kv-cache-memory-bytes", str(10**13)]) == 1
    assert "random weights take 69.32 GB and the caches 10000.00 GB, the machine has" in capsys.readouterr().err
