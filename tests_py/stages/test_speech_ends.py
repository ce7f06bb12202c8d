"""However an utterance ends, nothing of it is left in any stage, and what was made of it before is heard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import _core
from deltaic.stages.graph import Chunked, Full
from deltaic.stages.speech import SpeechPipeline, Voice
from deltaic.stages.speech.voices import ReferenceCache
from speech_driver import TEXT, Clock, make_pipeline, params, run, same, speak


@pytest.fixture(params=["tts", "thinker"])
def checkpoint(request: pytest.FixtureRequest, tiny_tts: Path, tiny_speech: Path) -> Path:
    return tiny_tts if request.param == "tts" else tiny_speech


def kept(pipeline: SpeechPipeline) -> dict[str, int]:
    """Return what each part of a pipeline keeps of its requests."""
    engines = {"talker engine": pipeline.talker_engine, "thinker engine": pipeline.thinker_engine}
    counts = {"talker": pipeline.talker.num_requests, "codes": pipeline.codes.num_kept}
    counts |= {"text": 0 if pipeline.text is None else pipeline.text.num_kept}
    for name, engine in engines.items():
        if engine is not None:
            stats = engine.stats()
            counts[name] = stats.num_running + stats.num_waiting
            counts[f"blocks of {name}"] = round(stats.cache_usage * stats.num_total_blocks)
    return counts


def assert_nothing_is_kept(pipeline: SpeechPipeline) -> None:
    assert not any(kept(pipeline).values()), kept(pipeline)
    assert not pipeline.has_unfinished_requests()


def some_steps(pipeline: SpeechPipeline, count: int) -> list[Any]:
    return [chunk for _ in range(count) for chunk in pipeline.step()]


def die(*_: Any) -> Any:
    raise RuntimeError("no air")


def to_the_end(pipeline: SpeechPipeline) -> list[Any]:
    return [chunk for one in run(pipeline).values() for chunk in one.chunks]


def end_by_cancel(pipeline: SpeechPipeline) -> list[Any]:
    for request_id in ("a", "b", "text"):
        pipeline.cancel(request_id)
    return pipeline.step()


def end_by_deadline(pipeline: SpeechPipeline) -> list[Any]:
    pipeline._clock.now = 1000.0  # type: ignore[attr-defined]
    return pipeline.step()


def end_by_dead_talker(pipeline: SpeechPipeline) -> list[Any]:
    engine: Any = pipeline.talker_engine
    step, engine.step = engine.step, die
    chunks = pipeline.step()
    engine.step = step
    return chunks + end_by_cancel(pipeline)


def end_by_dead_decoder(pipeline: SpeechPipeline) -> list[Any]:
    pipeline.codec = type("Broken", (), {"decode": die})()  # type: ignore[assignment]
    return to_the_end(pipeline)


ENDS = [to_the_end, end_by_cancel, end_by_deadline, end_by_dead_talker, end_by_dead_decoder]


@pytest.mark.parametrize("after", [0, 3, 16])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("chunk", [Chunked(2, 3), Full()], ids=["chunked", "full"])
def test_nothing_is_left_of_an_utterance(
    checkpoint: Path, chunk: Any, end: Callable[[SpeechPipeline], list[Any]], after: int
) -> None:
    """Whether it waits for the thinker, or writes, or speaks."""
    pipeline = make_pipeline(checkpoint, chunk=chunk, clock=Clock(), timeout_s=100.0)
    for request_id in ("a", "b"):
        pipeline.add(request_id, TEXT, params(max_text_tokens=15))
    if pipeline.thinker_engine is not None:
        pipeline.add("text", TEXT, params(wants_sound=False))
    chunks = some_steps(pipeline, after) + end(pipeline)
    assert_nothing_is_kept(pipeline)
    ended = [chunk.request_id for chunk in chunks if chunk.is_final]
    assert sorted(ended) == sorted({chunk.request_id for chunk in chunks} | {"a", "b"})


def test_a_cancelled_utterance_stops_working_at_once(checkpoint: Path) -> None:
    pipeline = make_pipeline(checkpoint)
    pipeline.add("a", TEXT, params(max_text_tokens=30))
    some_steps(pipeline, 4)
    pipeline.cancel("a")
    counts = kept(pipeline)
    assert not any(counts.values()), counts


def test_a_stream_that_is_left_early_is_cancelled(checkpoint: Path) -> None:
    pipeline = make_pipeline(checkpoint, chunk=Chunked(1, 1))
    for chunk in pipeline.stream(TEXT, params(num_frames=90)):
        if len(chunk.samples):
            break
    assert not pipeline._live
    (final,) = pipeline.step()
    assert final.finish_reason == "abort"
    assert_nothing_is_kept(pipeline)
    assert same(speak(pipeline)["a"], speak(make_pipeline(checkpoint))["a"])


def test_a_full_edge_starts_the_talker_when_the_thinker_has_ended(tiny_speech: Path) -> None:
    begun = {}
    for chunk in (Full(), Chunked(4, 25)):
        pipeline = make_pipeline(tiny_speech, chunk=chunk)
        engine: Any = pipeline.thinker_engine
        pipeline.add("a", TEXT, params(max_text_tokens=12))
        early = 0
        while engine.has_unfinished_requests():
            pipeline.step()
            early += bool(pipeline.talker.num_requests) and engine.has_unfinished_requests()
        begun[chunk] = early
        run(pipeline)
    assert begun[Full()] == 0
    assert begun[Chunked(4, 25)] >= 8


def test_a_full_edge_hands_codes_over_when_the_talker_has_ended(tiny_tts: Path) -> None:
    """They stay in the talker until then, and are put once."""
    pipeline = make_pipeline(tiny_tts, chunk=Full())
    pipeline.add("a", TEXT, params())
    some_steps(pipeline, 20)
    pipeline.codes.end("a/0")
    assert [one.status for one in pipeline.codes.take()] == [_core.EndStatus.ok]  # no row was waiting


# ---- a request that fails in the talker ----


def with_bad_code(tiny_tts: Path, folder: Path, code: int) -> Path:
    """Return a copy of a checkpoint whose predictor goes wrong behind one code of codebook 1."""
    shutil.copytree(tiny_tts, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:begin])
    (name,) = [name for name in tensors if name.endswith("code_predictor.model.codec_embedding.0.weight")]
    row_bytes = tensors[name]["shape"][1] * {"F32": 4, "BF16": 2}[tensors[name]["dtype"]]
    row = begin + tensors[name]["data_offsets"][0] + code * row_bytes
    data[row : row + row_bytes] = b"\xff" * row_bytes  # not a number, in either type
    path.write_bytes(data)
    return folder


def test_a_request_whose_codes_fail_ends_alone_behind_the_frames_that_are_good(tiny_tts: Path, tmp_path: Path) -> None:
    requests = {f"r{seed}": params(seed=seed) for seed in (7, 8)}
    good = speak(make_pipeline(tiny_tts), requests)
    first, second = ([frame[1] for frame in one.frames] for one in good.values())
    code = next(code for code in second[5:] if code not in first and code not in second[:5])
    num_good = second.index(code)
    folder = with_bad_code(tiny_tts, tmp_path / "bad", code)
    for chunk in (Chunked(4, 25), Chunked(1, 1), Full()):
        pipeline = make_pipeline(folder, chunk=chunk)
        spoken = speak(pipeline, requests)
        assert same(spoken["r7"], good["r7"])
        bad = spoken["r8"]
        assert bad.final.finish_reason == "error"
        assert bad.final.error == "the residual codes' logits are not finite"
        assert bad.frames == good["r8"].frames[:num_good]
        assert np.array_equal(bad.samples, good["r8"].samples[: 16 * num_good])
        assert_nothing_is_kept(pipeline)


def test_frames_that_are_there_are_heard_before_an_error_of_the_talker(checkpoint: Path) -> None:
    whole = speak(make_pipeline(checkpoint))["a"]
    for chunk in (Chunked(4, 25), Full()):
        pipeline = make_pipeline(checkpoint, chunk=chunk)
        pipeline.add("a", TEXT, params())
        heard = some_steps(pipeline, 25)
        engine: Any = pipeline.talker_engine
        engine.step = die
        heard += pipeline.step()
        samples = np.concatenate([one.samples for one in heard])
        assert heard[-1].error == "stage 'talker' failed: RuntimeError: no air"
        assert len(samples) >= 16 * 10
        assert np.array_equal(samples, whole.samples[: len(samples)])


# ---- references ----


def test_the_cache_of_references_is_bounded_and_drops_the_oldest(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts)
    cache = ReferenceCache(pipeline.codec, capacity=2)
    codes = [np.full((3, 4), i) for i in range(3)]
    for i in (0, 1, 0, 2, 0):  # 1 is the oldest when 2 comes
        cache.start(codes[i])
    assert len(cache) == 2
    assert cache.num_hits == 2
    cache.start(codes[1])
    assert cache.num_hits == 2


def test_the_pipelines_references_are_bounded(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts)
    for i in range(20):
        voice = Voice(codes=[[i, 1, 2, 3]], text_ids=[5])
        speak(pipeline, {"a": params(num_frames=1, voice=voice)})
    assert len(pipeline.references) <= 16


# ---- an edge with left context ----


def test_row_14_a_left_context_over_everything_is_the_sound_without_chunks(tiny_tts: Path) -> None:
    voice = Voice(codes=np.arange(24).reshape(6, 4), text_ids=[20, 21, 22])
    whole = speak(make_pipeline(tiny_tts, chunk=Full()), {"a": params(voice=voice)})["a"]
    anew = speak(make_pipeline(tiny_tts, chunk=Chunked(4, 7, left_context=96)), {"a": params(voice=voice)})["a"]
    assert same(anew, whole)
    short = speak(make_pipeline(tiny_tts, chunk=Chunked(4, 7, left_context=2)), {"a": params(voice=voice)})["a"]
    assert short.frames == whole.frames
    assert len(short.samples) == len(whole.samples)
    assert np.array_equal(short.samples[: 16 * 4], whole.samples[: 16 * 4])
    assert not np.array_equal(short.samples, whole.samples)
