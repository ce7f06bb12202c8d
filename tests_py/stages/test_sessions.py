from __future__ import annotations

from typing import Any

from deltaic.stages import Envelope, Traits
from deltaic.stages.payload import serialize
from scripted_stage import ScalarStage, make_runner

KEYS = (("codes", "audio"), ("codes", "final"))
META = {"num_processed_tokens": 0, "resumable": True}


def session(*, replaces: bool, payload: Any) -> Any:
    runner = make_runner(ScalarStage(Traits(replaces_session_payload=replaces)), keys=KEYS)
    runner.add_request("a", payload)
    runner.add_request("other", {"codes": {"audio": "theirs"}})
    return runner


def test_d1_a_merged_segment_keeps_the_session() -> None:
    runner = session(replaces=False, payload={"duplex": {"seq": 1, "session_id": "s"}})
    held = runner.buffers.get("a")
    runner.update_requests([Envelope("a", {"duplex": {"seq": 2, "payload": "new"}}, starts_segment=True)])
    assert held == {"duplex": {"seq": 2, "session_id": "s", "payload": "new"}, "meta": META}
    assert runner.buffers.get("a") is held


def test_d2_a_replacing_segment_forgets_the_old_one_for_good() -> None:
    stale = serialize({"codes": {"audio": [[1, 2]], "final": [[3, 4]]}}, KEYS)
    runner = session(replaces=True, payload=stale)
    assert runner.buffers.get("a")["codes"]["final"].tolist() == [[3, 4]]
    runner.update_requests([Envelope("a", {"text": {"next": "hello"}}, starts_segment=True), Envelope("a", None)])
    assert runner.buffers.get("a") == {"text": {"next": "hello"}, "meta": META}
    assert runner.buffers.get("other") == {"codes": {"audio": "theirs"}}


def test_d3_a_marker_alone_replaces_a_running_requests_snapshot() -> None:
    runner = session(replaces=True, payload={"codes": {"audio": "last turn"}, "meta": {"finished": True}})
    runner.update_requests([Envelope("a", starts_segment=True)])
    assert runner.buffers.get("a") == {"meta": META}
