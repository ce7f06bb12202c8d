"""A model written in Python as a stage of the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import SamplingParams, _core
from deltaic.engine import Engine
from deltaic.stages import Chunked, Edge, EndStatus, Full, Preprocessed, StageModel, StageOutput, StageRunner, Traits
from scripted_stage import View, row
from test_step_hook import PROMPTS, generate, make_engine

NUM_TOKENS = 4
HIDDEN = ("hidden", "text")


class TableStage(StageModel):
    """Embeds ids by a table, and hands its hidden states over."""

    def __init__(self, table: Any) -> None:
        super().__init__(Traits(has_multimodal_outputs=True, wants_step_metadata=True))
        self.table = table
        self.broken: set[str] = set()
        self.broken_after: set[str] = set()
        self.batches: list[tuple[str, ...]] = []
        self.steps: list[tuple[str, ...]] = []
        self.posts: list[str] = []

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
        if row.req_id in self.broken_after:
            raise ValueError("no voice")
        assert payload["meta"]["computed"] == row.seq_len
        self.posts.append(row.req_id)
        return StageOutput(hidden, {"hidden": {"text": hidden}})


@pytest.fixture
def engine(default_model: Path) -> Engine:
    return make_engine(default_model, async_scheduling=False)


@pytest.fixture
def stage(engine: Engine) -> TableStage:
    size = engine.vocab_size
    parts = [engine.runner.dense_forward(list(range(i, min(i + 512, size))), True)[1][0] for i in range(0, size, 512)]
    return TableStage(np.concatenate(parts))


def full_edge() -> Any:
    return Edge("thinker", "talker", (HIDDEN,), Full()).make()


def make_runner(engine: Engine, stage: StageModel, **options: Any) -> StageRunner:
    """Run the engine's decoder as a Python stage that hands its hidden states over a full edge."""
    table: Any = stage.table  # type: ignore[attr-defined]
    target = options.pop("target", None) or full_edge()
    runner = StageRunner(
        stage, hidden_size=table.shape[1], max_num_tokens=256, max_num_reqs=4, target=target, **options
    )
    for req_id, prompt in PROMPTS.items():
        target.open(req_id)
        runner.add_request(req_id, token_ids=np.asarray(prompt, np.int32))
    engine.runner.set_step_hook(runner)
    return runner


def handed_over(runner: StageRunner) -> dict[str, Any]:
    """End all requests; return their payloads."""
    for req_id in PROMPTS:
        runner.finish_request(req_id)
    assert runner.target is not None
    return {one.id: one.payload for one in runner.target.take() if one.status is None}


def test_a_python_stage_gives_what_the_native_model_gives(engine: Engine, stage: TableStage) -> None:
    expected = generate(engine, NUM_TOKENS)
    runner = make_runner(engine, stage)
    assert generate(engine, NUM_TOKENS) == expected
    assert set(stage.batches) == {("a", "b")}  # neighbouring decodes in one call
    assert set(stage.steps) == {("a", "b")}
    payloads = handed_over(runner)
    for req_id, prompt in PROMPTS.items():
        _, hidden = engine.runner.dense_forward(prompt + expected[req_id][:-1], with_hidden=True)
        assert np.array_equal(payloads[req_id]["hidden"]["text"], hidden[-1])
        assert req_id not in runner.buffers


def test_early_payloads_reach_a_request_when_it_begins(engine: Engine, stage: TableStage) -> None:
    key = ("voice", "name")
    source = Edge("other", "thinker", (key,), Full()).make()
    for req_id, name in (("a", "ann"), ("later", "bob")):
        source.set(req_id, key, name)
        source.end(req_id)
    runner = make_runner(engine, stage, source=source)
    generate(engine, NUM_TOKENS)
    assert runner.buffers.get("a")["voice"] == {"name": "ann"}  # type: ignore[index]
    assert "later" not in runner.buffers
    assert source.num_kept == 3  # of a, b and later


def generate_with_failures(engine: Engine, runner: StageRunner) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Generate as a caller does who aborts what a stage fails on."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for req_id, prompt in PROMPTS.items():
        engine.add_request(req_id, prompt, params)
    tokens: dict[str, list[int]] = {req_id: [] for req_id in PROMPTS}
    failures: dict[str, str] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.req_id] += output.new_token_ids
        new = runner.take_failures()
        engine.abort(new)
        failures |= new
    return tokens, failures


@pytest.mark.parametrize("where", ["preprocess", "postprocess", "the stage before"])
def test_row_31_a_request_that_its_hook_fails_on_is_named_and_the_others_finish(
    engine: Engine, stage: TableStage, where: str
) -> None:
    expected = generate(engine, NUM_TOKENS)
    source = Edge("other", "thinker", (HIDDEN,), Full()).make()
    runner = make_runner(engine, stage, source=source)
    message = "ValueError: no voice"
    if where == "preprocess":
        stage.broken = {"b"}
    elif where == "postprocess":
        stage.broken_after = {"b"}
    else:
        source.end("b", EndStatus.error, message)
    tokens, failures = generate_with_failures(engine, runner)
    assert failures == {"b": message}
    assert tokens["a"] == expected["a"]
    assert len(tokens["b"]) < NUM_TOKENS
    runner.finish_request("b", error=failures["b"])
    (end,) = [one for one in runner.target.take() if one.id == "b"][-1:]  # type: ignore[union-attr]
    assert (end.status, end.error) == (EndStatus.error, message)


class LateStage(TableStage):
    """Hands over once, at the end of a request."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.traits = replace(self.traits, payload_at_request_end=True)
        self.made: list[str] = []

    def make_payload(self, req_id: str, payload: dict[str, Any]) -> Any:
        self.made.append(req_id)
        return StageOutput(None, {"hidden": {"text": np.full((1, 2), payload["meta"]["computed"])}})


def test_row_31_a_request_whose_hook_returns_what_is_malformed_ends_alone(engine: Engine, stage: TableStage) -> None:
    class Narrow(TableStage):
        def preprocess(self, row: _core.StepRow, ids: Any, payload: dict[str, Any]) -> Preprocessed:
            result = super().preprocess(row, ids, payload)
            return replace(result, embeds=result.embeds[:, :3]) if row.req_id == "b" else result

    expected = generate(engine, NUM_TOKENS)
    tokens, failures = generate_with_failures(engine, make_runner(engine, Narrow(stage.table)))
    assert list(failures) == ["b"]
    assert "decode preprocessing returned embeddings of shape" in failures["b"]
    assert tokens["a"] == expected["a"]


def test_a_request_ends_once_and_with_an_error_where_its_payload_cannot_be_made() -> None:
    class Failing(LateStage):
        def make_payload(self, req_id: str, payload: dict[str, Any]) -> Any:
            raise ValueError("no voice")

    target = full_edge()
    runner = StageRunner(Failing(np.zeros((1, 4))), hidden_size=4, max_num_tokens=4, max_num_reqs=1, target=target)
    target.open("a")
    runner.add_request("a")
    runner.finish_request("a")
    (end,) = target.take()
    assert (end.status, end.error) == (EndStatus.error, "ValueError: no voice")
    assert len(runner.buffers) == 0
    target.forget("a")
    for req_id in ("a", "nobody"):  # their end would be that of the next request of this id
        runner.finish_request(req_id)
    assert target.num_kept == 0


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_e5_a_payload_is_deferred_only_by_opt_in_without_a_prefix_cache_and_where_it_gathers(
    engine: Engine, stage: TableStage, at_end: bool, prefix_cache: bool, chunked: bool
) -> None:
    model = LateStage(stage.table) if at_end else stage
    target = Edge("thinker", "talker", (HIDDEN,), Chunked(1, 1) if chunked else Full()).make()
    runner = make_runner(engine, model, target=target, has_prefix_cache=prefix_cache)
    assert runner.defers_payload is (at_end and not prefix_cache and not chunked)


def test_e6_a_deferred_payload_is_made_once_at_the_end_and_never_in_a_step(engine: Engine, stage: TableStage) -> None:
    model = LateStage(stage.table)
    told: list[Any] = []
    runner = make_runner(engine, model, on_payload=lambda req_id, payload: told.append((req_id, payload)))
    generate(engine, NUM_TOKENS)
    assert (model.posts, model.made, told) == ([], [], [])
    payloads = handed_over(runner)
    assert model.made == ["a", "b"]
    assert [req_id for req_id, _ in told] == ["a", "b"]
    for req_id, prompt in PROMPTS.items():
        assert payloads[req_id]["hidden"]["text"].tolist() == [[len(prompt) + NUM_TOKENS - 1] * 2]


def test_e6_a_step_makes_its_payload_once_for_the_next_stage_and_the_client(engine: Engine, stage: TableStage) -> None:
    told: list[Any] = []
    runner = make_runner(engine, stage, on_payload=lambda req_id, payload: told.append((req_id, payload)))
    generate(engine, NUM_TOKENS)
    assert [req_id for req_id, _ in told] == stage.posts == ["a", "b"] * NUM_TOKENS
    payloads = handed_over(runner)
    for req_id, prompt in PROMPTS.items():
        assert len(payloads[req_id]["hidden"]["text"]) == len(prompt) + NUM_TOKENS - 1


def test_e4_a_stage_that_nobody_listens_to_makes_no_payload(engine: Engine, stage: TableStage) -> None:
    runner = StageRunner(stage, hidden_size=stage.table.shape[1], max_num_tokens=256, max_num_reqs=4)
    for req_id in PROMPTS:
        runner.add_request(req_id)
    engine.runner.set_step_hook(runner)
    generate(engine, NUM_TOKENS)
    assert stage.posts == []


def test_e4_an_edge_behind_a_model_that_makes_no_payload_is_refused() -> None:
    class Mute(StageModel):
        """Has no postprocess."""

    class MuteAtEnd(TableStage):
        """Promises a payload at the end, and has no make_payload."""

    with pytest.raises(ValueError, match="Mute has no postprocess, and an edge waits"):
        StageRunner(Mute(), hidden_size=4, max_num_tokens=4, max_num_reqs=1, target=full_edge())
    late = MuteAtEnd(np.zeros((1, 4)))
    late.traits = replace(late.traits, payload_at_request_end=True)
    with pytest.raises(ValueError, match="MuteAtEnd has no make_payload, and an edge waits"):
        StageRunner(late, hidden_size=4, max_num_tokens=4, max_num_reqs=1, target=full_edge())


class Keeping(TableStage):
    """Keeps the memory that its hook is shown."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.kept: list[tuple[Any, Any]] = []

    def postprocess(self, row: _core.StepRow, hidden: Any, payload: dict[str, Any]) -> Any:
        if self.kept:
            before, copy = self.kept[-1]
            assert np.array_equal(before, copy)  # the step before it, although the runner's memory is written again
        self.kept.append((hidden, hidden.copy()))
        return super().postprocess(row, hidden, payload)


def test_hidden_states_that_a_hook_keeps_survive_the_next_step(engine: Engine, stage: TableStage) -> None:
    model = Keeping(stage.table)
    runner = make_runner(engine, model)
    _, failures = generate_with_failures(engine, runner)
    assert failures == {}
    assert len(model.kept) == 2 * NUM_TOKENS
    assert not np.array_equal(*model.kept[0])  # two steps later it is another step's


class PlacedStage(TableStage):
    """Says where its tokens are."""

    def positions(self, input_tokens: Any, stride: int = 1) -> Any:
        self.asked = [*getattr(self, "asked", []), (len(input_tokens), stride)]
        return np.arange(len(input_tokens)) * stride


def test_g1_a_models_positions_reach_the_forward_with_the_info_that_it_names(engine: Engine, stage: TableStage) -> None:
    expected = generate(engine, NUM_TOKENS)

    def hidden(model: TableStage, stride: int) -> list[Any]:
        runner = make_runner(engine, model)
        for req_id, prompt in PROMPTS.items():
            runner.finish_request(req_id)
            assert runner.target is not None
            runner.target.forget(req_id)
            runner.add_request(req_id, info={"stride": stride, "grid": 3}, token_ids=np.asarray(prompt, np.int32))
            runner.target.open(req_id)
        generate(engine, NUM_TOKENS)
        return [payload["hidden"]["text"] for payload in handed_over(runner).values()]

    plain, strided = PlacedStage(stage.table), PlacedStage(stage.table)
    for (req_id, prompt), rows, others in zip(PROMPTS.items(), hidden(plain, 1), hidden(strided, 9), strict=True):
        _, wanted = engine.runner.dense_forward(prompt + expected[req_id][:-1], with_hidden=True)
        assert np.array_equal(rows, wanted[-1])
        assert not np.allclose(others, wanted[-1])
    assert strided.asked[-2:] == [(len(prompt), 9) for prompt in PROMPTS.values()]


def test_positions_are_made_anew_when_a_prompt_grows() -> None:
    table = np.zeros((64, 4), np.float32)
    model = PlacedStage(table)
    runner = StageRunner(model, hidden_size=4, max_num_tokens=8, max_num_reqs=1)
    runner.add_request("a", info={"stride": 3}, token_ids=np.arange(2, dtype=np.int32))

    def positions(prompt: int, computed: int, num: int) -> list[int]:
        one = row("a", 0, num, prompt=prompt, computed=computed)
        out = np.arange(computed, computed + num)
        runner.begin_step(View([one], np.zeros(num, np.int32), out))  # type: ignore[arg-type]
        return list(map(int, out))

    assert positions(2, 0, 2) == [0, 3]
    assert positions(2, 2, 2) == [4, 5]
    runner.extend_prompt("a", np.arange(4, dtype=np.int32))
    assert positions(4, 1, 4) == [3, 6, 9, 10]
    model.positions = lambda tokens: [1]  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match=r"positions returned \(1,\), wanted \(4,\)"):
        runner.extend_prompt("a", np.arange(4, dtype=np.int32))
