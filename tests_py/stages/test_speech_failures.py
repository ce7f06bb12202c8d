"""Stages that die, stall or never end: the request ends with an error by its deadline, and the others go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import _core
from deltaic.stages.speech import SpeechParams, SpeechPipeline, Voice
from deltaic.stages.speech.audio import SilenceTrimmer
from speech_driver import TEXT, Clock, Spoken, make_pipeline, params, run, same, speak


def expected(checkpoint: Path, **fields: Any) -> Spoken:
    return speak(make_pipeline(checkpoint), {"a": params(**fields)})["a"]


def test_row_8_a_thinker_that_dies_fails_its_requests_and_not_those_that_talk(tiny_speech: Path) -> None:
    pipeline = make_pipeline(tiny_speech)
    engine: Any = pipeline.thinker_engine
    pipeline.add("a", TEXT, params())
    spoken: dict[str, Spoken] = {}
    while engine.has_unfinished_requests():
        for chunk in pipeline.step():
            spoken.setdefault(chunk.request_id, Spoken()).chunks.append(chunk)
    pipeline.add("b", TEXT, params())
    step = engine.step

    def die() -> Any:
        engine.step = step
        raise RuntimeError("out of paper")

    engine.step = die
    run(pipeline, spoken)
    assert spoken["b"].final.finish_reason == "error"
    assert spoken["b"].final.error == "stage 'thinker' failed: RuntimeError: out of paper"
    assert np.array_equal(spoken["a"].samples, expected(tiny_speech).samples)
    assert same(speak(pipeline)["a"], expected(tiny_speech))  # and the pipeline goes on


def test_row_8_a_thinker_that_dies_takes_along_whoever_waits_for_its_text(tiny_speech: Path) -> None:
    pipeline = make_pipeline(tiny_speech)
    engine: Any = pipeline.thinker_engine
    pipeline.add("done", TEXT, params(max_text_tokens=3, num_frames=60))
    pipeline.add("a", TEXT, params(max_text_tokens=60))
    spoken: dict[str, Spoken] = {}
    for _ in range(10):
        for chunk in pipeline.step():
            spoken.setdefault(chunk.request_id, Spoken()).chunks.append(chunk)
    assert len(spoken["a"].samples) > 0  # it talks already

    def die() -> Any:
        raise RuntimeError("out of paper")

    engine.step = die
    run(pipeline, spoken)
    assert spoken["a"].final.error == "stage 'thinker' failed: RuntimeError: out of paper"
    assert spoken["done"].final.error is None
    assert len(spoken["done"].samples) == 60 * 16


def test_row_8_text_that_never_comes_is_an_error_at_the_deadline(tiny_speech: Path) -> None:
    clock = Clock()
    pipeline = make_pipeline(tiny_speech, timeout_s=30.0, clock=clock)
    pipeline.add("lost", TEXT, params())
    assert pipeline.text is not None
    pipeline.text.forget("lost/0")  # what the thinker gives for it is lost
    pipeline.add("a", TEXT, params())
    spoken: dict[str, Spoken] = {}
    for _ in range(100):
        clock.now += 0.1
        for chunk in pipeline.step():
            spoken.setdefault(chunk.request_id, Spoken()).chunks.append(chunk)
    assert np.array_equal(spoken["a"].samples, expected(tiny_speech).samples)
    assert len(spoken["lost"].samples) == 0
    assert not any(chunk.is_final for chunk in spoken["lost"].chunks)
    clock.now = 30.0
    run(pipeline, spoken)
    assert spoken["lost"].final.error == "the utterance did not end within 30.0 s"
    assert pipeline.talker_engine.stats().num_running == 0


def test_row_8_frames_that_stop_coming_are_an_error_at_the_deadline(tiny_tts: Path) -> None:
    clock = Clock()
    pipeline = make_pipeline(tiny_tts, stall_timeout_s=5.0, clock=clock)
    engine: Any = pipeline.talker_engine
    pipeline.add("a", TEXT, params(num_frames=90))
    first = [chunk for _ in range(10) for chunk in pipeline.step()]
    assert first
    engine.step = list
    clock.now = 5.0
    *sound, final = pipeline.step()
    assert final.is_final
    assert final.error == "nothing came over talker -> code2wav for 5.0 s, the deadline is 5.0 s"
    assert sum(len(chunk.samples) for chunk in [*first, *sound]) == 10 * 16


@pytest.mark.parametrize("where", ["talker", "code2wav"])
def test_a_stage_that_fails_says_which_one_it_is(tiny_tts: Path, where: str) -> None:
    pipeline = make_pipeline(tiny_tts)
    pipeline.add("a", TEXT, params())
    pipeline.step()

    def die(*_: Any) -> Any:
        raise RuntimeError("no air")

    if where == "talker":
        engine: Any = pipeline.talker_engine
        step = engine.step
        engine.step = die
        sound, final = pipeline.step()
        assert len(sound.samples) == 16  # the frame that was there
        engine.step = step
    else:
        codec: Any = pipeline.codec
        pipeline.codec = type("Broken", (), {"decode": die})()  # type: ignore[assignment]
        final = run(pipeline)["a"].final
        pipeline.codec = codec
    assert final.error == f"stage '{where}' failed: RuntimeError: no air"
    assert speak(pipeline, {"b": params()})["b"].final.error is None


def test_an_endless_talker_ends_at_its_deadline_and_the_others_by_themselves(tiny_tts: Path) -> None:
    clock = Clock()
    pipeline = make_pipeline(tiny_tts, clock=clock)
    pipeline.add("endless", TEXT, params(num_frames=96, timeout_s=4.0))
    pipeline.add("a", TEXT, params())
    spoken: dict[str, Spoken] = {}
    while pipeline.has_unfinished_requests():
        clock.now += 0.1
        for chunk in pipeline.step():
            spoken.setdefault(chunk.request_id, Spoken()).chunks.append(chunk)
    assert spoken["endless"].final.error == "the utterance did not end within 4.0 s"
    assert 0 < spoken["endless"].final.num_frames < 96
    assert np.array_equal(spoken["a"].samples, expected(tiny_tts).samples)


def test_a_thinker_that_writes_nothing_is_an_error(tiny_speech: Path) -> None:
    spoken = speak(make_pipeline(tiny_speech), {"a": params(max_text_tokens=1)})["a"]
    assert spoken.final.error == "the thinker wrote nothing to speak"


def silence(max_samples: int, pieces: list[list[float]]) -> list[float]:
    trimmer = SilenceTrimmer(max_samples)
    out: list[float] = []
    for i, piece in enumerate(pieces):
        out += trimmer.push(np.asarray(piece, np.float32), is_last=i + 1 == len(pieces)).tolist()
    return out


def test_row_17_silence_in_front_is_bounded_and_later_pauses_stay() -> None:
    whole = [0.0] * 10 + [0.5, 0.0, 0.0, 0.0, 0.5]
    for size in (1, 3, 4, 15):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert silence(2, pieces) == [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.5]
        assert silence(0, pieces) == [0.5, 0.0, 0.0, 0.0, 0.5]
        assert silence(50, pieces) == whole
    assert silence(2, [[0.0] * 10]) == [0.0, 0.0]


def test_row_24_silence_that_was_held_back_is_not_heard_after_a_cancel(tiny_tts: Path) -> None:
    def held(pipeline: SpeechPipeline) -> list[Any]:
        pipeline.add("a", TEXT, params(num_frames=10, max_leading_silence_s=1.0))
        pipeline._live["a"].trimmer = SilenceTrimmer(50, threshold=2.0)  # nothing is loud
        return [chunk for _ in range(8) for chunk in pipeline.step()]

    pipeline = make_pipeline(tiny_tts)
    assert not any(len(chunk.samples) for chunk in held(pipeline))
    assert len(run(pipeline)["a"].samples) == 50  # where it ends by itself
    held(pipeline)
    pipeline.cancel("a")
    (final,) = pipeline.step()
    assert (final.finish_reason, len(final.samples)) == ("abort", 0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_row_17_the_bound_is_an_option_of_a_clone(tiny_tts: Path, seed: int) -> None:
    class Hushed:
        """Decodes 20 silent samples in front of the sound."""

        def __init__(self, codec: Any) -> None:
            self.codec = codec

        def decode(self, stream: Any, codes: Any) -> Any:
            is_first = stream.num_frames == 0
            samples = self.codec.decode(stream, codes)
            return np.concatenate([np.zeros(20, np.float32), samples]) if is_first else samples

    def leading(pipeline: SpeechPipeline, **fields: Any) -> int:
        pipeline.codec = Hushed(pipeline.codec)  # type: ignore[assignment]
        voice = Voice(x_vector=np.random.default_rng(seed).standard_normal(48))
        samples = speak(pipeline, {"a": params(seed=seed, voice=voice, **fields)})["a"].samples
        return int(np.flatnonzero(np.abs(samples) > 1e-3)[0])

    assert leading(make_pipeline(tiny_tts)) >= 20
    assert leading(make_pipeline(tiny_tts), max_leading_silence_s=0.02) <= 4


BAD_FIELDS: list[dict[str, Any]] = [
    {"max_frames": 20.5},
    {"min_frames": 1.5},
    {"top_k": "x"},
    {"codes_top_k": -3},
    {"codes_top_k": 1 << 40},
    {"voice": "ann"},
    {"codes_top_p": "a"},
    {"codes_temperature": float("nan")},
    {"repetition_penalty": 0},
    {"max_leading_silence_s": float("inf")},
    {"timeout_s": float("nan")},
    {"seed": "x"},
    {"seed": 1.5},
    {"language": None},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
def test_a_bad_field_is_refused_by_its_name_when_the_parameters_are_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SpeechParams(**fields)


LIMITS: list[dict[str, Any]] = [
    {"max_frames": 0},
    {"max_frames": 1 << 62},
    {"max_prompt_len": 0},
    {"timeout_s": 0.0},
    {"timeout_s": -1.0},
    {"timeout_s": float("nan")},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_limit_that_bounds_nothing_is_refused_by_its_name(tiny_tts: Path, limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limits))} must be"):
        SpeechPipeline(tiny_tts, **limits)


def test_token_ids_and_codes_are_never_rounded(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts)
    with pytest.raises(ValueError, match="token ids must be integers, got float64"):
        pipeline.add_ids("a", [1.5] * 12, params())
    with pytest.raises(ValueError, match=r"token ids must be below 2\^31"):
        pipeline.add_ids("a", [1 << 32] * 12, params())
    with pytest.raises(ValueError, match="reference codes must be integers, got float64"):
        pipeline.add("a", TEXT, params(voice=Voice(codes=[[1.5, 2, 3, 4]], text_ids=[5])))
    assert not pipeline.has_unfinished_requests()


@pytest.mark.parametrize("seconds", [1e20, 1e308])
def test_any_length_of_silence_may_stand_in_front(tiny_tts: Path, seconds: float) -> None:
    one = speak(make_pipeline(tiny_tts), {"a": params(max_leading_silence_s=seconds)})["a"]
    assert np.array_equal(one.samples, expected(tiny_tts).samples)


@pytest.mark.parametrize(
    "fields",
    [
        {"language": "english"},
        {"instruct": "softly"},
        {"whole_text_first": True},
        {"voice": Voice(x_vector=[1.0, 2.0, 3.0])},
        {"voice": Voice(codes=[[1, 2, 3, 4]], text_ids=[5])},
    ],
    ids=str,
)
def test_a_thinkers_pipeline_refuses_what_it_would_not_heed(tiny_speech: Path, fields: dict[str, Any]) -> None:
    pipeline = make_pipeline(tiny_speech)
    with pytest.raises(ValueError, match="a pipeline with a thinker takes a speaker alone"):
        pipeline.add("a", TEXT, params(**fields))
    assert not pipeline.has_unfinished_requests()


def test_a_talker_that_refuses_a_request_ends_it_alone(tiny_speech: Path) -> None:
    pipeline = make_pipeline(tiny_speech)
    start = pipeline._start_talker

    def refuse(key: str, *rest: Any, **fields: Any) -> None:
        if key.startswith("bad/"):
            raise TypeError("not like this")
        start(key, *rest, **fields)

    pipeline._start_talker = refuse  # type: ignore[method-assign]
    pipeline.add("a", TEXT, params())
    pipeline.add("bad", TEXT, params())
    spoken: dict[str, Spoken] = {}
    run(pipeline, spoken)
    assert spoken["bad"].final.error == "stage 'talker' failed: not like this"
    assert np.array_equal(spoken["a"].samples, expected(tiny_speech).samples)


class FailingReferences:
    def start(self, codes: Any) -> Any:
        raise RuntimeError("no reference")


def test_a_refused_request_leaves_nothing_behind(tiny_tts: Path) -> None:
    """Not in the engine, whose slots others need, nor in the talker or the channels."""
    pipeline = make_pipeline(tiny_tts)
    with pytest.raises(ValueError, match="speaker"):
        pipeline.add("a", TEXT, params(voice=Voice(speaker="nobody")))
    with pytest.raises(ValueError, match="codes"):
        pipeline.add("a", TEXT, params(voice=Voice(codes=[[1, 2]], text_ids=[5])))
    add_request: Any = pipeline.talker_engine.add_request

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("full")

    pipeline.talker_engine.add_request = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        pipeline.add("a", TEXT, params())
    pipeline.talker_engine.add_request = add_request  # type: ignore[method-assign]
    pipeline.references, references = FailingReferences(), pipeline.references  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no reference"):
        pipeline.add("a", TEXT, params())
    pipeline.references = references
    assert not pipeline.has_unfinished_requests()
    assert not pipeline.talker_engine.has_unfinished_requests()
    assert same(speak(pipeline)["a"], speak(make_pipeline(tiny_tts))["a"])


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tpu"])
def test_a_device_that_stages_do_not_run_on_is_refused_by_name(tiny_tts: Path, device: str) -> None:
    with pytest.raises(_core.Unsupported, match=f"device is '{device}': stages run on the CPU alone"):
        make_pipeline(tiny_tts, device=device)
    make_pipeline(tiny_tts, device="cpu")
