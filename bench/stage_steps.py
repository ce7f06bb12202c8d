"""What share of a step of many utterances is Python: the tiny speech pipeline, random weights.

    python bench/stage_steps.py [--requests 32] [--threads 2] [--no-thinker]

Prints (time outside of C++) / (time of the steps), the same without what the engines take, and the calls of
Python functions a request and step. With a thinker all requests write and speak at once.
Times are CPU times of the thread that drives the steps: what else the machine does
does not count, and what other threads compute for it neither.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltaic.stages.graph import Chunked
from deltaic.stages.speech import SpeechParams, SpeechPipeline

ROOT = Path(__file__).parents[1]
TEXT = "Once upon a time there was a little dog who liked to run"
NUM_WARM_UP = 12


class Timed:
    """An object whose named methods are timed; `counts`: calls of Python functions within them are counted too."""

    def __init__(self, inner: Any, *methods: str, counts: bool = True) -> None:
        self.inner, self.methods, self.counts = inner, methods, counts
        self.seconds = 0.0
        self.num_python_calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        return self._timed(method) if name in self.methods else method

    def _timed(self, method: Any) -> Any:
        def count(frame: Any, event: str, argument: Any) -> None:
            self.num_python_calls += event == "call"

        def call(*arguments: Any) -> Any:
            outer = sys.getprofile()
            if self.counts:
                sys.setprofile(count)
            begin = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.thread_time() - begin
                if self.counts:
                    sys.setprofile(outer)

        return call


@dataclass
class Profile:
    """Steps of a pipeline."""

    steps: list[float] = field(default_factory=list)  # seconds of the driving thread, of each
    outside: list[float] = field(default_factory=list)  # of these, outside of C++
    engines: float = 0.0  # of these, in the engines: their schedulers, and what goes into and comes out of C++
    num_calls_inside: int = 0  # of Python functions, while C++ ran

    @property
    def share(self) -> float:
        """Return the share of all steps that is spent outside of C++."""
        return sum(self.outside) / sum(self.steps)

    @property
    def stages_share(self) -> float:
        """Return that without what the engines take, as they do for any model."""
        return self.share - self.engines / sum(self.steps)


def add_requests(pipeline: SpeechPipeline, num_requests: int, num_frames: int) -> None:
    """Let requests run until their steps are steady; the tokenizer has met every token by then."""
    if pipeline.thinker_engine is not None and pipeline.tokenizer is not None:
        for token_id in range(pipeline.thinker_engine.vocab_size):
            pipeline.tokenizer.token_bytes(token_id)
    for i in range(num_requests):
        params = SpeechParams(seed=i, min_frames=num_frames, max_frames=num_frames, max_text_tokens=num_frames)
        pipeline.add(f"r{i}", TEXT, params)
    for _ in range(NUM_WARM_UP):
        pipeline.step()


def profile(pipeline: SpeechPipeline, num_steps: int) -> Profile:
    """Time steps of a pipeline whose requests are under way."""
    whole: Any = pipeline
    engines: list[Timed] = []
    parts = [Timed(whole.codec, "decode"), Timed(whole.talker, "take_text")]
    whole.codec, whole.talker = parts
    for name in ("talker_engine", "thinker_engine"):
        engine = getattr(whole, name)
        if engine is not None:
            engine.runner = Timed(engine.runner, "execute_model", "sample_tokens_async")
            parts.append(engine.runner)
            engines.append(Timed(engine, "step", counts=False))
            setattr(whole, name, engines[-1])
    result = Profile()
    for _ in range(num_steps):
        before = sum(part.seconds for part in parts)
        begin = time.thread_time()
        pipeline.step()
        result.steps.append(time.thread_time() - begin)
        result.outside.append(result.steps[-1] - (sum(part.seconds for part in parts) - before))
    inside = sum(part.seconds for part in parts[2:])
    result.engines = sum(engine.seconds for engine in engines) - inside
    result.num_calls_inside = sum(part.num_python_calls for part in parts)
    return result


def count_calls(pipeline: SpeechPipeline, num_steps: int) -> int:
    """Return the calls of Python functions of some steps."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(num_steps):
            pipeline.step()
    finally:
        sys.setprofile(None)
    return calls


def tiny_checkpoint(folder: Path, *, with_thinker: bool) -> Path:
    spec = importlib.util.spec_from_file_location("make_tiny_speech", ROOT / "examples" / "make_tiny_speech.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written: Path = module.write_checkpoint(folder, with_thinker=with_thinker)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-thinker", action="store_true", help="speak the text itself")
    options = parser.parse_args()
    shares, stages, medians, calls = [], [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder), with_thinker=not options.no_thinker)
        for _ in range(options.rounds):
            pipeline = SpeechPipeline(
                checkpoint,
                chunk=Chunked(4, 25),
                max_num_seqs=options.requests,
                max_frames=96,
                max_prompt_len=160,
                num_threads=options.threads,
            )
            add_requests(pipeline, options.requests, 90)
            calls = count_calls(pipeline, 5) / 5 / options.requests
            result = profile(pipeline, 40)
            shares.append(result.share)
            stages.append(result.stages_share)
            medians.append(statistics.median(result.steps))
    print(
        f"{options.requests} requests, {options.threads} threads: Python {100 * statistics.median(shares):.1f} % "
        f"of the steps, without the engines {100 * statistics.median(stages):.1f} %; median step "
        f"{1e3 * statistics.median(medians):.2f} ms, {calls:.1f} calls of Python functions a request and step"
    )


if __name__ == "__main__":
    main()
