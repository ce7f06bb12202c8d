from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from deltaic.stages import Edge, Stage, StageGraph
from deltaic.stages.handover import Handover, crop_codes, defers_payload, gathers_payload, step_payloads

TEXT, CODES = ("text", "hidden"), ("codes", "audio")
GRAPH = StageGraph(
    [
        Stage("thinker", outputs=(TEXT,), answers_client=True),
        Stage("talker", inputs=(TEXT,), outputs=(CODES,), has_sound=True),
        Stage("code2wav", inputs=(CODES,), answers_client=True, has_sound=True),
    ],
    [Edge("thinker", "talker", (TEXT,)), Edge("talker", "code2wav", (CODES,))],
)


def rows(*values: int, width: int = 2) -> Any:
    return np.repeat(np.asarray(values)[:, None], width, axis=1)


def test_e1_rows_append_and_everything_else_keeps_the_latest() -> None:
    handover = Handover()
    handover.add("a", {"codes": rows(1), "rate": 8, "pos": np.asarray([1]), "none": None}, "first")
    handover.add("a", {"codes": rows(2, 3), "rate": 9, "pos": np.asarray([2]), "none": None}, "second")
    payload, request = handover.take("a")
    assert payload["codes"].tolist() == rows(1, 2, 3).tolist()
    assert payload["rate"] == 9
    assert payload["pos"].tolist() == [2]
    assert "none" not in payload
    assert request == "second"
    assert "a" not in handover


def test_e1_another_row_shape_starts_the_key_again() -> None:
    handover = Handover()
    handover.add("a", {"codes": rows(1), "hidden": rows(1)})
    handover.add("a", {"codes": rows(2, width=3), "hidden": rows(2)})
    payload, _ = handover.take("a")
    assert payload["codes"].tolist() == [[2, 2, 2]]
    assert len(payload["hidden"]) == 2


def test_e1_declared_keys_are_replaced_and_older_entries_extended() -> None:
    handover = Handover(replace_keys=["mask"])
    handover.adopt("a", ({"codes": rows(1), "mask": rows(1)}, "old"))
    handover.add("a", {"codes": rows(2), "mask": rows(2)}, "new")
    payload, request = handover.take("a")
    assert payload["codes"].tolist() == rows(1, 2).tolist()
    assert payload["mask"].tolist() == rows(2).tolist()
    assert request == "new"


@pytest.mark.parametrize("steps", [[rows(0, 0)], [rows(0), rows(5), rows(0)], [rows(0, 0, 0), rows(7)]])
def test_e2_frames_of_zeros_are_frames(steps: list[Any]) -> None:
    handover = Handover()
    for step in steps:
        handover.add("a", {"codes": step})
    assert handover.take("a")[0]["codes"].tolist() == np.concatenate(steps).tolist()


def test_e2_the_consumer_crops_by_token_ids() -> None:
    frames = rows(0, 0, 7, 0, 9)  # two placeholders of the prompt in front
    assert crop_codes(frames, np.asarray([7, 0, 2150])).tolist() == rows(7, 0).tolist()
    assert crop_codes(frames, np.asarray([1, 2, 3, 4, 5, 6, 7])).tolist() == frames.tolist()
    assert crop_codes(np.asarray([[1, 5000], [2, -1], [3, 2047]]), np.asarray([1, 2, 3])).tolist() == [[3, 2047]]
    assert crop_codes(frames, np.asarray([], int)).shape == (0, 2)


def test_e3_each_key_is_joined_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    concatenate = np.concatenate
    monkeypatch.setattr(np, "concatenate", lambda parts: (calls.append(len(parts)), concatenate(parts))[1])
    handover = Handover()
    for step in range(100):
        handover.add("a", {"codes": rows(step), "hidden": rows(step, width=3)})
    assert calls == []
    payload, _ = handover.take("a")
    assert len(payload["codes"]) == len(payload["hidden"]) == 100
    assert calls == [100, 100]


@pytest.mark.parametrize(
    ("stage", "options", "wanted"),
    [
        ("thinker", {}, True),  # although it also answers the client
        ("talker", {}, True),
        ("code2wav", {"make_payload": None}, False),
        ("code2wav", {}, False),
        ("thinker", {"is_chunked": True}, False),
        ("talker", {"make_payload": None}, False),
        ("talker", {"has_channel": False}, False),
    ],
)
def test_e4_who_gathers_its_payload(stage: str, options: dict[str, Any], wanted: bool) -> None:
    assert gathers_payload(GRAPH, stage, **({"make_payload": dict} | options)) is wanted


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_e5_a_payload_is_deferred_only_by_opt_in_and_without_a_prefix_cache(
    at_end: bool, prefix_cache: bool, gathers: bool
) -> None:
    deferred = defers_payload(at_request_end=at_end, has_prefix_cache=prefix_cache, gathers=gathers)
    assert deferred is (at_end and gathers and not prefix_cache)


def test_e6_step_outputs_are_built_once_or_not_at_all() -> None:
    built: list[int] = []

    def build() -> dict[str, int]:
        built.append(1)
        return {"codes": 1}

    assert step_payloads(build, deferred=True, for_stage=True, for_client=True) == (None, None)
    assert built == []
    stage, client = step_payloads(build, deferred=False, for_stage=True, for_client=True)
    assert stage is client is not None
    assert len(built) == 1
    assert step_payloads(build, deferred=False, for_stage=False, for_client=True) == (None, {"codes": 1})
