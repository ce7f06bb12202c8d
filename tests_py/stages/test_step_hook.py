from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import SamplingParams, _core
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig

PROMPTS = {"a": list(range(40, 61)), "b": list(range(90, 97))}


def make_engine(model: Path, **options: Any) -> Engine:
    config = {"max_model_len": 64, "max_num_seqs": 4, "num_threads": 2, "enable_prefix_caching": False}
    return Engine.from_checkpoint(model, EngineConfig(**({"speculative_tokens": 0} | config | options)))


def generate(engine: Engine, num_tokens: int = 4) -> dict[str, list[int]]:
    for req_id, prompt in PROMPTS.items():
        engine.add_request(req_id, prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    tokens: dict[str, list[int]] = {req_id: [] for req_id in PROMPTS}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            tokens[output.req_id] += output.new_token_ids
    return tokens


class Recorder(_core.StepHook):
    """Keeps hidden states by request and position; fills the embeddings from a table where it is given one."""

    def __init__(self, layer: int = -1, table: Any = None) -> None:
        super().__init__()
        self.layer, self.table = layer, table
        self.rows: list[list[tuple[str, int, int]]] = []
        self.final: dict[tuple[str, int], Any] = {}
        self.chosen: dict[tuple[str, int], Any] = {}
        self.sampled: dict[str, list[int]] = {}

    def fills_embeddings(self) -> bool:
        return self.table is not None

    def hidden_layer(self) -> int:
        return self.layer

    def before_forward(self, step: _core.StepView) -> None:
        self.rows.append([(row.req_id, row.first_token, row.num_tokens) for row in step.rows])
        if self.table is not None:
            step.inputs_embeds[:] = self.table[step.input_ids]
        else:
            assert step.inputs_embeds is None

    def after_forward(self, step: _core.StepView) -> None:
        for row in step.rows:
            for i in range(row.num_tokens):
                key = (row.req_id, row.num_computed_tokens + i)
                self.final[key] = step.hidden[row.first_token + i].copy()
                if self.layer >= 0:
                    self.chosen[key] = step.layer_hidden[row.first_token + i].copy()

    def after_sample(self, step: _core.StepView, token_ids: list[int]) -> None:
        for row, token in zip(step.rows, token_ids, strict=True):
            if token >= 0:
                self.sampled.setdefault(row.req_id, []).append(token)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 8])
def test_a_hook_sees_every_rows_hidden_states_under_its_request(
    default_model: Path, max_num_batched_tokens: int
) -> None:
    engine = make_engine(default_model, max_num_batched_tokens=max_num_batched_tokens)
    hook = Recorder(layer=2)
    engine.runner.set_step_hook(hook)
    tokens = generate(engine)
    assert hook.sampled == tokens
    for req_id, prompt in PROMPTS.items():
        _, hidden = engine.runner.dense_forward(prompt + tokens[req_id][:-1], with_hidden=True)
        for position in range(len(prompt) + 3):
            assert np.array_equal(hook.chosen[req_id, position], hidden[2, position])
            assert np.array_equal(hook.final[req_id, position], hidden[-1, position])


def test_embeddings_of_a_hook_take_the_place_of_the_ids(default_model: Path) -> None:
    engine = make_engine(default_model)
    tokens = generate(engine)
    vocabulary = list(range(engine.vocab_size))
    table = np.concatenate(
        [
            engine.runner.dense_forward(vocabulary[i : i + 512], with_hidden=True)[1][0]
            for i in range(0, len(vocabulary), 512)
        ]
    )
    engine.runner.set_step_hook(Recorder(table=table))
    assert generate(engine) == tokens
    engine.runner.set_step_hook(Recorder(table=table[::-1].copy()))
    assert generate(engine) != tokens
    engine.runner.set_step_hook(None)
    assert generate(engine) == tokens


def test_what_a_hook_throws_fails_the_step_and_not_the_engine(default_model: Path) -> None:
    class Failing(Recorder):
        def before_forward(self, step: _core.StepView) -> None:
            raise ValueError("no embedding")

    engine = make_engine(default_model)
    engine.runner.set_step_hook(Failing())
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.finish_reason for output in outputs] == ["error"]
    assert "no embedding" in (outputs[0].error or "")
    engine.runner.set_step_hook(None)
    assert len(generate(engine)["a"]) == 4


def test_a_layer_that_the_model_does_not_have_is_refused(default_model: Path) -> None:
    engine = make_engine(default_model)
    with pytest.raises(ValueError, match="hidden_layer is 99"):
        engine.runner.set_step_hook(Recorder(layer=99))
