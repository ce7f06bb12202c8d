"""The draft module against goldens that a plain torch program computed in float32, alone and in the runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import _core
from device import CORE_DEVICE, DEVICE
from test_parity import CHECKPOINTS, MAX_LOGIT_ERROR, assert_close, load_golden, name_of, prompts_of

WITH_MODULE = [path for path in CHECKPOINTS if "mtp_logits_0" in load_golden(path)]
MAX_MODEL_LEN, BLOCK_SIZE = 256, 16

each_checkpoint = pytest.mark.parametrize("checkpoint", WITH_MODULE, ids=name_of)


def make_runner(checkpoint: Path, num_drafts: int, max_num_reqs: int = 8) -> Any:
    plan = _core.MemoryPlanOptions(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_reqs,
        block_size=BLOCK_SIZE,
        num_speculative_tokens=num_drafts,
        with_draft_module=True,
    )
    kv_cache = _core.make_kv_cache_groups(_core.load_model_config(checkpoint), plan)
    kv_cache.num_blocks = 1 + max_num_reqs * MAX_MODEL_LEN // BLOCK_SIZE
    options = _core.RunnerOptions(
        device=CORE_DEVICE,
        max_num_reqs=max_num_reqs,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=max_num_reqs * MAX_MODEL_LEN,
        num_speculative_tokens=num_drafts,
        num_threads=2,
        poison_caches=True,
    )
    return _core.ModelRunner(checkpoint, kv_cache, options)


def test_all_checkpoints_with_the_module_are_there() -> None:
    assert [name_of(path) for path in WITH_MODULE] == [
        "qwen3_5_moe_cond_h128-bf16_fused",
        "qwen3_5_mtp-bf16",
        "qwen3_5_mtp-fp32",
    ]
    for path in CHECKPOINTS:
        assert _core.count_draft_layers(path) == (path in WITH_MODULE)


@each_checkpoint
def test_a_dense_chain_gives_the_golden_logits_and_drafts(checkpoint: Path) -> None:
    golden, runner = load_golden(checkpoint), make_runner(checkpoint, 3)
    for i, prompt in enumerate(prompts_of(golden)):
        tokens, logits, hidden = runner.dense_draft(prompt, int(golden[f"greedy_{i}"][0]), 4)
        assert tokens == golden[f"mtp_draft_{i}"].tolist()
        assert_close(logits, golden[f"mtp_logits_{i}"], f"mtp_logits_{i}")
        if f"mtp_hidden_{i}" in golden:
            error = np.abs(hidden - golden[f"mtp_hidden_{i}"]).max()
            print(f"mtp_hidden_{i}: max abs {error:.2e}")
            assert error <= MAX_LOGIT_ERROR


def new_request(req_id: str, prompt: list[int], blocks: list[int]) -> _core.NewRequestData:
    return _core.NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        sampling_params=_core.SamplingParams(temperature=0.0),
        block_ids=[blocks, [], []],
    )


@pytest.mark.parametrize("chunk_size", [7, 64, 256])
@pytest.mark.parametrize("together", [False, True])
@each_checkpoint
def test_the_runner_drafts_the_golden_tokens_behind_each_prompt(
    checkpoint: Path, together: bool, chunk_size: int
) -> None:
    golden, num_drafts = load_golden(checkpoint), 4
    prompts = prompts_of(golden)
    for group in [range(len(prompts))] if together else [[i] for i in range(len(prompts))]:
        runner = make_runner(checkpoint, num_drafts)
        drafts: dict[str, list[int]] = {}
        computed = {str(i): 0 for i in group}
        while computed:
            cached = [req_id for req_id in computed if computed[req_id] > 0]
            counts = {req_id: min(chunk_size, len(prompts[int(req_id)]) - computed[req_id]) for req_id in computed}
            step = _core.SchedulerOutput(
                scheduled_new_reqs=[
                    new_request(req_id, prompts[int(req_id)], list(range(1 + 16 * int(req_id), 17 + 16 * int(req_id))))
                    for req_id in computed
                    if computed[req_id] == 0
                ],
                scheduled_cached_reqs=_core.CachedRequestData(
                    req_ids=cached,
                    num_computed_tokens=[computed[req_id] for req_id in cached],
                    new_block_ids=[None] * len(cached),
                ),
                num_scheduled_tokens=counts,
                total_num_scheduled_tokens=sum(counts.values()),
            )
            runner.execute_model(step)
            output = runner.sample_tokens()
            for req_id, count in counts.items():
                computed[req_id] += count
                row = output.req_id_to_index[req_id]
                if computed[req_id] < len(prompts[int(req_id)]):
                    assert output.sampled_token_ids[row] == output.draft_token_ids[row] == []
                    continue
                assert output.sampled_token_ids[row] == [golden[f"greedy_{req_id}"][0]]
                drafts[req_id] = output.draft_token_ids[row]
                del computed[req_id]
        for req_id, tokens in drafts.items():
            assert tokens == golden[f"mtp_draft_{req_id}"].tolist()


@each_checkpoint
def test_drafts_along_a_decode_are_those_of_a_dense_chain(checkpoint: Path) -> None:
    """Rejected positions leave nothing behind: their slots are rewritten with what the model really computed."""
    golden, num_drafts = load_golden(checkpoint), 3
    runner = make_runner(checkpoint, num_drafts)
    prompt = golden["prompt_3"].tolist()
    counts = {"a": len(prompt)}
    step = _core.SchedulerOutput(
        scheduled_new_reqs=[new_request("a", prompt, list(range(1, 17)))],
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=len(prompt),
    )
    tokens = list(prompt)
    accepted = set()
    for number in range(20):
        runner.execute_model(step)
        output = runner.sample_tokens()
        tokens += output.sampled_token_ids[0]
        accepted.add(len(output.sampled_token_ids[0]))
        expected, _, _ = runner.dense_draft(tokens[:-1], tokens[-1], num_drafts)
        assert output.draft_token_ids == [expected]
        # Some drafts as they are, some made wrong, so that every count of accepted ones comes.
        drafts = list(expected)
        if number % 2:
            greedy = golden["greedy_3"].tolist()[len(tokens) - len(prompt) :]
            drafts = [*greedy[: number // 2 % 4], 0, 0, 0][:3]
        step = _core.SchedulerOutput(
            scheduled_cached_reqs=_core.CachedRequestData(
                req_ids=["a"], num_computed_tokens=[len(tokens) - 1], new_block_ids=[None]
            ),
            num_scheduled_tokens={"a": 1 + len(drafts)},
            total_num_scheduled_tokens=1 + len(drafts),
            scheduled_spec_decode_tokens={"a": drafts},
        )
        if len(tokens) - len(prompt) > 28:
            break
    assert {1, 2, 3} <= accepted


def run_decode(runner: Any, prompt: list[int], num_drafts_of: list[int]) -> list[int]:
    """Run a prompt and decode steps without verification, each making so many drafts; check them against dense chains.

    Return how many drafts each step gave.
    """
    tokens, made = list(prompt), []
    for number, num_drafts in enumerate(num_drafts_of):
        computed = 0 if number == 0 else len(tokens) - 1
        step = _core.SchedulerOutput(
            scheduled_new_reqs=[new_request("a", prompt, list(range(1, 17)))] if number == 0 else [],
            num_scheduled_tokens={"a": len(tokens) - computed},
            total_num_scheduled_tokens=len(tokens) - computed,
            num_drafts=num_drafts,
        )
        if number > 0:
            step.scheduled_cached_reqs = _core.CachedRequestData(
                req_ids=["a"], num_computed_tokens=[computed], new_block_ids=[None]
            )
        runner.execute_model(step)
        output = runner.sample_tokens()
        tokens += output.sampled_token_ids[0]
        drafts = output.draft_token_ids[0]
        if drafts:
            assert drafts == runner.dense_draft(tokens[:-1], tokens[-1], len(drafts))[0]
        made.append(len(drafts))
    runner.execute_model(_core.SchedulerOutput(finished_req_ids=["a"]))
    return made


def test_steps_without_drafts_are_caught_up_with() -> None:
    runner, prompt = make_runner(WITH_MODULE[-1], 3), list(range(20))
    asked = [3, 0, 0, 2, 0, 3, 1, *[0] * 30, 3, 3]
    assert run_decode(runner, prompt, asked) == asked
    assert run_decode(runner, prompt, [0, 0, 3, 3]) == [0, 0, 3, 3]


def test_a_request_that_went_long_without_is_drafted_for_no_more() -> None:
    """The next owner of its blocks and row starts anew. On CUDA the module runs behind each step and misses nothing."""
    runner, prompt = make_runner(WITH_MODULE[-1], 3), list(range(20))
    asked = [3, *[0] * 70, 3, 3]
    assert run_decode(runner, prompt, asked) == ([3, *[0] * 72] if DEVICE == "cpu" else asked)
    assert run_decode(runner, prompt, [3, 3]) == [3, 3]
