"""A model written in Python as a stage of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import SamplingParams, _core
from deltaic.engine import Engine
from deltaic.stages import Preprocessed, StageHook, StageModel, StageOutput, StageRunner, Traits
from test_step_hook import PROMPTS, generate, make_engine

NUM_TOKENS = 4


class TableStage(StageModel):
    """Embeds ids by a table, and hands its hidden states over."""

    def __init__(self, table: Any) -> None:
        super().__init__(Traits(has_multimodal_outputs=True, wants_step_metadata=True))
        self.table = table
        self.broken: set[str] = set()
        self.batches: list[tuple[str, ...]] = []
        self.steps: list[tuple[str, ...]] = []

    def preprocess(self, row: _core.StepRow, ids: Any, payload: dict[str, Any]) -> Preprocessed:
        if row.req_id in self.broken:
            raise ValueError("no voice")
        return Preprocessed(ids, self.table[ids], [{"meta": {"computed": row.seq_len}}])

    def preprocess_decodes(self, rows: Any, ids: Any, payloads: Any) -> Preprocessed:
        self.batches.append(tuple(row.req_id for row in rows))
        return Preprocessed(ids, self.table[ids], [{"meta": {"computed": row.seq_len}} for row in rows])

    def begin_step(self, step: Any) -> None:
        self.steps.append(step.req_ids)

    def postprocess(self, row: _core.StepRow, hidden: Any, payload: dict[str, Any]) -> Any:
        assert payload["meta"]["computed"] == row.seq_len
        return StageOutput(hidden, {"hidden": hidden})


@pytest.fixture
def engine(default_model: Path) -> Engine:
    return make_engine(default_model, async_scheduling=False)


@pytest.fixture
def stage(engine: Engine) -> TableStage:
    size = engine.vocab_size
    parts = [engine.runner.dense_forward(list(range(i, min(i + 512, size))), True)[1][0] for i in range(0, size, 512)]
    return TableStage(np.concatenate(parts))


def make_hook(engine: Engine, stage: TableStage) -> StageHook:
    runner = StageRunner(stage, hidden_size=stage.table.shape[1], max_num_tokens=256, max_num_reqs=4)
    hook = StageHook(runner, gathers=True)
    for req_id in PROMPTS:
        runner.add_request(req_id)
    engine.runner.set_step_hook(hook)
    return hook


def test_a_python_stage_gives_what_the_native_model_gives(engine: Engine, stage: TableStage) -> None:
    expected = generate(engine, NUM_TOKENS)
    hook = make_hook(engine, stage)
    assert generate(engine, NUM_TOKENS) == expected
    assert set(stage.batches) == {("a", "b")}  # neighbouring decodes in one call
    assert set(stage.steps) == {("a", "b")}
    for req_id, prompt in PROMPTS.items():
        payload = hook.finish_request(req_id)
        _, hidden = engine.runner.dense_forward(prompt + expected[req_id][:-1], with_hidden=True)
        assert np.array_equal(payload["hidden"], hidden[-1])
        assert req_id not in hook.runner.buffers


def test_early_payloads_reach_a_request_when_it_is_scheduled(engine: Engine, stage: TableStage) -> None:
    hook = make_hook(engine, stage)
    hook.runner.inbox.put("a", {"voice": {"name": "ann"}})
    hook.runner.inbox.put("later", {"voice": {"name": "bob"}})
    generate(engine, NUM_TOKENS)
    assert hook.runner.buffers.get("a")["voice"] == {"name": "ann"}
    assert "later" in hook.runner.inbox


def test_row_31_a_request_that_its_hook_fails_on_is_named_and_the_others_finish(
    engine: Engine, stage: TableStage
) -> None:
    expected = generate(engine, NUM_TOKENS)
    hook = make_hook(engine, stage)
    stage.broken = {"b"}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for req_id, prompt in PROMPTS.items():
        engine.add_request(req_id, prompt, params)
    outputs = []
    failures: dict[str, str] = {}
    while engine.has_unfinished_requests():
        outputs += engine.step()
        new = hook.take_failures()
        engine.abort(new)
        failures |= new
    assert failures == {"b": "ValueError: no voice"}
    tokens = [token for output in outputs if output.req_id == "a" for token in output.new_token_ids]
    assert tokens == expected["a"]
    assert [output.finish_reason for output in outputs if output.req_id == "b"][-1] == "abort"
