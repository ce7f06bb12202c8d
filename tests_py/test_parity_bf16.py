"""The engine in bfloat16 on CUDA against float32 goldens, with the error of transformers in bfloat16 as the unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import _core
from step_driver import StepDriver, make_runner
from test_parity import CHECKPOINTS, Golden, load_golden, name_of, prompts_of

pytestmark = pytest.mark.skipif(_core.num_cuda_devices() == 0, reason="no CUDA device in this build or machine")

# Those that have an error of transformers to compare with.
BF16_CHECKPOINTS = [path for path in CHECKPOINTS if path.name.startswith("bf16")]
each_checkpoint = pytest.mark.parametrize("checkpoint", BF16_CHECKPOINTS, ids=name_of)

# The limits of the parity set's README.
MAX_MEDIAN_RATIO = 2.0
MAX_DENSE_90TH_RATIO = 2.5
MAX_DENSE_RMS_RATIO = 2.0
MAX_MOE_75TH_RATIO = 3.0
MAX_MOE_OUTLIERS = 0.2  # positions beyond 10 x the median
GREEDY_MARGIN = 6.0  # a token must be the golden one where the margin is beyond so many medians


def runner_of(checkpoint: Path) -> Any:
    return make_runner(checkpoint, device=_core.Device(_core.DeviceType.cuda, 0), dtype=_core.DType.bf16)


def is_moe(golden: Golden) -> bool:
    return any(key.startswith("router_margin") for key in golden)


def position_errors(actual: np.ndarray, golden: np.ndarray) -> np.ndarray:
    """Return the largest error over the vocabulary, of every position."""
    assert actual.shape == golden.shape
    assert np.isfinite(actual).all()
    errors: np.ndarray = np.abs(actual.astype(np.float64) - golden).max(axis=-1)
    return errors


def relative_rms(actual: np.ndarray, golden: np.ndarray) -> float:
    error = actual.astype(np.float64) - golden
    return float(np.sqrt((error**2).mean() / (golden.astype(np.float64) ** 2).mean()))


def assert_as_close_as_transformers(actual: np.ndarray, golden: Golden, key: str) -> None:
    expected, other = golden[key], golden[f"hf_bf16_{key}"]
    ours, unit = position_errors(actual, expected), position_errors(other, expected)
    ratios = {p: float(np.percentile(ours, p) / np.percentile(unit, p)) for p in (50, 75, 90)}
    rms_ratio = relative_rms(actual, expected) / relative_rms(other, expected)
    print(f"{key}: error as a multiple of that of transformers: {ratios}, rms {rms_ratio:.2f}")
    assert ratios[50] <= MAX_MEDIAN_RATIO
    if is_moe(golden):
        assert ratios[75] <= MAX_MOE_75TH_RATIO
        assert (ours > 10 * np.median(ours)).mean() <= MAX_MOE_OUTLIERS
    else:
        assert ratios[90] <= MAX_DENSE_90TH_RATIO
        assert rms_ratio <= MAX_DENSE_RMS_RATIO


def test_all_checkpoints_in_bf16_are_found() -> None:
    assert len(BF16_CHECKPOINTS) == 10


@each_checkpoint
def test_logits_are_as_close_as_those_of_transformers(checkpoint: Path) -> None:
    golden, runner = load_golden(checkpoint), runner_of(checkpoint)
    prompts = prompts_of(golden)
    logits, _ = runner.dense_forward(prompts[int(golden["full_prompt"])])
    assert_as_close_as_transformers(logits, golden, "all_logits")
    for i in golden["decode_prompts"].tolist():
        logits, _ = runner.dense_forward(prompts[i] + golden[f"greedy_{i}"].tolist()[:-1])
        assert_as_close_as_transformers(logits[len(prompts[i]) - 1 :], golden, f"decode_logits_{i}")


@pytest.mark.parametrize("chunk_size", [7, 256])
@each_checkpoint
def test_greedy_tokens_are_the_golden_ones_up_to_a_small_margin(checkpoint: Path, chunk_size: int) -> None:
    golden = load_golden(checkpoint)
    error = float(np.median(position_errors(golden["hf_bf16_all_logits"], golden["all_logits"])))
    driver = StepDriver(runner_of(checkpoint))
    prompts = prompts_of(golden)
    rows = []
    for i, prompt in enumerate(prompts):
        rows.append(driver.add(str(i), prompt))
        driver.prefill(str(i), chunk_size)
    driver.decode(31)
    num_steps = 0
    for i, row in enumerate(rows):
        expected, margin = golden[f"greedy_{i}"].tolist(), golden[f"margin_{i}"]
        for step, token in enumerate(row.output):
            if margin[step] < GREEDY_MARGIN * error:
                break
            assert token == expected[step], f"prompt {i} step {step}: margin {margin[step]}, error {error}"
            num_steps += 1
    print(f"{num_steps} tokens compared, error {error:.3f}")
