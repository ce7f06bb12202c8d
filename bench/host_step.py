"""Time what Python and the bindings do in a decode step, without a model: a runner that has its tokens at once.

    python bench/host_step.py --batch 32 128 256

Every request decodes one token a step. For each batch it prints the median of many steps, in ms:
  schedule  Scheduler.schedule: the SchedulerOutput, converted to what the core reads
  update    Scheduler.update: the core's ModelRunnerOutput, converted, to EngineOutputs
  step      Engine.step, with both, less the time in the runner
  text      OutputProcessor.process of the step's outputs: their text, by deltas, and what a caller gets
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from deltaic import _core
from deltaic.checkpoint import resolve_model
from deltaic.engine import Engine
from deltaic.input_processor import InputProcessor
from deltaic.output_processor import OutputProcessor
from deltaic.sampling_params import RequestOutputKind, SamplingParams
from deltaic.scheduler_config import SchedulerConfig
from deltaic.tokenizer import load_tokenizer

_BLOCK_SIZE, _MAX_MODEL_LEN, _CONTEXT = 16, 4096, 40


class InstantRunner:
    """A ModelRunner whose every request gets the same token, and rejects its drafts."""

    def __init__(self, token_id: int, num_drafts: int) -> None:
        self._token_id, self._num_drafts = token_id, num_drafts
        self._output = _core.ModelRunnerOutput()
        self.seconds = 0.0  # spent here

    def execute_model(self, step: _core.SchedulerOutput) -> None:
        begin = time.perf_counter()
        if step.scheduled_new_reqs:
            req_ids = [*step.scheduled_cached_reqs.req_ids, *(new.req_id for new in step.scheduled_new_reqs)]
            self._output = _core.ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
                sampled_token_ids=[[self._token_id]] * len(req_ids),
                draft_token_ids=[[self._token_id] * self._num_drafts] * len(req_ids) if self._num_drafts else [],
            )
        self.seconds += time.perf_counter() - begin

    def sample_tokens_async(self) -> InstantRunner:
        return self

    def get_output(self) -> _core.ModelRunnerOutput:
        return self._output


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that also notes how long each call took."""

    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args)
        seconds.append(time.perf_counter() - begin)
        return result

    return call


def measure(batch: int, num_steps: int, *, prefix_caching: bool, num_drafts: int) -> dict[str, float]:
    tokenizer = load_tokenizer(resolve_model(None))
    assert tokenizer is not None
    max_tokens = num_steps + 100
    num_blocks = batch * (-(-(_CONTEXT + max_tokens + num_drafts) // _BLOCK_SIZE)) + 1
    cache = _core.CacheManager(
        _core.CacheManagerOptions(
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            mamba_block_size=0,
            num_snapshot_slots=0,
            first_snapshot_slot=batch,
            enable_prefix_caching=prefix_caching,
        )
    )
    config = SchedulerConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=batch * _CONTEXT,
        max_model_len=_MAX_MODEL_LEN,
        block_size=_BLOCK_SIZE,
        num_kv_cache_groups=2,
        enable_prefix_caching=prefix_caching,
        num_speculative_tokens=num_drafts,
    )
    runner: Any = InstantRunner(tokenizer.encode(" the")[-1], num_drafts)
    engine = Engine(runner, cache, config, vocab_size=tokenizer.vocab_size)
    inputs = InputProcessor(tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=_MAX_MODEL_LEN)
    outputs = OutputProcessor(tokenizer)
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for i in range(batch):
        prompt = [(7 * i + j) % tokenizer.vocab_size for j in range(_CONTEXT)]
        given = inputs.process({"prompt_token_ids": prompt}, params)
        for req_id in outputs.add_request(str(i), given):
            engine.add_request(req_id, prompt, params)
    while engine.stats().num_generated_tokens < 4 * batch:
        outputs.process(engine.step())
    seconds: dict[str, list[float]] = {name: [] for name in ("schedule", "update", "step", "text")}
    scheduler: Any = engine._scheduler
    scheduler.schedule = timed(scheduler.schedule, seconds["schedule"])
    scheduler.update = timed(scheduler.update, seconds["update"])
    process = timed(outputs.process, seconds["text"])
    for _ in range(num_steps):
        in_runner, begin = runner.seconds, time.perf_counter()
        made = engine.step()
        seconds["step"].append(time.perf_counter() - begin - (runner.seconds - in_runner))
        assert len(made) == batch
        process(made)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--drafts", type=int, default=0, help="of each request in a step; all are rejected")
    args = parser.parse_args()
    print("requests " + " ".join(f"{name:>9}" for name in ("schedule", "update", "step", "text")))
    for batch in args.batch:
        times = measure(batch, args.steps, prefix_caching=args.prefix_caching, num_drafts=args.drafts)
        print(f"{batch:8} " + " ".join(f"{value:9.3f}" for value in times.values()), flush=True)


if __name__ == "__main__":
    main()
