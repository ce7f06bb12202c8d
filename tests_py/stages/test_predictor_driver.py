from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deltaic.stages import PredictorInputs, PredictorSampling, Traits
from deltaic.stages.predictor import captures_predictor
from scripted_stage import HIDDEN, BatchedStage, ScalarTalkerStage, TalkerStage, decode, ids, make_runner, prepare, row

PER_ROW = Traits(accepts_generators_per_row=True)


def step(runner: Any, *req_ids: str, first_id: int = 10) -> Any:
    rows = [decode(req_id, i) for i, req_id in enumerate(req_ids)]
    return prepare(runner, rows, ids(*range(first_id, first_id + len(rows))))


def codes_of(runner: Any, req_id: str) -> list[list[int]]:
    return [list(map(int, frame)) for frame in runner.buffers.get(req_id)["codes"]["audio"]]


def no_wrapper() -> Any:
    raise AssertionError("the graph wrapper was looked up")


def test_b1_a_model_without_a_predictor_has_no_driver() -> None:
    assert make_runner(BatchedStage()).predictor is None


@pytest.mark.parametrize(
    ("declared", "has_talker", "captured"),
    [
        (None, True, True),
        (True, True, True),
        (False, True, False),
        (None, False, False),
        (True, False, False),
        (False, False, False),
    ],
)
def test_b1_what_a_model_declares_decides_about_graphs(declared: bool | None, has_talker: bool, captured: bool) -> None:
    traits = Traits(has_talker=has_talker, predictor_graph_safe=declared)
    assert captures_predictor(traits, has_predictor=True, full_graphs=True) is captured
    assert not captures_predictor(traits, has_predictor=True, full_graphs=False)
    assert not captures_predictor(traits, has_predictor=False, full_graphs=True)
    if not captured:
        assert make_runner(TalkerStage(traits), graph_wrapper=no_wrapper).predictor is not None


def test_b1_a_captured_predictor_runs_through_the_wrapper() -> None:
    calls = []

    def wrap(predict: Any) -> Any:
        def replay(inputs: PredictorInputs) -> Any:
            calls.append(len(inputs.ids))
            return predict(inputs)

        return replay

    runner = make_runner(TalkerStage(Traits(has_talker=True)), "a", graph_wrapper=lambda: wrap)
    step(runner, "a")
    assert calls == [1]


def test_b1_staging_holds_the_most_requests_and_the_largest_capture() -> None:
    predictor = make_runner(TalkerStage(), capture_sizes=(1, 32)).predictor
    assert predictor.embeds.shape == predictor.last_hidden.shape == predictor.text_step.shape == (32, HIDDEN)
    assert predictor.ids.shape == (32,)
    assert make_runner(TalkerStage(Traits(predictor_hidden_size=6))).predictor.embeds.shape == (8, 6)


def test_b2_results_land_at_the_requests_own_token_and_key() -> None:
    runner = make_runner(TalkerStage(Traits(codes_key=("codes", "audio"))), "a", "p", "b")
    rows = [decode("a", 0), row("p", 1, 3, prompt=9, computed=0), decode("b", 4)]
    result = prepare(runner, rows, ids(10, 1, 2, 3, 20))
    assert result.embeds[:, 0].tolist() == [10.5, 1, 2, 3, 20.5]
    assert codes_of(runner, "a") == [[110] * 3]
    assert codes_of(runner, "b") == [[120] * 3]
    assert "codes" not in runner.buffers.get("p")


def test_b2_codes_merge_with_what_the_section_holds() -> None:
    runner = make_runner(TalkerStage(Traits(codes_key=("sound", "frames"))), "a")
    runner.buffers.merge("a", {"sound": {"rate": 24000}})
    step(runner, "a")
    assert runner.buffers.get("a")["sound"]["rate"] == 24000
    assert runner.buffers.get("a")["sound"]["frames"].shape == (1, 3)


@pytest.mark.parametrize("key", ["codes", ("codes",), ("codes", 3), ("codes", ""), ["codes", "audio"]])
def test_b2_a_malformed_key_is_a_type_error(key: Any) -> None:
    with pytest.raises(TypeError, match="codes_key"):
        Traits(codes_key=key)


def test_b3_an_empty_batch_calls_and_changes_nothing() -> None:
    model = TalkerStage()
    runner = make_runner(model, "p")
    result = prepare(runner, [row("p", 0, 2, prompt=4, computed=0)], ids(1, 2))
    assert model.batches == []
    assert result.embeds[:, 0].tolist() == [1, 2]


def test_b4_a_deployments_seed_seeds_nothing_and_a_requests_own_does() -> None:
    sampling = PredictorSampling.from_deployment({"seed": 42, "temperature": 0.7})
    model = TalkerStage()
    runner = make_runner(model, "a", sampling=sampling)
    step(runner, "a")
    assert model.predictions[0].generator is None
    assert model.predictions[0].generators is None
    model = TalkerStage()
    runner = make_runner(model, "a", seeds={"a": 42}, sampling=sampling)
    step(runner, "a")
    assert model.predictions[0].generator.seed == 42


def test_b5_sampling_passes_verbatim_and_what_is_missing_is_none() -> None:
    sampling = PredictorSampling.from_deployment({"do_sample": True, "temperature": 0.9, "top_k": 50})
    model = TalkerStage()
    runner = make_runner(model, "a", seeds={"a": 1}, sampling=sampling)
    step(runner, "a")
    (seen,) = model.predictions
    assert (seen.do_sample, seen.temperature, seen.top_k, seen.top_p) == (True, 0.9, 50, None)
    assert seen.generator is not None
    assert seen.generators is None


def test_b6_a_model_without_generators_a_row_is_called_once_a_row() -> None:
    model = TalkerStage()
    runner = make_runner(model, "a", "b", "c", seeds={"b": 7})
    step(runner, "a", "b", "c")
    assert model.batches == [[110], [111], [112]]
    assert [p.generator and p.generator.seed for p in model.predictions] == [None, 7, None]
    alone = make_runner(TalkerStage(), "b", seeds={"b": 7})
    step(alone, "b", first_id=11)
    assert codes_of(alone, "b") == codes_of(runner, "b")


def test_b6_staging_is_restored_even_after_an_error() -> None:
    class Failing(TalkerStage):
        def predict_codes(self, inputs: PredictorInputs) -> Any:
            if inputs.ids[0] == 111:
                raise RuntimeError("lost")
            return super().predict_codes(inputs)

    runner = make_runner(Failing(), "a", "b", seeds={"a": 1, "b": 2})
    with pytest.raises(RuntimeError, match="lost"):
        step(runner, "a", "b")
    predictor = runner.predictor
    assert predictor.ids[:2].tolist() == [110, 111]
    for staged, factor in ((predictor.embeds, 1), (predictor.last_hidden, 2), (predictor.text_step, 3)):
        assert staged[:2, 0].tolist() == [10 * factor, 11 * factor]
    assert "codes" not in runner.buffers.get("a")


def test_b7_a_model_with_generators_a_row_is_called_once() -> None:
    model = TalkerStage(PER_ROW)
    runner = make_runner(model, "a", "b", "c", seeds={"b": 7})
    step(runner, "a", "b", "c")
    (seen,) = model.predictions
    assert seen.generator is None
    assert [stream and stream.seed for stream in seen.generators] == [None, 7, None]


def test_b8_a_stream_persists_survives_a_batch_of_one_and_is_evicted() -> None:
    model = TalkerStage(PER_ROW)
    runner = make_runner(model, "a", "b", seeds={"a": 7, "b": 8})
    step(runner, "a", "b")
    first = model.predictions[0].generators[0]
    codes = codes_of(runner, "a")
    step(runner, "a")
    assert model.predictions[1].generator is first
    assert codes_of(runner, "a") != codes
    runner.finish_request("a")
    assert "a" not in runner.predictor.streams
    assert "b" in runner.predictor.streams
    runner.add_request("a", seed=7)
    step(runner, "a")
    assert model.predictions[2].generator is not first
    assert codes_of(runner, "a") == codes


def test_the_predictor_needs_its_inputs() -> None:
    class Silent(ScalarTalkerStage):
        def preprocess(self, row: Any, ids: Any, payload: Any) -> Any:
            return replace(super().preprocess(row, ids, payload), last_hidden=None)

    runner = make_runner(Silent(), "a")
    message = "decode preprocessing of request 'a' returned no last hidden state"
    assert message in step(runner, "a").failures["a"]
    assert np.all(runner.embeds == 0)

    class SilentBatch(TalkerStage):
        def preprocess_decodes(self, rows: Any, ids: Any, payloads: Any) -> Any:
            return replace(super().preprocess_decodes(rows, ids, payloads), text_step=None)

    with pytest.raises(ValueError, match=message):
        step(make_runner(SilentBatch(), "a", "b"), "a", "b")
