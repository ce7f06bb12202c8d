"""Against goldens of transformers (Qwen3-Omni's talker and code2wav) and qwen-tts, from random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic.stages.graph import Chunked, Full
from deltaic.stages.speech import SpeechParams, SpeechPipeline, Voice
from deltaic.stages.speech.prompt import Prompt

DATA = Path(__file__).parents[1] / "data" / "speech"
GREEDY = SpeechParams(do_sample=False, repetition_penalty=1.0, codes_do_sample=False, min_frames=24, max_frames=24)
SAMPLE_TOLERANCE = 1e-4


def load(name: str, **options: Any) -> tuple[SpeechPipeline, Any]:
    sizes = {"max_num_seqs": 4, "max_frames": 64, "max_prompt_len": 64, "num_threads": 2, "poison_caches": True}
    return SpeechPipeline(DATA / name, **(sizes | options)), np.load(DATA / name / "golden.npz")


def add_omni(pipeline: SpeechPipeline, golden: Any, request_id: str = "a") -> None:
    pipeline.add_rows(request_id, Prompt(golden["prompt"], golden["trailing"], golden["pad"]), GREEDY)


def codes_of(pipeline: SpeechPipeline) -> Any:
    taken: list[Any] = []
    pipeline.on_codes = lambda request_id, codes: taken.append(codes) if request_id == "a" else None
    samples = []
    while pipeline.has_unfinished_requests():
        for chunk in pipeline.step():
            assert chunk.error is None, chunk.error
            if chunk.request_id == "a":
                samples.append(chunk.samples)
    return np.concatenate(taken), np.concatenate(samples)


@pytest.mark.parametrize("chunk", [Full(), Chunked(1, 1), Chunked(4, 7)], ids=str)
def test_omni_talker_predictor_and_code2wav_match_transformers(chunk: Any) -> None:
    pipeline, golden = load("omni", chunk=chunk)
    add_omni(pipeline, golden)
    codes, samples = codes_of(pipeline)
    assert codes.tolist() == golden["codes"].tolist()
    assert len(samples) == len(golden["samples"]) == 1920 * 24 - 555
    assert np.abs(samples - golden["samples"]).max() < SAMPLE_TOLERANCE


def test_omni_projections_match_transformers() -> None:
    pipeline, golden = load("omni")
    assert np.abs(pipeline.talker.project_text(golden["thinker"]) - golden["text_rows"]).max() < 1e-5
    assert np.abs(pipeline.talker.project_hidden(golden["thinker"]) - golden["hidden_rows"]).max() < 1e-5


def tts_cases(golden: Any) -> dict[str, tuple[SpeechParams, Any]]:
    clone = Voice(
        x_vector=golden["speaker_vector"], codes=golden["reference"], text_ids=golden["reference_text"].tolist()
    )
    return {
        "speaker": (GREEDY.with_fields(voice=Voice("ann"), language="English"), ()),
        "auto": (GREEDY, golden["instruct"].tolist()),
        "dialect": (GREEDY.with_fields(voice=Voice("bob"), whole_text_first=True), ()),
        "x_vector": (GREEDY.with_fields(voice=Voice(x_vector=golden["speaker_vector"]), language="chinese"), ()),
        "clone": (GREEDY.with_fields(voice=clone, language="english"), ()),
    }


@pytest.mark.parametrize("case", ["speaker", "auto", "dialect", "x_vector", "clone"])
def test_tts_prompts_talker_and_predictor_match_qwen_tts(case: str) -> None:
    pipeline, golden = load("tts")
    params, instruct = tts_cases(golden)[case]
    pipeline.add_ids("a", golden["ids"].tolist(), params, instruct_ids=instruct)
    codes, _ = codes_of(pipeline)
    assert codes.tolist() == golden[case].tolist()


@pytest.mark.parametrize("chunk", [Full(), Chunked(1, 1), Chunked(4, 7)], ids=str)
def test_tts_samples_match_qwen_tts(chunk: Any) -> None:
    pipeline, golden = load("tts", chunk=chunk)
    params, _ = tts_cases(golden)["speaker"]
    pipeline.add_ids("a", golden["ids"].tolist(), params)
    _, samples = codes_of(pipeline)
    assert len(samples) == len(golden["samples"]) == 1920 * 24
    assert np.abs(samples - golden["samples"]).max() < SAMPLE_TOLERANCE


def test_row_12_a_long_utterance_does_not_drift_from_the_reference() -> None:
    pipeline, golden = load("tts", max_frames=150)
    params, _ = tts_cases(golden)["speaker"]
    pipeline.add_ids("a", golden["ids"].tolist(), params.with_fields(min_frames=150, max_frames=150))
    codes, _ = codes_of(pipeline)
    assert codes.shape == (150, 4)
    assert codes.tolist() == golden["long"].tolist()


def test_row_12_greedy_codes_stay_with_the_reference_in_any_batch() -> None:
    pipeline, golden = load("tts")
    cases = tts_cases(golden)
    pipeline.add_ids("a", golden["ids"].tolist(), cases["speaker"][0])
    for i, case in enumerate(("dialect", "clone", "x_vector")):
        pipeline.add_ids(f"other {i}", golden["ids"].tolist(), cases[case][0])
    codes, samples = codes_of(pipeline)
    assert codes.tolist() == golden["speaker"].tolist()
    assert np.abs(samples - golden["samples"]).max() < SAMPLE_TOLERANCE
