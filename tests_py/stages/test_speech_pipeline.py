"""The tiny pipeline from text to samples. Tests named after a row are of what users of other engines met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic.sampling_params import SamplingParams
from deltaic.stages.graph import Chunked, Full
from deltaic.stages.speech import SpeechParams, SpeechPipeline, Voice
from deltaic.stages.speech.memory import StageBudget, check_budgets
from speech_driver import TEXT, Spoken, make_pipeline, params, run, same, speak

OTHERS = {f"other {i}": params(seed=100 + i, num_frames=20 + 3 * i) for i in range(4)}
CHUNKS = {"1": Chunked(1, 1), "7": Chunked(7, 7), "25": Chunked(25, 25), "4 then 25": Chunked(4, 25), "all": Full()}


@pytest.fixture(params=["tts", "thinker"])
def checkpoint(request: pytest.FixtureRequest, tiny_tts: Path, tiny_speech: Path) -> Path:
    return tiny_tts if request.param == "tts" else tiny_speech


@pytest.fixture
def alone(checkpoint: Path) -> Spoken:
    return speak(make_pipeline(checkpoint))["a"]


def test_the_utterance_is_as_long_as_its_frames(alone: Spoken) -> None:
    assert len(alone.frames) == alone.final.num_frames == 30
    assert len(alone.samples) == 30 * 16
    assert alone.final.finish_reason == "length"
    assert np.isfinite(alone.samples).all()
    assert alone.samples.std() > 0.01


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("with_others", [False, True], ids=["alone", "with others"])
def test_row_3_and_9_a_seed_is_the_same_sound_in_any_batch_and_chunks(
    checkpoint: Path, alone: Spoken, chunk: Any, with_others: bool
) -> None:
    requests = {"a": params()} | (OTHERS if with_others else {})
    spoken = speak(make_pipeline(checkpoint, chunk=chunk), requests)
    assert same(spoken["a"], alone)
    for request_id, one in spoken.items():
        assert len(one.samples) == 16 * len(one.frames) == 16 * requests[request_id].max_frames


def test_row_1_a_prompt_whose_last_part_is_one_token_gives_the_same_sound(tiny_tts: Path) -> None:
    expected = speak(make_pipeline(tiny_tts))["a"]
    # The prompt has 10 tokens: 5 of the role, 4 of the codec's prefix, one of text.
    for budget in (9, 3, 1):
        split = speak(make_pipeline(tiny_tts, max_num_batched_tokens=budget))["a"]
        assert same(split, expected)


def test_row_30_chunked_prefill_of_the_talker_gives_the_same_sound(checkpoint: Path, alone: Spoken) -> None:
    spoken = speak(make_pipeline(checkpoint, max_num_batched_tokens=9), {"a": params()} | OTHERS)
    assert same(spoken["a"], alone)


def test_row_2_seeded_requests_share_one_call_of_the_predictor_a_step(tiny_tts: Path) -> None:
    requests = {f"r{i}": params(seed=i) for i in range(5)}
    pipeline = make_pipeline(tiny_tts)
    together = speak(pipeline, requests)
    assert pipeline.talker.num_predictor_calls == 30
    for request_id, one in requests.items():
        assert same(speak(make_pipeline(tiny_tts), {request_id: one})[request_id], together[request_id])


def reference(seed: int, num_frames: int = 6) -> Voice:
    rng = np.random.default_rng(seed)
    return Voice(
        x_vector=rng.standard_normal(48) * 0.3, codes=rng.integers(0, 64, (num_frames, 4)), text_ids=[20 + seed, 21, 22]
    )


def test_row_4_two_clones_at_once_each_speak_in_their_own_voice(tiny_tts: Path) -> None:
    requests = {f"voice {i}": params(voice=reference(i)) for i in range(2)}
    together = speak(make_pipeline(tiny_tts), requests)
    for request_id, one in requests.items():
        assert same(speak(make_pipeline(tiny_tts), {request_id: one})[request_id], together[request_id])
    assert together["voice 0"].frames != together["voice 1"].frames


def test_row_14_a_clones_reference_is_the_context_of_every_chunk(tiny_tts: Path) -> None:
    voice = reference(3)
    spoken = {
        name: speak(make_pipeline(tiny_tts, chunk=chunk), {"a": params(voice=voice)})["a"]
        for name, chunk in CHUNKS.items()
    }
    codec = make_pipeline(tiny_tts).codec
    frames = np.asarray(spoken["all"].frames, np.int32)
    whole = codec.decode(codec.start(), np.concatenate([voice.codes, frames]))
    for one in spoken.values():
        assert np.array_equal(one.samples, whole[len(voice.codes) * 16 :])
    assert not np.array_equal(codec.decode(codec.start(), frames), spoken["all"].samples)


def test_row_29_a_reference_is_known_by_its_content_and_not_by_its_name(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts)
    first, *others = (speak(pipeline, {"a": params(voice=reference(1))})["a"] for _ in range(3))
    assert pipeline.references.num_hits == 2
    assert all(same(one, first) for one in others)  # no utterance goes on where another has ended
    named = speak(pipeline, {"a": params(voice=replace(reference(1), speaker="ann"))})["a"]
    assert pipeline.references.num_hits == 3
    assert same(named, first)  # its x-vector speaks, whatever it is called
    speak(pipeline, {"a": params(voice=reference(2))})
    assert pipeline.references.num_hits == 3


def test_row_6_a_prefill_beside_a_decode_keeps_each_requests_rows(checkpoint: Path, alone: Spoken) -> None:
    pipeline = make_pipeline(checkpoint)
    pipeline.add("first", "Tell me", params(seed=1, num_frames=40))
    spoken: dict[str, Spoken] = {}
    for _ in range(5):
        for chunk in pipeline.step():
            spoken.setdefault(chunk.request_id, Spoken()).chunks.append(chunk)
    pipeline.add("a", TEXT, params())
    run(pipeline, spoken)
    assert same(spoken["a"], alone)
    expected = speak(make_pipeline(checkpoint), {"first": params(seed=1, num_frames=40)}, "Tell me")["first"]
    assert np.array_equal(spoken["first"].samples, expected.samples)


def test_row_11_a_preempted_talker_goes_on_exactly(checkpoint: Path, alone: Spoken) -> None:
    pipeline = make_pipeline(checkpoint, num_blocks=9, max_frames=40, max_prompt_len=64)
    spoken = speak(pipeline, {"a": params()} | OTHERS)
    assert pipeline.talker_engine.stats().num_preemptions > 0
    assert same(spoken["a"], alone)
    roomy = speak(make_pipeline(checkpoint), {"a": params()} | OTHERS)
    for request_id in OTHERS:
        assert same(spoken[request_id], roomy[request_id])


def test_row_15_and_23_the_same_request_again_is_the_same_sound(checkpoint: Path, alone: Spoken) -> None:
    pipeline = make_pipeline(checkpoint)
    for _ in range(4):
        assert same(speak(pipeline)["a"], alone)
    assert pipeline.talker_engine.stats().cache.num_hit_tokens == 0


@pytest.mark.parametrize("seed", [None, -1])
def test_row_23_no_seed_is_another_sound_each_time(tiny_tts: Path, seed: int | None) -> None:
    pipeline = make_pipeline(tiny_tts)
    first, second = (speak(pipeline, {"a": params(seed=seed)})["a"] for _ in range(2))
    assert first.frames != second.frames


@pytest.mark.parametrize("seed", [None, -1])
def test_row_23_no_seed_is_no_seed_of_the_residual_codes_either(tiny_tts: Path, seed: int | None) -> None:
    pipeline = make_pipeline(tiny_tts)
    first, second = (speak(pipeline, {"a": params(seed=seed, do_sample=False)})["a"].frames[0] for _ in range(2))
    assert first[0] == second[0]  # chosen by nothing but the model
    assert first[1:] != second[1:]


def test_sampling_of_the_residual_codes_is_the_callers(tiny_tts: Path) -> None:
    def residual(**fields: Any) -> list[list[int]]:
        return speak(make_pipeline(tiny_tts), {"a": params(do_sample=False, **fields)})["a"].frames

    greedy = residual(codes_do_sample=False)
    assert residual(codes_top_k=1) == greedy
    assert residual(codes_top_p=1e-6) == greedy
    hot = residual(codes_temperature=2.0, codes_top_k=0)
    assert hot[0][0] == greedy[0][0]
    assert hot != greedy
    assert len({code for frame in hot for code in frame[1:]}) > 30


@pytest.mark.parametrize(
    "fields", [{"codes_temperature": 0.0}, {"codes_top_k": -1}, {"codes_top_p": 0.0}, {"temperature": -1.0}]
)
def test_sampling_out_of_range_is_refused_alone(tiny_tts: Path, fields: dict[str, Any]) -> None:
    pipeline = make_pipeline(tiny_tts)
    with pytest.raises(ValueError, match=r"temperature|top_k|top_p"):
        pipeline.add("a", TEXT, params(**fields))
    assert not pipeline.has_unfinished_requests()
    assert speak(pipeline)["a"].final.error is None


@pytest.mark.parametrize("seed", [-5, 0, 2**62])
def test_any_seed_is_a_seed(tiny_tts: Path, seed: int) -> None:
    seeds = (seed, seed, np.int64(seed))
    first, *others = (speak(make_pipeline(tiny_tts), {"a": params(seed=one)})["a"] for one in seeds)
    assert all(same(first, other) for other in others)


class EndsAtOnce(SpeechParams):
    """Makes the end far likelier than any code."""

    def talker_params(self, codebook_size: int, eos_id: int) -> SamplingParams:
        return replace(super().talker_params(codebook_size, eos_id), logit_bias={eos_id: 100.0})


@pytest.mark.parametrize("min_frames", [2, 0])
def test_row_16_an_early_end_waits_for_the_least_frames(tiny_tts: Path, min_frames: int) -> None:
    spoken = speak(make_pipeline(tiny_tts), {"a": EndsAtOnce(seed=1, max_frames=20, min_frames=min_frames)})["a"]
    assert len(spoken.frames) == min_frames
    assert spoken.final.finish_reason == "stop"
    assert spoken.final.error is None
    assert len(spoken.samples) == 16 * min_frames


def test_row_18_a_talker_that_does_not_end_is_bounded_and_says_so(tiny_tts: Path) -> None:
    spoken = speak(make_pipeline(tiny_tts, max_frames=50), {"a": params(num_frames=2000)})["a"]
    assert len(spoken.frames) == 50
    assert spoken.final.finish_reason == "length"


def test_row_20_a_text_model_is_refused_by_name(default_model: Path) -> None:
    with pytest.raises(ValueError, match="which does not speak; deltaic speaks with qwen3_tts"):
        SpeechPipeline(default_model)


def test_row_22_watching_the_thinker_changes_nothing_of_what_it_writes(tiny_speech: Path) -> None:
    def written(pipeline: SpeechPipeline, *, watched: bool) -> list[int]:
        engine = pipeline.thinker_engine
        assert engine is not None
        if not watched:
            engine.runner.set_step_hook(None)
        engine.add_request("x", list(range(40, 60)), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            tokens += [token for output in engine.step() for token in output.new_token_ids]
        return tokens

    plain = written(make_pipeline(tiny_speech), watched=False)
    assert len(plain) == 24
    assert written(make_pipeline(tiny_speech), watched=True) == plain


def test_row_24_a_new_utterance_stops_the_old_one_at_once(checkpoint: Path) -> None:
    pipeline = make_pipeline(checkpoint, chunk=Chunked(1, 1))
    pipeline.add("turn", TEXT, params(num_frames=90))
    old = [chunk for _ in range(25) for chunk in pipeline.step() if len(chunk.samples)]
    assert old
    assert not any(chunk.is_final for chunk in old)
    pipeline.cancel("turn")
    pipeline.add("turn", TEXT, params(seed=8))
    spoken: dict[str, Spoken] = {}
    first = pipeline.step()
    assert first[0].is_final
    assert first[0].finish_reason == "abort"
    assert len(first[0].samples) == 0
    spoken["turn"] = Spoken(first[1:])
    run(pipeline, spoken)
    expected = speak(make_pipeline(checkpoint), {"turn": params(seed=8)})["turn"]
    assert np.array_equal(spoken["turn"].samples, expected.samples)
    assert not pipeline.talker_engine.has_unfinished_requests()


def test_row_24_each_of_several_turns_gets_its_end(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts)
    for _ in range(3):
        pipeline.add("turn", TEXT, params())
        pipeline.cancel("turn")
    pipeline.cancel("turn")
    chunks = pipeline.step()
    assert [(chunk.is_final, chunk.finish_reason) for chunk in chunks] == [(True, "abort")] * 3
    assert not pipeline.has_unfinished_requests()


def test_row_25_live_streams_start_early_and_have_no_gaps(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts, chunk=Chunked(4, 10))
    for i in range(8):
        pipeline.add(f"r{i}", TEXT, params(seed=i, num_frames=60))
    arrivals: dict[str, list[int]] = {}
    step = 0
    while pipeline.has_unfinished_requests():
        step += 1
        for chunk in pipeline.step():
            if len(chunk.samples):
                arrivals.setdefault(chunk.request_id, []).append(step)
    assert len(arrivals) == 8
    for steps in arrivals.values():
        assert steps[0] <= 5  # of 60 and more
        assert max(np.diff(steps)) <= 10
        assert len(steps) == 7


def test_row_26_stages_that_do_not_fit_together_are_named(tiny_speech: Path) -> None:
    budgets = {"thinker": StageBudget(100, 50), "talker": StageBudget(80, 40), "code2wav": StageBudget(30)}
    check_budgets(budgets, 300)
    with pytest.raises(
        MemoryError, match="stage 'talker' does not fit: it needs 80 bytes for weights and 40 for caches, 50"
    ):
        check_budgets(budgets, 200)
    with pytest.raises(MemoryError, match="stage 'talker' does not fit"):
        make_pipeline(tiny_speech, memory_bytes=3_600_000)
    speak(make_pipeline(tiny_speech, memory_bytes=64 << 20))


def test_row_27_the_last_sound_comes_before_the_end_which_comes_once(checkpoint: Path) -> None:
    for num_frames in (1, 4, 5, 29, 30):
        spoken = speak(make_pipeline(checkpoint), {"a": params(num_frames=num_frames)})["a"]
        assert len(spoken.samples) == 16 * num_frames
        assert spoken.final.num_frames == num_frames


def test_row_31_a_malformed_request_is_refused_alone(checkpoint: Path, alone: Spoken) -> None:
    pipeline = make_pipeline(checkpoint)
    pipeline.add("a", TEXT, params())
    with pytest.raises(ValueError, match="there is no speaker 'nobody'; the checkpoint has ann, bob"):
        pipeline.add("b", TEXT, params(voice=Voice("nobody")))
    with pytest.raises(ValueError, match="the text to speak is empty"):
        pipeline.add("b", "  ")
    with pytest.raises(ValueError, match="is in use"):
        pipeline.add("a", TEXT, params())
    assert same(run(pipeline)["a"], alone)


@pytest.mark.parametrize(
    ("voice", "message"),
    [
        (Voice(codes=[[1, 2, 3]], text_ids=[5]), r"reference codes are \(1, 3\), wanted \[frames, 4\]"),
        (Voice(codes=[[1, 2, 3, 99]], text_ids=[5]), "code 99 is outside a codebook of 64"),
        (Voice(codes=[[1, 2, 3, 4]]), "needs the text that it says"),
        (Voice(x_vector=[1.0, 2.0]), "the x-vector has 2 values, wanted 48"),
        (Voice(x_vector=[float("nan")] * 48), "is not finite"),
    ],
)
def test_row_31_a_malformed_reference_is_refused_alone(tiny_tts: Path, voice: Voice, message: str) -> None:
    pipeline = make_pipeline(tiny_tts)
    pipeline.add("a", TEXT, params())
    with pytest.raises(ValueError, match=message):
        pipeline.add("b", TEXT, params(voice=voice))
    assert list(run(pipeline)) == ["a"]
    pipeline.add("b", TEXT, params())
    assert run(pipeline)["b"].final.error is None


def test_a_thinker_answers_the_caller_and_the_talker(tiny_speech: Path) -> None:
    spoken = speak(make_pipeline(tiny_speech))["a"]
    text = "".join(chunk.text for chunk in spoken.chunks)
    token_ids = [token for chunk in spoken.chunks for token in chunk.token_ids]
    pipeline = make_pipeline(tiny_speech)
    assert pipeline.tokenizer is not None
    assert len(token_ids) == 10
    assert text == pipeline.tokenizer.decode(token_ids)
    assert len(spoken.samples) == 30 * 16
    silent = speak(pipeline, {"a": params(wants_sound=False), "b": params()})
    assert [token for chunk in silent["a"].chunks for token in chunk.token_ids] == token_ids
    assert len(silent["a"].samples) == 0
    assert silent["a"].final.finish_reason == "length"
    assert same(silent["b"], spoken)


@pytest.mark.parametrize("pause", [2, 5])
def test_a_talker_waits_for_a_thinker_that_is_slower(tiny_speech: Path, pause: int) -> None:
    pipeline = make_pipeline(tiny_speech)
    engine: Any = pipeline.thinker_engine
    step, calls = engine.step, iter(range(10**6))
    engine.step = lambda: [] if next(calls) % pause else step()
    assert same(speak(pipeline)["a"], speak(make_pipeline(tiny_speech))["a"])


def test_text_alone_needs_a_thinker(tiny_tts: Path) -> None:
    with pytest.raises(ValueError, match="there is no thinker"):
        make_pipeline(tiny_tts).add("a", TEXT, params(wants_sound=False))


@pytest.mark.parametrize("name", ["max_frames", "min_frames", "max_leading_silence_s", "timeout_s", "max_text_tokens"])
def test_parameters_out_of_range_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SpeechParams(**{name: -1})


def test_a_language_that_the_checkpoint_does_not_have_is_named(tiny_tts: Path) -> None:
    with pytest.raises(ValueError, match="does not speak 'klingon'; it has auto, chinese, english"):
        make_pipeline(tiny_tts).add("a", TEXT, params(language="klingon"))


def test_voice_language_and_instructions_are_heard(tiny_tts: Path) -> None:
    variants = [
        {},
        {"voice": Voice("ann")},
        {"voice": Voice("bob")},
        {"language": "English"},
        {"instruct": "whisper"},
        {"whole_text_first": True},
        {"do_sample": False, "codes_do_sample": False},
    ]
    sounds = [speak(make_pipeline(tiny_tts), {"a": params(**one)})["a"].frames for one in variants]
    assert len({str(frames) for frames in sounds}) == len(variants)
