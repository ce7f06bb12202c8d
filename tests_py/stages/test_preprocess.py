from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deltaic import _core
from deltaic.stages import Traits
from scripted_stage import (
    BatchedStage,
    ScalarStage,
    ScalarTalkerStage,
    TalkerStage,
    decode,
    ids,
    make_runner,
    prepare,
    row,
)


def state_of(runner: Any) -> Any:
    payloads = {req_id: dict(runner.buffers.get(req_id)) for req_id in runner.buffers}
    return runner.ids.tolist(), runner.embeds.tolist(), payloads


def test_f1_the_runners_facts_win_over_stale_ones() -> None:
    model = ScalarStage()
    runner = make_runner(model, "a")
    runner.buffers.merge("a", {"is_prefill": False, "prompt_len": 1, "request_id": "z", "num_computed_tokens": 99})
    prepare(runner, [row("a", 0, 3, prompt=5, computed=2)], ids(1, 2, 3))
    seen = model.seen[0]
    assert seen["request_id"] == "a"
    assert (seen["prompt_len"], seen["num_computed_tokens"], seen["is_prefill"]) == (5, 2, True)
    assert all(type(seen[name]) is int for name in ("prompt_len", "num_computed_tokens"))


@pytest.mark.parametrize(
    ("span", "computed", "is_prefill"), [(1, 4, True), (4, 0, True), (1, 5, False), (2, 5, False), (3, 9, False)]
)
def test_f2_the_phase_is_what_was_computed_and_never_the_span(span: int, computed: int, is_prefill: bool) -> None:
    one = row("a", 0, span, prompt=5, computed=computed)
    assert one.is_prefill is is_prefill
    plan = _core.plan_rows([one], span, has_batched_hook=True, has_predictor=True)
    is_eligible = span == 1 and not is_prefill
    assert [run.is_batched for run in plan.runs] == [is_eligible]
    assert plan.predictor_rows == ([0] if is_eligible else [])
    model = TalkerStage()
    prepare(make_runner(model, "a"), [one], ids(*range(span)))
    assert model.calls == [("batched" if is_eligible else "scalar", "a")]
    assert len(model.batches) == is_eligible


def test_f3_hooks_run_in_row_order_and_only_neighbours_share_a_call() -> None:
    model = TalkerStage()
    runner = make_runner(model, *"abcdef")
    rows = [
        decode("a", 0),
        decode("b", 1),
        row("c", 2, 2, prompt=8, computed=0),
        decode("d", 4),
        row("e", 5, 2, prompt=5, computed=5),
        decode("f", 7),
    ]
    prepare(runner, rows, ids(*range(10, 18)))
    assert model.calls == [
        ("batched", "a", "b"),
        ("scalar", "c"),
        ("batched", "d"),
        ("scalar", "e"),
        ("batched", "f"),
    ]
    assert model.batches == [[110, 111, 114, 117]]
    codes = [runner.buffers.get(r)["codes"]["audio"][0, 0] for r in "abdf"]
    assert codes == [110, 111, 114, 117]


def test_f4_a_prompts_last_token_alone_is_still_prompt() -> None:
    model = ScalarTalkerStage()
    runner = make_runner(model, "a")
    prepare(runner, [row("a", 0, 4, prompt=5, computed=0)], ids(1, 2, 3, 4))
    result = prepare(runner, [row("a", 0, 1, prompt=5, computed=4)], ids(5))
    assert result.embeds[0].tolist() == [5, 5, 5, 5]
    assert model.batches == []
    assert "codes" not in runner.buffers.get("a")
    result = prepare(runner, [row("a", 0, 1, prompt=5, computed=5)], ids(6))
    assert result.embeds[0].tolist() == [6.5] * 4
    assert runner.buffers.get("a")["codes"]["audio"].tolist() == [[6, 6, 6]]


def test_f5_results_land_in_the_persistent_buffers_without_a_predictor() -> None:
    runner = make_runner(BatchedStage(), "a", "b")
    assert runner.predictor is None
    runner.ids[:] = -7
    runner.embeds[:] = -7
    result = prepare(runner, [decode("a", 0), decode("b", 1)], ids(3, 4))
    assert np.shares_memory(result.embeds, runner.embeds)
    assert np.shares_memory(result.ids, runner.ids)
    assert result.ids.tolist() == [103, 104]
    assert result.embeds[:, 0].tolist() == [3, 4]
    assert np.all(runner.ids[2:] == -7)
    assert np.all(runner.embeds[2:] == -7)
    assert runner.buffers.get("b")["seen"] == {"id": 4}


def test_f6_a_model_that_hides_ids_is_given_them_and_returns_the_runners() -> None:
    model = BatchedStage(Traits(hides_ids=True))
    runner = make_runner(model, "a")
    result = prepare(runner, [decode("a", 0)], ids(3))
    assert runner.buffers.get("a")["seen"] == {"id": 3}
    assert np.shares_memory(result.ids, runner.ids)
    assert result.ids.tolist() == [3]


@pytest.mark.parametrize(
    "offsets",
    {"gap": (0, 2), "reversed": (1, 0), "duplicate": (0, 0), "negative": (-1, 0), "out of range": (1, 2)}.values(),
    ids=["gap", "reversed", "duplicate", "negative", "out of range"],
)
def test_f7_rows_with_gaps_or_overlaps_are_refused_before_any_hook(offsets: tuple[int, int]) -> None:
    model = BatchedStage()
    runner = make_runner(model, "a", "b")
    before = state_of(runner)
    message = "Non-MTP batched decode preprocessing requires contiguous in-bounds token offsets"
    with pytest.raises(RuntimeError, match=message):
        prepare(runner, [decode("a", offsets[0]), decode("b", offsets[1])], ids(3, 4))
    assert model.calls == []
    assert state_of(runner) == before


@pytest.mark.parametrize("what", ["ids", "embeds", "updates", "last_hidden"])
def test_f8_a_hook_that_returns_too_little_changes_nothing(what: str) -> None:
    class Short(TalkerStage):
        def preprocess_decodes(self, rows: Any, ids: Any, payloads: Any) -> Any:
            result = super().preprocess_decodes(rows, ids, payloads)
            return replace(result, **{what: getattr(result, what)[:-1]})

    model = Short()
    runner = make_runner(model, "a", "b", "p")
    before = state_of(runner)
    with pytest.raises(ValueError, match="decode preprocessing"):
        prepare(runner, [row("p", 0, 1, prompt=5, computed=0), decode("a", 1), decode("b", 2)], ids(9, 3, 4))
    assert state_of(runner) == before
    assert model.batches == []


@pytest.mark.parametrize(
    "returned",
    [{"updates": [{"x": {"y": 1}}, None]}, {"ids": np.zeros((2, 3), np.int32)}],
    ids=["an update that is no dict", "ids of two dimensions"],
)
def test_f8_a_hook_that_returns_another_kind_changes_nothing(returned: dict[str, Any]) -> None:
    class Wrong(TalkerStage):
        def preprocess_decodes(self, rows: Any, ids: Any, payloads: Any) -> Any:
            return replace(super().preprocess_decodes(rows, ids, payloads), **returned)

    runner = make_runner(Wrong(), "a", "b")
    before = state_of(runner)
    with pytest.raises(ValueError, match="decode preprocessing"):
        prepare(runner, [decode("a", 0), decode("b", 1)], ids(3, 4))
    assert state_of(runner) == before


def test_f8_a_predictor_that_returns_narrow_embeddings_changes_nothing() -> None:
    class Narrow(TalkerStage):
        def predict_codes(self, inputs: Any) -> Any:
            embeds, codes = super().predict_codes(inputs)
            return embeds[:, :-1], codes

    runner = make_runner(Narrow(), "a", "b")
    before = state_of(runner)
    with pytest.raises(ValueError, match="the code predictor returned embeddings"):
        prepare(runner, [decode("a", 0), decode("b", 1)], ids(3, 4))
    assert state_of(runner) == before


@pytest.mark.parametrize("model", [TalkerStage(), ScalarTalkerStage()], ids=["batched", "scalar"])
def test_row_31_a_malformed_request_fails_alone(model: Any) -> None:
    model.broken = {"b"}
    runner = make_runner(model, "a", "b", "c")
    result = prepare(runner, [decode("a", 0), decode("b", 1), decode("c", 2)], ids(3, 4, 5))
    assert list(result.failures) == ["b"]
    assert "no voice for b" in result.failures["b"]
    assert result.embeds[1].tolist() == [0, 0, 0, 0]
    assert len(model.batches[-1]) == 2
    assert "codes" in runner.buffers.get("a")
    assert "codes" in runner.buffers.get("c")
    assert runner.buffers.get("b") == {}


SCALAR_RESULTS: dict[str, Any] = {
    "too few ids": {"ids": np.zeros(0, np.int32)},
    "ids that are no integers": {"ids": np.asarray([1.7])},
    "narrow embeddings": {"embeds": np.zeros((1, 3))},
    "complex embeddings": {"embeds": np.zeros((1, 4), complex)},
    "no updates": {"updates": []},
    "an update that is no dict": {"updates": [None]},
    "no last hidden state": {"last_hidden": None},
    "no text step": {"text_step": None},
    "a narrow last hidden state": {"last_hidden": np.zeros((1, 3))},
    "a text step of text": {"text_step": [["x"] * 4]},
    "nothing": None,
}


@pytest.mark.parametrize("returned", SCALAR_RESULTS.values(), ids=SCALAR_RESULTS)
def test_row_31_a_row_whose_hook_returns_what_is_malformed_fails_alone(returned: dict[str, Any] | None) -> None:
    class Wrong(ScalarTalkerStage):
        def preprocess(self, row: Any, ids: Any, payload: Any) -> Any:
            result = super().preprocess(row, ids, payload)
            if row.req_id != "b":
                return result
            return None if returned is None else replace(result, **returned)

    runner = make_runner(Wrong(), "a", "b", "c")
    result = prepare(runner, [decode("a", 0), decode("b", 1), decode("c", 2)], ids(3, 4, 5))
    assert list(result.failures) == ["b"]
    assert "decode preprocessing" in result.failures["b"]
    assert result.embeds[:, 0].tolist() == [3.5, 0, 5.5]
    assert [sorted(runner.buffers.get(r)) for r in "abc"] == [["codes", "seen"], [], ["codes", "seen"]]  # type: ignore[arg-type]


def test_row_21_a_decode_span_of_several_tokens_is_conditioned_by_position() -> None:
    model = TalkerStage()
    runner = make_runner(model, "a")
    result = prepare(runner, [row("a", 0, 3, prompt=5, computed=6)], ids(3, 4, 5))
    assert model.calls == [("scalar", "a")]
    assert model.seen[0]["is_prefill"] is False
    assert model.seen[0]["num_computed_tokens"] == 6
    assert result.embeds[:, 0].tolist() == [3, 4, 5]
    assert model.batches == []


def test_an_unknown_trait_is_an_error() -> None:
    assert Traits.parse({"has_talker": True}).has_talker
    with pytest.raises(ValueError, match="graph_saef"):
        Traits.parse({"graph_saef": True})
