from __future__ import annotations

from typing import Any

import pytest
from deltaic.stages import Chunked, Edge, Full, Stage, StageGraph

A, B = ("a", "x"), ("b", "x")
FIRST = Stage("first", outputs=(A,))
LAST = Stage("last", inputs=(A,), answers_client=True, has_sound=True)


def test_a_graph_knows_order_producers_and_active_stages() -> None:
    text = Stage("text", outputs=(A,), answers_client=True)
    sound = Stage("sound", inputs=(B,), answers_client=True, has_sound=True)
    talk = Stage("talk", inputs=(A,), outputs=(B,), has_sound=True)
    graph = StageGraph([sound, talk, text], [Edge("talk", "sound", (B,), Chunked(1, 4)), Edge("text", "talk", (A,))])
    assert graph.order == ("text", "talk", "sound")
    assert [graph.is_producer(name) for name in graph.order] == [True, True, False]
    assert graph.active(wants_sound=False) == ("text",)
    assert graph.active(wants_sound=True) == graph.order
    assert isinstance(graph.incoming("talk")[0].mode, Full)


@pytest.mark.parametrize(
    ("stages", "edges", "message"),
    [
        ([], [], "at least one stage"),
        ([FIRST, FIRST], [], "two stages are called 'first'"),
        ([FIRST], [], "no stage answers the client"),
        ([FIRST, LAST], [Edge("first", "lost", (A,))], "there is no stage 'lost'"),
        ([FIRST, LAST], [Edge("last", "last", (A,))], "cannot feed itself"),
        ([FIRST, LAST], [Edge("first", "last", (A,))] * 2, "is there twice"),
        ([FIRST, LAST], [Edge("first", "last", ())], "carries no key"),
        ([FIRST, LAST], [Edge("first", "last", (B,))], "does not make b.x"),
        ([Stage("first", outputs=(A, B)), LAST], [Edge("first", "last", (B,))], "does not take b.x"),
        ([FIRST, LAST], [], "needs a.x, which no edge brings"),
        ([FIRST, Stage("solo", answers_client=True)], [], "'first' makes reaches nobody"),
        (
            [Stage("p", (A,), (B,), True), Stage("q", (B,), (A,))],
            [Edge("p", "q", (B,)), Edge("q", "p", (A,))],
            "circle through p, q",
        ),
    ],
)
def test_what_is_wrong_with_a_graph_is_named(stages: Any, edges: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageGraph(stages, edges)


@pytest.mark.parametrize(("first", "size", "left"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_sizes_of_a_chunked_edge_are_checked(first: int, size: int, left: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Chunked(first, size, left)


@pytest.mark.parametrize("name", ["first", "size", "left_context"])
def test_sizes_of_a_chunked_edge_are_bounded(name: str) -> None:
    fields: Any = {"first": 1, "size": 1}
    Edge("a", "b", (A,), Chunked(**(fields | {name: 2**31 - 1}))).make()
    with pytest.raises(ValueError, match=f"^{name} of a chunked edge must be below"):
        Chunked(**(fields | {name: 2**31}))


@pytest.mark.parametrize("name", ["first", "size", "left_context"])
@pytest.mark.parametrize("value", [float("nan"), 2.0, "2", None, True])
def test_sizes_of_a_chunked_edge_are_integers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} of a chunked edge must be an integer, got {value!r}$"):
        Chunked(**({"first": 1, "size": 1} | {name: value}))


LISTS: Any = [A]
NAMES: Any = ("a.x",)


@pytest.mark.parametrize(
    ("stages", "edge", "message"),
    [
        ([FIRST, LAST], {"mode": "full"}, "mode of edge first -> last must be .*, got 'full'"),
        ([FIRST, LAST], {"mode": Full}, "mode of edge first -> last must be"),
        ([FIRST, LAST], {"keys": (A, A)}, "keys of edge first -> last has a.x twice"),
        ([FIRST, LAST], {"keys": LISTS}, "keys of edge first -> last must be a tuple"),
        ([FIRST, LAST], {"keys": NAMES}, r"keys of edge first -> last must be \(section, name\), got 'a.x'"),
        ([Stage("first", outputs=(A, A)), LAST], {}, "outputs of stage 'first' has a.x twice"),
        ([FIRST, Stage("last", inputs=(A, A), answers_client=True)], {}, "inputs of stage 'last' has a.x twice"),
        ([FIRST, Stage("last", inputs=(("a", ""),), answers_client=True)], {}, "inputs of stage 'last' must be"),
        ([FIRST, Stage("", inputs=(A,), answers_client=True)], {}, "the name of a stage must be a string, got ''"),
        ([FIRST, Stage("last", (A,), (), 1)], {}, "answers_client of stage 'last' must be true or false, got 1"),  # type: ignore[arg-type]
    ],
)
def test_a_field_of_the_wrong_kind_is_named_with_its_value(stages: Any, edge: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageGraph(stages, [Edge(**({"source": "first", "target": "last", "keys": (A,)} | edge))])


def test_two_edges_do_not_bring_the_same_key() -> None:
    stages = [FIRST, Stage("other", outputs=(A,)), LAST]
    with pytest.raises(ValueError, match=r"edge other -> last: stage 'last' has a\.x of stage 'first' already"):
        StageGraph(stages, [Edge("first", "last", (A,)), Edge("other", "last", (A,))])


def test_a_stage_of_text_does_not_wait_for_one_of_sound() -> None:
    key = ("codes", "audio")
    edges = [Edge("talker", "captions", (key,))]
    stages = [Stage("talker", outputs=(key,), has_sound=True), Stage("captions", inputs=(key,), answers_client=True)]
    with pytest.raises(ValueError, match="stage 'captions' would wait for it"):
        StageGraph(stages, edges)
