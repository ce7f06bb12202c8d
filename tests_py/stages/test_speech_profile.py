from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from deltaic.stages.graph import Chunked
from speech_driver import TEXT, make_pipeline, params

NUM_REQUESTS, NUM_WARM_UP, NUM_STEPS = 32, 10, 40


class Timed:
    """An object whose named methods are timed, and during which calls of Python functions are counted."""

    def __init__(self, inner: Any, methods: tuple[str, ...]) -> None:
        self.inner, self.methods = inner, methods
        self.seconds = 0.0
        self.num_python_calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        return self._timed(method) if name in self.methods else method

    def _timed(self, method: Any) -> Any:
        def count(frame: Any, event: str, argument: Any) -> None:
            self.num_python_calls += event == "call"

        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            sys.setprofile(count)
            try:
                return method(*arguments)
            finally:
                sys.setprofile(None)
                self.seconds += time.perf_counter() - begin

        return call


def test_steps_of_32_requests_are_the_models_time_and_call_no_python_for_their_rows(tiny_tts: Path) -> None:
    pipeline = make_pipeline(tiny_tts, max_num_seqs=NUM_REQUESTS, chunk=Chunked(4, 25))
    for i in range(NUM_REQUESTS):
        pipeline.add(f"r{i}", TEXT, params(seed=i, num_frames=90))
    for _ in range(NUM_WARM_UP):
        pipeline.step()
    engine: Any = pipeline.talker_engine
    engine.runner = runner = Timed(engine.runner, ("execute_model", "sample_tokens_async"))
    pipeline.codec = codec = Timed(pipeline.codec, ("decode",))  # type: ignore[assignment]
    steps, rest = [], []
    for _ in range(NUM_STEPS):
        model_before = runner.seconds + codec.seconds
        begin = time.perf_counter()
        pipeline.step()
        steps.append(time.perf_counter() - begin)
        rest.append(steps[-1] - (runner.seconds + codec.seconds - model_before))
    assert engine.stats().num_running == NUM_REQUESTS
    assert runner.num_python_calls == 0
    # All of Python, the scheduler included; the median of it, as other work of the machine must not count.
    assert statistics.median(rest) * NUM_STEPS < 0.1 * sum(steps)
