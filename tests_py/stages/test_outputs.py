from __future__ import annotations

import numpy as np
import pytest
from deltaic.stages import StageOutput, StepMetadata, StepOutputs, Traits
from deltaic.stages.outputs import extract_multimodal, restore_output
from scripted_stage import ScalarStage, View, decode, ids, make_runner, prepare, row


def test_a1_a_replayed_tuple_gets_its_fields_back_and_keeps_the_payload_object() -> None:
    hidden, payload = np.ones((2, 3)), {"codes": np.zeros((2, 4))}
    restored = restore_output((hidden, payload, None, None), has_multimodal_outputs=True)
    assert isinstance(restored, StageOutput)
    assert restored.hidden is hidden
    assert restored.multimodal is payload


def test_a1_a_model_without_such_outputs_gets_its_tuple_back() -> None:
    result = (np.ones((2, 3)), {"codes": np.zeros(1)}, None, None)
    assert restore_output(result, has_multimodal_outputs=False) is result


def test_a2_a_tuple_with_auxiliary_hidden_states_is_returned_untouched() -> None:
    result = (np.ones((2, 3)), np.ones((2, 3)), None, None)
    assert restore_output(result, has_multimodal_outputs=True) is result


def test_a3_every_kind_of_result_goes_through_one_door() -> None:
    hidden, payload = np.ones((2, 3)), {"codes": np.zeros((2, 4))}
    named = StageOutput(hidden, payload)
    assert extract_multimodal(named, has_multimodal_outputs=True) == (hidden, payload)
    for result in (hidden, (hidden, "x"), [hidden], named):
        first, found = extract_multimodal(result, has_multimodal_outputs=False)
        assert first is hidden
        assert found == {}
    with pytest.raises(ValueError, match="got str"):
        extract_multimodal("hidden", has_multimodal_outputs=True)


def test_a4_a_model_learns_request_ids_in_batch_order_before_the_forward() -> None:
    told: list[StepMetadata] = []

    class Model(ScalarStage):
        def begin_step(self, step: StepMetadata) -> None:
            told.append(step)

    rows = [row("b", 0, 2, prompt=4, computed=0), decode("a", 2)]
    for wants in (False, True):
        runner = make_runner(Model(Traits(wants_step_metadata=wants)), "a", "b")
        prepare(runner, rows, ids(7, 8, 9))
        runner.begin_step(View(rows, ids(7, 8, 9), np.asarray([0, 1, 5])))
    (step,) = told
    assert step.req_ids == ("b", "a")
    assert step.ids.tolist() == [7, 8, 9]
    assert step.positions.tolist() == [0, 1, 5]
    assert step.query_start_loc.tolist() == [0, 2, 3]
    assert step.embeds[:, 0].tolist() == [7, 8, 9]


def test_a4_a_model_without_the_hook_is_not_asked() -> None:
    runner = make_runner(ScalarStage(Traits(wants_step_metadata=True)), "a")
    prepare(runner, [decode("a", 0)], ids(1))
    runner.begin_step(View([decode("a", 0)], ids(1), np.asarray([5])))


def test_step_outputs_survive_the_next_replay() -> None:
    memory = np.zeros((4, 2), np.float32)  # what a graph writes in every replay
    outputs = StepOutputs({"hidden": memory})
    views = []
    for step in range(4):
        memory[:] = step
        views.append(outputs.publish([f"r{step}", "x"]))
        if step:
            assert views[step - 1].fields["hidden"].tolist() == [[step - 1, step - 1]] * 2
    assert views[3].req_ids == ("r3", "x")
    assert [outputs.is_valid(view) for view in views] == [False, False, True, True]
