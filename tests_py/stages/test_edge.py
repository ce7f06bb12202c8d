"""The one way from a stage to the next: what native stages and Python ones put into and take from."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from deltaic.stages import Chunked, Delivery, Edge, EndStatus, Full, StageEdge
from deltaic.stages.payload import crop_codes, hand_over

CODES, HIDDEN, MASK = ("codes", "audio"), ("hidden", "text"), ("codes", "mask")


def make(mode: Any = None, *, keys: Any = (CODES,), **options: Any) -> StageEdge:
    return Edge("talker", "code2wav", keys, mode or Chunked(1, 1)).make(**options)


def rows(*values: int, width: int = 2) -> Any:
    return np.repeat(np.asarray(values)[:, None], width, axis=1)


def told(deliveries: list[Delivery]) -> list[Any]:
    """Return the rows' first column or the status, by request."""
    return [
        (one.id, one.payload["codes"]["audio"][:, 0].tolist() if one.status is None else one.status.name)
        for one in deliveries
    ]


@pytest.mark.parametrize("status", [EndStatus.ok, EndStatus.error])
@pytest.mark.parametrize("mode", [Full(), Chunked(4, 25)], ids=["full", "chunked"])
def test_row_27_all_data_comes_before_the_end_and_the_end_once(mode: Any, status: EndStatus) -> None:
    edge = make(mode)
    edge.open("a")
    assert edge.put("a", CODES, rows(1, 2))
    assert edge.end("a", status, "lost")
    assert not edge.end("a", EndStatus.error, "late")
    assert not edge.put("a", CODES, rows(3))
    assert not edge.set("a", MASK, 1)
    data, end = edge.take()
    assert told([data]) == [("a", [1, 2])]
    assert (end.status, end.error) == (status, "lost")
    assert edge.take() == []


def test_an_end_without_data_is_delivered_too() -> None:
    edge = make()
    edge.open("a")
    edge.end("a")
    assert told(edge.take()) == [("a", "ok")]


def test_row_8_a_chunk_that_never_comes_is_an_error_at_the_deadline() -> None:
    edge = make(deadline_s=5.0)
    edge.advance(100.0)
    edge.open("a")
    edge.advance(104.9)
    assert edge.take() == []
    edge.put("a", CODES, rows(1))
    assert told(edge.take()) == [("a", [1])]
    edge.advance(109.8)
    assert edge.take() == []
    edge.advance(109.9)
    (end,) = edge.take()
    assert end.status == EndStatus.error
    assert end.error == "nothing came over talker -> code2wav for 5.0 s, the deadline is 5.0 s"
    assert not edge.put("a", CODES, rows(2))
    assert edge.take() == []


def test_row_8_frames_that_wait_at_the_deadline_come_before_the_error() -> None:
    edge = make(Full(), deadline_s=5.0)
    edge.open("a")
    edge.put("a", CODES, rows(1, 2))
    edge.advance(5.0)
    assert told(edge.take()) == [("a", [1, 2]), ("a", "error")]


def test_an_edge_is_bounded_by_what_waits() -> None:
    edge = StageEdge(chunked_mode(1, 1), keys=[CODES], capacity=2)
    edge.open("a")
    assert edge.put("a", CODES, rows(1, 2))
    assert not edge.put("a", CODES, rows(3))
    assert told(edge.take()) == [("a", [1, 2])]
    assert edge.put("a", CODES, rows(3, 4))
    assert told(edge.take()) == [("a", [3, 4])]


@pytest.mark.parametrize("mode", [Full(), Chunked(1, 1)], ids=["full", "chunked"])
def test_a_hand_over_that_finds_no_room_is_an_error_and_never_a_loss(mode: Any) -> None:
    made = make(mode).mode
    edge = StageEdge(made, name="talker -> code2wav", keys=[CODES], capacity=2)
    edge.open("a")
    hand_over(edge, "a", {"codes": {"audio": rows(1, 2)}})
    hand_over(edge, "a", {"codes": {"audio": rows(3)}})
    edge.end("a")
    data, end = edge.take()
    assert told([data]) == [("a", [1, 2])]
    assert (end.status, end.error) == (EndStatus.error, "there is no room for more rows of codes.audio")


def test_a_replaced_key_that_an_edge_does_not_carry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"edge talker -> code2wav replaces \('codes', 'maks'\), which it does not"):
        make(replace_keys=[("codes", "maks")])


def chunked_mode(first: int, size: int) -> Any:
    return Edge("x", "y", (CODES,), Chunked(first, size)).make().mode


def test_row_24_what_comes_for_a_dead_generation_is_dropped() -> None:
    edge = make()
    edge.open("a/0")
    assert edge.put("a/0", CODES, rows(1))
    edge.open("a/1")
    assert told(edge.take()) == [("a/0", "cancelled")]
    assert not edge.put("a/0", CODES, rows(2))
    assert not edge.end("a/0")
    assert edge.put("a/1", CODES, rows(3))
    edge.end("a/1")
    assert told(edge.take()) == [("a/1", [3]), ("a/1", "ok")]
    edge.close("a/1")
    assert edge.take() == []  # it has had its end
    assert not edge.put("a/1", CODES, rows(4))
    with pytest.raises(ValueError, match="request a/1 has ended"):
        edge.open("a/1")


def test_early_items_are_parked_until_their_request_begins() -> None:
    edge = make()
    assert edge.put("a/3", CODES, rows(1))
    assert edge.put("a/2", CODES, rows(7))
    assert edge.end("a/3")
    assert edge.take() == []
    assert edge.num_kept == 2
    edge.open("a/3")
    assert edge.num_kept == 1  # an older generation never begins
    assert told(edge.take()) == [("a/3", [1]), ("a/3", "ok")]
    edge.forget("a/3")
    assert edge.num_kept == 0


def test_forgetting_a_request_leaves_nothing_and_frees_its_id() -> None:
    edge = make()
    edge.put("a/4", CODES, rows(1))
    edge.open("a/1")
    edge.open("a/2")
    edge.put("b/1", CODES, rows(1))
    edge.forget("a/2")
    assert edge.num_kept == 1
    assert edge.take() == []
    edge.open("a/0")
    assert edge.put("a/0", CODES, rows(5))
    assert told(edge.take()) == [("a/0", [5])]


@pytest.mark.parametrize("mode", [Chunked(1, 1), Chunked(3, 7), Chunked(25, 4), Chunked(2, 50)], ids=str)
@pytest.mark.parametrize("step", [1, 3])
def test_every_row_leaves_once_and_in_order(mode: Chunked, step: int) -> None:
    edge = make(mode)
    edge.open("a")
    sizes: list[int] = []
    taken: list[int] = []
    for begin in range(0, 40, step):
        edge.put("a", CODES, rows(*range(begin, min(begin + step, 40))))
        for _, values in told(edge.take()):
            taken += values
            sizes.append(len(values))
    num_due = 0 if mode.first > 40 else mode.first + (40 - mode.first) // mode.size * mode.size
    assert taken == list(range(num_due))
    assert not sizes or sizes[0] >= mode.first
    assert all(size % mode.size == 0 for size in sizes[1:])
    edge.end("a")
    assert [value for _, values in told(edge.take())[:-1] for value in values] == list(range(num_due, 40))


@pytest.mark.parametrize("left", [0, 2, 5, 100])
def test_left_context_gives_the_rows_before_a_chunk_again(left: int) -> None:
    edge = make(Chunked(3, 4, left_context=left))
    edge.open("a")
    sent = 0
    for value in range(13):
        edge.put("a", CODES, rows(value))
        if value == 12:
            edge.end("a")
        for one in edge.take():
            if one.status is None:
                assert one.num_left == min(left, sent)
                begin = sent - one.num_left
                values = one.rows(CODES)[:, 0].tolist()
                assert values == list(range(begin, begin + len(values)))
                sent += len(values) - one.num_left
    assert sent == 13


def test_the_first_chunk_waits_for_the_rows_of_a_prompt() -> None:
    edge = make(Chunked(1, 1))
    edge.open("a", 3)
    edge.put("a", CODES, rows(1, 2))
    edge.put("a", CODES, rows(3))
    assert edge.take() == []
    edge.put("a", CODES, rows(4))
    assert told(edge.take()) == [("a", [1, 2, 3, 4])]


def test_what_is_run_again_is_written_again_and_never_given_twice() -> None:
    edge = make(Chunked(2, 2))
    edge.open("a")
    edge.put("a", CODES, rows(0, 1, 2), 0)
    assert told(edge.take()) == [("a", [0, 1])]
    edge.put("a", CODES, rows(9, 9, 12), 0)  # the first two have been given
    edge.put("a", CODES, rows(13), 3)
    assert told(edge.take()) == [("a", [12, 13])]
    edge.put("a", CODES, rows(8, 8), 0)
    edge.put("a", CODES, rows(14), 4)
    edge.end("a")
    assert told(edge.take()) == [("a", [14]), ("a", "ok")]
    edge = make(Chunked(2, 2, left_context=2))
    edge.open("a")
    edge.put("a", CODES, rows(0, 1))
    edge.take()
    edge.put("a", CODES, rows(9, 9, 2, 3), 0)
    assert told(edge.take()) == [("a", [0, 1, 2, 3])]  # and what was given stays what it was
    edge = make()
    edge.open("a")
    with pytest.raises(ValueError, match=r"request a goes on at row 5 of codes.audio, 0 are there"):
        edge.put("a", CODES, rows(1), 5)


# ---- the rows of a hand-over of the spec ----


def joined(*steps: Any, keys: Any = (CODES,), requests: Any = (), **options: Any) -> Delivery:
    """Return what a full edge delivers of the payloads of some steps."""
    edge = make(Full(), keys=keys, **options)
    edge.open("a")
    for i, step in enumerate(steps):
        hand_over(edge, "a", step, requests[i] if requests else None)
        assert edge.take() == []
    edge.end("a")
    delivery, end = edge.take()
    assert end.status == EndStatus.ok
    return delivery


KEYS = (CODES, MASK, ("codes", "rate"), ("codes", "pos"), ("codes", "none"))


def test_e1_rows_append_and_everything_else_keeps_the_latest() -> None:
    delivery = joined(
        {"codes": {"audio": rows(1), "rate": 8, "pos": np.asarray([1]), "none": None}},
        {"codes": {"audio": rows(2, 3), "rate": 9, "pos": np.asarray([2]), "none": None}},
        keys=KEYS,
        requests=["first", "second"],
    )
    codes = delivery.payload["codes"]
    assert codes["audio"].tolist() == rows(1, 2, 3).tolist()
    assert codes["rate"] == 9
    assert codes["pos"].tolist() == [2]
    assert "none" not in codes
    assert delivery.request == "second"


def test_e1_another_row_shape_starts_the_key_again() -> None:
    keys = (CODES, HIDDEN)
    payload = joined(
        {"codes": {"audio": rows(1)}, "hidden": {"text": rows(1)}},
        {"codes": {"audio": rows(2, width=3)}, "hidden": {"text": rows(2)}},
        keys=keys,
    ).payload
    assert payload["codes"]["audio"].tolist() == [[2, 2, 2]]
    assert len(payload["hidden"]["text"]) == 2


def test_e1_declared_keys_are_replaced_and_older_entries_extended() -> None:
    delivery = joined(
        {"codes": {"audio": rows(1), "mask": rows(1)}},
        {"codes": {"audio": rows(2), "mask": rows(2)}},
        keys=KEYS,
        requests=["old", "new"],
        replace_keys=[MASK],
    )
    assert delivery.payload["codes"]["audio"].tolist() == rows(1, 2).tolist()
    assert delivery.payload["codes"]["mask"].tolist() == rows(2).tolist()
    assert delivery.request == "new"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "int32", "int64", "uint8"])
def test_e1_rows_keep_their_type_and_shape(dtype: str) -> None:
    values = np.arange(12).reshape(2, 3, 2).astype(dtype)
    back = joined({"codes": {"audio": values[:1]}}, {"codes": {"audio": values[1:]}}).payload["codes"]["audio"]
    assert back.dtype == values.dtype
    assert np.array_equal(back, values)


def test_an_edge_carries_its_own_keys_alone() -> None:
    assert joined({"codes": {"audio": rows(1), "other": 1}, "meta": 2}).payload.keys() == {"codes"}


@pytest.mark.parametrize("mode", [Full(), Chunked(1, 2)], ids=["full", "chunked"])
@pytest.mark.parametrize("steps", [[rows(0, 0)], [rows(0), rows(5), rows(0)], [rows(0, 0, 0), rows(7)]])
def test_e2_frames_of_zeros_are_frames(steps: list[Any], mode: Any) -> None:
    edge = make(mode)
    edge.open("a")
    taken = []
    for step in steps:
        hand_over(edge, "a", {"codes": {"audio": step}})
        taken += edge.take()
    edge.end("a")
    taken += edge.take()
    values = [one.rows(CODES) for one in taken if one.status is None]
    assert np.concatenate(values).tolist() == np.concatenate(steps).tolist()


def test_e2_the_consumer_crops_by_token_ids() -> None:
    frames = rows(0, 0, 7, 0, 9)  # two placeholders of the prompt in front
    assert crop_codes(frames, np.asarray([7, 0, 2150])).tolist() == rows(7, 0).tolist()
    assert crop_codes(frames, np.asarray([1, 2, 3, 4, 5, 6, 7])).tolist() == frames.tolist()
    assert crop_codes(np.asarray([[1, 5000], [2, -1], [3, 2047]]), np.asarray([1, 2, 3])).tolist() == [[3, 2047]]
    assert crop_codes(frames, np.asarray([], int)).shape == (0, 2)


def test_e3_each_key_is_joined_once_at_the_end() -> None:
    """Rows are copied once into memory that grows: joining all of them in every step would take the square of time."""

    def seconds(num_steps: int) -> float:
        edge = make(Full(), keys=(CODES, HIDDEN))
        edge.open("a")
        codes, hidden = rows(1), rows(1, width=128)
        started = time.process_time()
        for _ in range(num_steps):
            hand_over(edge, "a", {"codes": {"audio": codes}, "hidden": {"text": hidden}})
        edge.end("a")
        (delivery, _) = edge.take()
        taken = time.process_time() - started
        assert len(delivery.payload["codes"]["audio"]) == len(delivery.payload["hidden"]["text"]) == num_steps
        return taken

    assert min(seconds(8000) for _ in range(3)) < 9 * min(seconds(2000) for _ in range(3))  # 4 or 5, and not 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"deadline_s": 0.0}, "deadline_s must be above 0, got 0"),
    ],
)
def test_what_is_wrong_with_an_edge_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageEdge(chunked_mode(1, 1), keys=[CODES], **options)


def test_rows_that_are_none_are_refused() -> None:
    edge = make()
    edge.open("a")
    with pytest.raises(ValueError, match=r"rows of codes.audio have rank 1"):
        edge.put("a", CODES, np.asarray([1, 2]))
    with pytest.raises(ValueError, match=r"rows of codes.audio are of type complex128"):
        edge.put("a", CODES, np.zeros((1, 2), complex))
