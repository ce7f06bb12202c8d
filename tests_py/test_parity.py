"""The engine against goldens that transformers computed in float32, for every checkpoint and every layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_driver import StepDriver, make_runner

PARITY = Path(__file__).parent / "data" / "parity"
CHECKPOINTS = sorted(path.parent for path in PARITY.glob("*/*/golden.npz"))
NUM_CHECKPOINTS = 17
HYBRIDS = [path for path in CHECKPOINTS if path.parent.name.startswith(("qwen3_5", "qwen3_next"))]

# The float32 limits of the parity set's README.
MAX_LOGIT_ERROR = 2e-3
MAX_LOGIT_RELATIVE_RMS = 5e-5
MAX_STATE_ERROR = 2e-4
MIN_MARGIN = 1e-2  # a greedy token must be the golden one where the two best logits differ by more

Golden = Mapping[str, np.ndarray]


def name_of(checkpoint: Path) -> str:
    return f"{checkpoint.parent.name}-{checkpoint.name}"


each_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=name_of)
each_hybrid = pytest.mark.parametrize("checkpoint", HYBRIDS, ids=name_of)


def load_golden(checkpoint: Path) -> Golden:
    with np.load(checkpoint / "golden.npz") as file:
        return dict(file)


def prompts_of(golden: Golden) -> list[list[int]]:
    return [golden[f"prompt_{i}"].tolist() for i in range(int(golden["num_prompts"]))]


def assert_close(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Assert that logits are within the limits."""
    assert actual.shape == expected.shape
    error = actual.astype(np.float64) - expected
    worst, relative = np.abs(error).max(), np.sqrt((error**2).mean() / (expected.astype(np.float64) ** 2).mean())
    print(f"{what}: max abs {worst:.2e}, relative rms {relative:.2e}")
    assert worst <= MAX_LOGIT_ERROR
    assert relative <= MAX_LOGIT_RELATIVE_RMS


def assert_greedy(actual: list[int], golden: Golden, i: int) -> None:
    """Assert that the tokens of prompt i are the golden ones, up to the first step where either of two is right."""
    expected, margin = golden[f"greedy_{i}"].tolist(), golden[f"margin_{i}"]
    assert len(actual) == len(expected)
    for step, (token, wanted) in enumerate(zip(actual, expected, strict=True)):
        if token != wanted:
            assert margin[step] <= MIN_MARGIN, f"prompt {i} step {step}: {token} is not {wanted}, margin {margin[step]}"
            return


def test_no_checkpoint_is_left_out() -> None:
    assert len(CHECKPOINTS) == NUM_CHECKPOINTS
    assert {path.parent for path in PARITY.glob("*/*/config.json")} == set(CHECKPOINTS)
    assert len(HYBRIDS) == 11


@each_checkpoint
def test_dense_forward_gives_the_golden_logits(checkpoint: Path) -> None:
    golden, runner = load_golden(checkpoint), make_runner(checkpoint)
    for i, prompt in enumerate(prompts_of(golden)):
        logits, hidden = runner.dense_forward(prompt)
        assert hidden is None
        assert_close(logits[-1], golden[f"last_logits_{i}"], f"last_logits_{i}")
    logits, hidden = runner.dense_forward(prompts_of(golden)[int(golden["full_prompt"])], with_hidden=True)
    assert_close(logits, golden["all_logits"], "all_logits")
    for layer, expected in enumerate(golden["hidden"]):
        assert_close(hidden[layer], expected, f"hidden {layer}")


@each_checkpoint
def test_dense_forward_over_the_golden_tokens_gives_every_decode_step(checkpoint: Path) -> None:
    golden, runner = load_golden(checkpoint), make_runner(checkpoint)
    for i in golden["decode_prompts"].tolist():
        prompt, greedy = golden[f"prompt_{i}"].tolist(), golden[f"greedy_{i}"].tolist()
        logits, _ = runner.dense_forward(prompt + greedy[:-1])
        assert_close(logits[len(prompt) - 1 :], golden[f"decode_logits_{i}"], f"decode_logits_{i}")


@pytest.mark.parametrize("checkpoint", [p for p in CHECKPOINTS if "mrope_tokens" in load_golden(p)], ids=name_of)
def test_three_position_streams_give_the_golden_logits(checkpoint: Path) -> None:
    golden, runner = load_golden(checkpoint), make_runner(checkpoint)
    positions = golden["mrope_position_ids"].tolist()
    logits, _ = runner.dense_forward(golden["mrope_tokens"].tolist(), positions=positions)
    assert_close(logits, golden["mrope_all_logits"], "mrope_all_logits")


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100, 256])
@each_checkpoint
def test_greedy_tokens_are_the_golden_ones_whatever_the_chunks(checkpoint: Path, chunk_size: int) -> None:
    golden, driver = load_golden(checkpoint), StepDriver(make_runner(checkpoint))
    for i, prompt in enumerate(prompts_of(golden)):
        row = driver.add(str(i), prompt)
        driver.prefill(str(i), chunk_size)
        driver.decode(31)
        assert_greedy(row.output, golden, i)
        driver.finish(str(i))


@each_checkpoint
def test_all_prompts_in_one_batch_give_the_golden_tokens(checkpoint: Path) -> None:
    golden, driver = load_golden(checkpoint), StepDriver(make_runner(checkpoint))
    prompts = prompts_of(golden)
    rows = [driver.add(str(i), prompt) for i, prompt in enumerate(prompts)]
    driver.step({str(i): len(prompt) for i, prompt in enumerate(prompts)})
    driver.decode(31)
    for i, row in enumerate(rows):
        assert_greedy(row.output, golden, i)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 256])
@each_hybrid
def test_states_are_the_golden_ones_after_the_prompt_and_after_decode(checkpoint: Path, chunk_size: int) -> None:
    golden, driver = load_golden(checkpoint), StepDriver(make_runner(checkpoint))
    layer = int(golden["gdn_layer"])

    def check(i: int, kind: str) -> None:
        conv, temporal = driver.states(str(i), layer)
        expected_conv, expected = golden[f"conv_state{kind}_{i}"], golden[f"rec_state{kind}_{i}"]
        errors = (
            np.abs(conv - expected_conv[:, -conv.shape[1] :]).max(),
            np.abs(temporal - expected.transpose(0, 2, 1)).max(),
        )
        print(f"prompt {i}{kind}: conv {errors[0]:.2e}, recurrent {errors[1]:.2e}")
        assert max(errors) <= MAX_STATE_ERROR

    with_states = [i for i in range(int(golden["num_prompts"])) if f"rec_state_{i}" in golden]
    assert int(golden["full_prompt"]) in with_states
    for i in with_states:
        row = driver.add(str(i), golden[f"prompt_{i}"].tolist())
        driver.prefill(str(i), chunk_size)
        check(i, "")
        driver.decode(31)
        assert row.output == golden[f"greedy_{i}"].tolist()
        check(i, "_dec")
        driver.finish(str(i))


@pytest.fixture(scope="module")
def default_golden(default_model: Path) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads((default_model / "golden.json").read_text())["prompts"]
    assert len(prompts) == 8
    return prompts


def test_the_bundled_model_gives_its_golden_logits_and_tokens(
    default_model: Path, default_golden: list[dict[str, Any]]
) -> None:
    runner = make_runner(default_model)
    for prompt in default_golden:
        ids, greedy = prompt["ids"], prompt["greedy"]
        logits, _ = runner.dense_forward(ids + greedy[:-1])
        np.testing.assert_allclose(logits[len(ids) - 1, prompt["top_ids"]], prompt["top_logits"], atol=MAX_LOGIT_ERROR)
        rows = logits[len(ids) - 1 :]
        chosen = rows[np.arange(len(greedy)), greedy]
        assert (rows.max(axis=1) - chosen <= MIN_MARGIN).all()


def test_the_bundled_model_runs_its_golden_prompts_in_one_batch(
    default_model: Path, default_golden: list[dict[str, Any]]
) -> None:
    runner = make_runner(default_model)
    driver = StepDriver(runner)
    rows = [driver.add(str(i), prompt["ids"]) for i, prompt in enumerate(default_golden)]
    driver.step({str(i): len(row.prompt) for i, row in enumerate(rows)})
    driver.decode(47)
    for row, prompt in zip(rows, default_golden, strict=True):
        greedy = prompt["greedy"]
        differing = [step for step in range(48) if row.output[step] != greedy[step]]
        if differing:
            step = differing[0]
            logits, _ = runner.dense_forward(row.prompt + greedy[:step])
            assert logits[-1].max() - logits[-1, greedy[step]] <= MIN_MARGIN
