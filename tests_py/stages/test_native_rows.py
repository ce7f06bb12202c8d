"""The rows of the spec on the native talker: it runs by the same plan as models in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import _core
from deltaic.stages import Chunked, Full
from deltaic.stages.speech import SpeechPipeline
from scripted_stage import Prepared, decode, ids, prepare, row
from speech_driver import TEXT, Spoken, make_pipeline, params, run, same, speak

HIDDEN = 48


@pytest.fixture
def pipeline(tiny_tts: Path) -> SpeechPipeline:
    return make_pipeline(tiny_tts)


def rows_of(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def add(talker: Any, req_id: str, *, prompt: int = 5, seed: int = 0, **fields: Any) -> Any:
    """Give the talker a request; return the rows of its prompt."""
    rows = rows_of(seed, prompt)
    given = {"text": rows_of(seed + 1, 2), "pad": rows_of(seed + 2, 1)[0], "sampling": _core.CodeSampling()}
    talker.add_request(req_id, prompt=rows, **(given | fields))
    return rows


def prepared(talker: Any, rows: list[Any]) -> Prepared:
    num_tokens = max(one.first_token + one.num_tokens for one in rows)
    return prepare(talker, rows, ids(*range(num_tokens)))


@pytest.mark.parametrize("split", [(5,), (4, 1), (1, 4), (1, 1, 1, 1, 1)], ids=str)
def test_f4_and_row_1_every_part_of_a_prompt_is_the_prompts_rows(
    pipeline: SpeechPipeline, split: tuple[int, ...]
) -> None:
    expected, computed = add(pipeline.talker, "a"), 0
    for num in split:
        result = prepared(pipeline.talker, [row("a", 0, num, prompt=5, computed=computed)])
        assert np.array_equal(result.embeds, expected[computed : computed + num])
        assert result.failures == {}
        computed += num


def test_f3_neighbouring_decodes_share_a_call_and_keep_their_rows(pipeline: SpeechPipeline) -> None:
    assert pipeline.talker.has_batched_hook()
    expected = {req_id: add(pipeline.talker, req_id, seed=10 * i) for i, req_id in enumerate("abc")}
    rows = [
        row("b", 0, 2, prompt=5, computed=1),
        row("a", 2, 1, prompt=5, computed=4),
        row("c", 3, 3, prompt=5, computed=0),
    ]
    result = prepared(pipeline.talker, rows)
    assert np.array_equal(result.embeds, np.concatenate([expected["b"][1:3], expected["a"][4:], expected["c"][:3]]))


def test_f5_rows_behind_the_step_are_untouched(pipeline: SpeechPipeline) -> None:
    talker: Any = pipeline.talker
    add(talker, "a")
    talker.embeds[:] = -7
    prepared(talker, [row("a", 0, 2, prompt=5, computed=0)])
    assert np.all(talker.embeds[2:] == -7)
    assert not np.any(talker.embeds[:2] == -7)


@pytest.mark.parametrize("offsets", [(0, 2), (1, 0), (0, 0), (-1, 0), (1, 2)])
def test_f7_rows_with_gaps_or_overlaps_are_refused_and_change_nothing(
    pipeline: SpeechPipeline, offsets: tuple[int, int]
) -> None:
    talker: Any = pipeline.talker
    for req_id in "ab":
        add(talker, req_id)
    talker.embeds[:] = -7
    rows = [row(req_id, first, 1, prompt=5, computed=0) for req_id, first in zip("ab", offsets, strict=True)]
    with pytest.raises(RuntimeError, match="requires contiguous in-bounds token offsets"):
        talker.prepare(rows, ids(1, 2))
    assert np.all(talker.embeds == -7)
    assert talker.take_failures() == {}


def test_row_31_a_row_without_an_input_fails_alone(pipeline: SpeechPipeline) -> None:
    """It has no frame yet, or is not known; between others, in one batch with them."""
    talker = pipeline.talker
    expected = add(talker, "a")
    add(talker, "b")
    talker.embeds[:] = -7  # type: ignore[index]
    result = prepared(talker, [decode("b", 0), decode("nobody", 1), row("a", 2, 1, prompt=5, computed=4)])
    assert result.failures == {
        "b": "request b has no input for position 5: 5 prompt rows and 0 frames",
        "nobody": "the talker has no request nobody",
    }
    assert not result.embeds[:2].any()
    assert np.array_equal(result.embeds[2:], expected[4:])
    assert talker.take_failures() == {}


def test_row_31_a_request_that_the_talker_loses_ends_alone(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts)
    for request_id in ("a", "b"):
        pipeline.add(request_id, TEXT, params())
    chunks = [chunk for _ in range(6) for chunk in pipeline.step()]
    pipeline.talker.remove_request("b/1")
    spoken: dict[str, Spoken] = {}
    for chunk in chunks:
        spoken.setdefault(chunk.request_id, Spoken()).chunks.append(chunk)
    run(pipeline, spoken)
    assert spoken["b"].final.error == "the talker has no request b/1"
    whole = speak(make_pipeline(tiny_tts))["a"]
    assert np.array_equal(spoken["a"].samples, whole.samples)


def test_a_step_of_more_tokens_than_there_is_room_for_is_refused(pipeline: SpeechPipeline) -> None:
    add(pipeline.talker, "a", prompt=600)
    with pytest.raises(ValueError, match="a step of 600 tokens, max_num_tokens is 512"):
        prepared(pipeline.talker, [row("a", 0, 600, prompt=600, computed=0)])


def test_b3_prompts_alone_call_no_predictor(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts, max_num_batched_tokens=4)
    pipeline.add("a", TEXT, params())  # 10 tokens of prompt
    pipeline.step()
    pipeline.step()
    assert pipeline.talker.num_predictor_calls == 0
    pipeline.step()
    assert pipeline.talker.num_predictor_calls == 1


def test_b2_and_b7_codes_belong_to_their_requests_in_one_call_a_step(tiny_tts: Path) -> None:
    requests = {f"r{i}": params(seed=i, num_frames=8 + i) for i in range(4)}
    pipeline = make_pipeline(tiny_tts)
    spoken = speak(pipeline, requests)
    assert pipeline.talker.num_predictor_calls == 11
    for request_id, one in requests.items():
        assert len(spoken[request_id].frames) == one.max_frames
        assert same(spoken[request_id], speak(make_pipeline(tiny_tts), {request_id: one})[request_id])


def test_b8_a_stream_of_random_numbers_goes_on_and_ends_with_its_request(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts)
    first = speak(pipeline)["a"].frames
    assert len({tuple(frame[1:]) for frame in first}) > 20  # not the same numbers in every frame
    assert speak(pipeline)["a"].frames == first  # and none of the request before


class Watched:
    """An edge whose codes are written down."""

    def __init__(self, edge: Any) -> None:
        self.edge = edge
        self.seen: list[list[int]] = []

    def take(self) -> Any:
        due = self.edge.take()
        self.seen += [codes.tolist() for one in due if one.status is None for codes in one.rows(("codes", "audio"))]
        return due

    def __getattr__(self, name: str) -> Any:
        return getattr(self.edge, name)


def test_e2_the_row_of_the_end_of_speech_is_handed_over_and_cropped_by_the_decoder(tiny_tts: Path) -> None:
    from test_speech_pipeline import EndsAtOnce

    for chunk in (Full(), Chunked(1, 1)):
        pipeline = make_pipeline(tiny_tts, chunk=chunk)
        pipeline.codes = watched = Watched(pipeline.codes)  # type: ignore[assignment]
        spoken = speak(pipeline, {"a": EndsAtOnce(seed=1, max_frames=20, min_frames=3)})["a"]
        assert watched.seen[:3] == spoken.frames
        assert watched.seen[3:] == [[pipeline.config.ids.codec_eos, 0, 0, 0]]
        assert len(spoken.samples) == 3 * 16


def test_text_is_taken_for_all_requests_at_once_and_tells_how_far_they_may_run(pipeline: SpeechPipeline) -> None:
    talker: Any = pipeline.talker
    edge = _core.StageEdge(_core.EdgeMode(is_full=False), keys=[("hidden", "text")])
    for req_id in "ab":
        add(talker, req_id, text=np.zeros((0, HIDDEN)), is_text_complete=False, end=rows_of(9, 1)[0])
        edge.open(req_id)
    edge.open("c")
    assert talker.take_ready_tokens() == {"a": 5, "b": 5}
    assert talker.take_ready_tokens() == {}
    with pytest.raises(ValueError, match="end has 3 values, wanted 48"):
        add(talker, "d", end=[1.0, 2.0, 3.0])
    edge.end("a")
    edge.end("b", _core.EndStatus.error, "lost")
    edge.end("c")
    assert [(one.id, one.error) for one in talker.take_text(edge)] == [("b", "lost"), ("c", "")]
    assert talker.take_ready_tokens() == {"a": -1}
    with pytest.raises(ValueError, match="the text of request a is complete"):
        talker.append_text("a", rows_of(1, 1), True)
