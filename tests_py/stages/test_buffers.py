from __future__ import annotations

import json
import logging
import struct
from typing import Any

import numpy as np
import pytest
from deltaic.stages import Chunked, Edge, Envelope, PayloadBuffers, Traits
from deltaic.stages.payload import deserialize, serialize
from deltaic.stages.session import with_request_info
from scripted_stage import ScalarStage, decode, ids, make_runner, prepare

KEYS = (("ids", "all"), ("hidden", "last"), ("meta", "count"), ("meta", "name"))


def filled(**sections: Any) -> PayloadBuffers:
    buffers = PayloadBuffers([("codes", "device")])
    buffers.add("a")
    buffers.merge("a", sections)
    return buffers


def test_c1_updates_merge_one_level_deep_and_accumulate() -> None:
    buffers = filled(meta={"left": 1, "right": {"deep": 1}}, text="old")
    held = buffers.get("a")
    buffers.merge("a", {"meta": {"right": {"other": 2}}, "text": "new"})
    buffers.merge("a", {"more": [1, 2]})
    assert buffers.get("a") is held
    assert held == {"meta": {"left": 1, "right": {"other": 2}}, "text": "new", "more": [1, 2]}


def test_c1_no_tensor_of_the_buffer_points_into_memory_of_the_step() -> None:
    memory = np.arange(6.0).reshape(2, 3)
    buffers = filled(codes={"device": memory, "host": memory.T})
    memory[:] = -1
    codes = buffers.get("a")["codes"]
    assert codes["device"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert codes["host"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert codes["host"].flags.c_contiguous


def test_c1_only_listed_keys_stay_on_their_device() -> None:
    class DeviceTensor:
        shape, dtype = (2,), "f32"

        def __init__(self) -> None:
            self.calls: list[str] = []

        def detach(self) -> DeviceTensor:
            self.calls.append("detach")
            return self

        def clone(self) -> str:
            return "a copy on the device"

        def cpu(self) -> Any:
            self.calls.append("cpu")
            return np.zeros(2)

    kept, moved = DeviceTensor(), DeviceTensor()
    buffers = filled(codes={"device": kept, "host": moved})
    assert buffers.get("a")["codes"]["device"] == "a copy on the device"
    assert isinstance(buffers.get("a")["codes"]["host"], np.ndarray)
    assert (kept.calls, moved.calls) == (["detach"], ["detach", "cpu"])


def test_c1_everyone_is_given_the_same_object() -> None:
    runner = make_runner(ScalarStage(), "a")
    held = runner.buffers.get("a")
    runner.update_requests([Envelope("a", {"meta": {"x": 1}})])
    prepare(runner, [decode("a", 0)], ids(3))
    assert runner.buffers.get("a") is held
    assert held["meta"] == {"x": 1}
    assert held["seen"] == {"count": 1}


def test_c2_an_empty_update_and_an_unknown_request_leave_no_entry() -> None:
    buffers = filled()
    buffers.merge("a", {})
    buffers.merge("gone", {"meta": {"x": 1}})
    buffers.replace("gone", {"meta": {"x": 1}})
    assert buffers.get("a") == {}
    assert list(buffers) == ["a"]
    runner = make_runner(ScalarStage(), "a")
    runner.finish_request("a")
    runner.update_requests([Envelope("a", {"meta": {"x": 1}})])
    assert len(runner.buffers) == 0


def test_c2_a_request_that_is_refused_leaves_no_entry() -> None:
    source = Edge("talker", "other", (("codes", "x"),), Chunked(1, 1)).make()
    runner = make_runner(ScalarStage(), keys=KEYS, source=source)
    with pytest.raises(TypeError, match="got int"):
        runner.add_request("a", 3)
    source.open("b")
    with pytest.raises(ValueError, match="request b is open"):
        runner.add_request("b", {"meta": {"count": 1}})
    assert list(runner.buffers) == []
    runner.add_request("a", {"meta": {"count": 1}})
    assert runner.buffers.get("a") == {"meta": {"count": 1}}


def test_c2_an_id_in_use_is_refused_and_gains_nothing() -> None:
    runner = make_runner(ScalarStage(), "a")
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        runner.add_request("a", {"voice": {"name": "another's"}})
    assert runner.buffers.get("a") == {}
    runner.finish_request("a")
    runner.add_request("a", {"voice": {"name": "bob"}})
    assert runner.buffers.get("a") == {"voice": {"name": "bob"}}


def test_c3_conditioning_is_there_when_a_request_begins_and_grows_by_step() -> None:
    model = ScalarStage()
    runner = make_runner(model, keys=KEYS)
    runner.add_request("a", serialize({"ids": {"all": [5, 6]}}, KEYS))
    runner.add_request("b", None)
    runner.update_requests([Envelope("b", serialize({"meta": {"count": 3}}, KEYS))])
    prepare(runner, [decode("a", 0), decode("b", 1)], ids(1, 2))
    assert model.seen[0]["ids"]["all"].tolist() == [5, 6]
    assert model.seen[1]["meta"]["count"] == 3


def test_c4_tensors_come_back_exactly() -> None:
    hidden = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    payload = {"ids": {"all": np.arange(5, dtype=np.int64)}, "hidden": {"last": hidden}, "meta": {"count": 7}}
    back = deserialize(serialize(payload, KEYS), KEYS)
    assert back["ids"]["all"].dtype == np.int64
    assert back["ids"]["all"].tolist() == [0, 1, 2, 3, 4]
    assert back["hidden"]["last"].dtype == np.float32
    assert np.array_equal(back["hidden"]["last"], hidden)
    assert back["meta"]["count"].shape == ()
    assert int(back["meta"]["count"]) == 7


def test_c4_none_and_dicts_pass_and_other_types_are_refused() -> None:
    given = {"meta": {"count": 1}}
    assert deserialize(None, KEYS) == {}
    assert deserialize(given, KEYS) is given
    for bad in (3, "text", [1]):
        with pytest.raises(TypeError, match=type(bad).__name__):
            deserialize(bad, KEYS)
    with pytest.raises(ValueError, match="no payload"):
        deserialize(b"none of ours", KEYS)


def changed(**fields: Any) -> bytes:
    """Return the bytes of a payload whose header says something else of its tensor."""
    known = {"section": "ids", "name": "all", "dtype": "<i8", "shape": [1], "begin": 0}
    text = json.dumps([[*(known | fields).values()]]).encode()
    return b"dlp1" + struct.pack("<I", len(text)) + text + b"\0" * 8


def test_c4_bytes_that_are_cut_or_changed_are_refused() -> None:
    whole = serialize({"ids": {"all": np.arange(5)}}, KEYS)
    assert deserialize(changed(), KEYS)["ids"]["all"].tolist() == [0]
    bad = [whole[:end] for end in range(len(whole))]
    bad += [changed(shape=[-1]), changed(shape=[2]), changed(shape="x"), changed(shape=[2**62, 8]), changed(begin=-8)]
    bad += [changed(dtype="zz"), changed(dtype="|O"), changed(dtype=3), changed(begin=1), changed(section=["ids"])]
    bad += [b"dlp1" + struct.pack("<I", 1) + b"3", b"dlp1" + struct.pack("<I", 3) + b"[1]"]
    for data in bad:
        with pytest.raises(ValueError, match=r"payload"):
            deserialize(data, KEYS)


@pytest.mark.parametrize("value", [np.asarray([None, "x"], object), np.asarray(["a"]), ["a", "b"]])
def test_c4_arrays_of_no_numbers_are_dropped(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert deserialize(serialize({"ids": {"all": value}}, KEYS), KEYS) == {}
    assert "ids.all" in caplog.text


def test_c4_unknown_keys_are_refused_and_untensorable_values_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"meta\.cuont"):
        serialize({"meta": {"cuont": 1}}, KEYS)
    data = serialize({"meta": {"count": 1}}, KEYS)
    with pytest.raises(ValueError, match=r"meta\.count"):
        deserialize(data, (("ids", "all"),))
    with caplog.at_level(logging.WARNING):
        assert deserialize(serialize({"meta": {"name": "x", "count": 1}}, KEYS), KEYS)["meta"].keys() == {"count"}
    assert "meta.name" in caplog.text


def test_c5_early_payloads_wait_for_their_request() -> None:
    """They are parked on the edge; what has been applied is not applied again."""
    key = ("codes", "x")
    edge = Edge("talker", "other", (key,), Chunked(1, 1)).make()
    model = ScalarStage()
    runner = make_runner(model, source=edge)
    runner.add_request("begun")
    for req_id, value in (("begun", 1), ("early", 2), ("begun", 3)):
        edge.put(req_id, key, np.full((1, 1), value))
    runner.take_payloads()
    assert runner.buffers.get("begun")["codes"]["x"].tolist() == [[1], [3]]
    assert "early" not in runner.buffers
    runner.buffers.replace("begun", {})
    runner.take_payloads()
    assert runner.buffers.get("begun") == {}
    runner.add_request("early")
    runner.take_payloads()
    assert runner.buffers.get("early")["codes"]["x"].tolist() == [[2]]
    for req_id in ("begun", "early"):
        runner.finish_request(req_id)
    assert edge.num_kept == 0


def test_c6_a_model_that_wants_request_info_gets_a_copy() -> None:
    payload = {"text": "hi"}
    enriched = with_request_info(payload, "a", {"mm_features": [1]}, wanted=True)
    assert enriched == {"text": "hi", "mm_features": [1], "req_id": "a"}
    assert payload == {"text": "hi"}
    kept = with_request_info({"mm_features": [9]}, "a", {"mm_features": [1]}, wanted=True)
    assert kept["mm_features"] == [9]
    assert with_request_info(payload, "a", None, wanted=True) is payload
    assert with_request_info(payload, "a", {}, wanted=False) is payload
    model = ScalarStage(Traits(wants_request_info=True))
    runner = make_runner(model)
    runner.add_request("a", info={"mm_features": "sound"})
    prepare(runner, [decode("a", 0)], ids(1))
    assert model.seen[0]["mm_features"] == "sound"
    assert "mm_features" not in runner.buffers.get("a")
