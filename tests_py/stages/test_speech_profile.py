"""Where the time of many utterances goes: bench/stage_steps.py prints the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from deltaic.stages.graph import Chunked
from speech_driver import make_pipeline

NUM_REQUESTS, NUM_STEPS, NUM_ROUNDS = 32, 40, 3
BENCH = Path(__file__).parents[2] / "bench" / "stage_steps.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("stage_steps", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stage_steps"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_thinker", [False, True])
def test_steps_of_32_requests_are_the_models_time_and_call_no_python_for_their_rows(
    bench: Any, tiny_tts: Path, tiny_speech: Path, with_thinker: bool
) -> None:
    shares = []
    for _ in range(NUM_ROUNDS):
        folder = tiny_speech if with_thinker else tiny_tts
        pipeline = make_pipeline(folder, max_num_seqs=NUM_REQUESTS, chunk=Chunked(4, 25), num_threads=1)
        bench.add_requests(pipeline, NUM_REQUESTS, 90)
        num_calls = bench.count_calls(pipeline, 5) / 5 / NUM_REQUESTS
        profile = bench.profile(pipeline, NUM_STEPS)
        assert pipeline.talker_engine.stats().num_running == NUM_REQUESTS
        assert profile.num_calls_inside == 0  # native stages call no Python
        # An output of an engine a request; a thinker's token is decoded and given to the caller too.
        assert num_calls < (10 if with_thinker else 2.5)
        shares.append(profile.stages_share)
    # Of the stages: what the engines' schedulers take is that of any model. CPU time of the one thread there is; the
    # best round, as caches are shared with what else runs.
    assert min(shares) < 0.1
