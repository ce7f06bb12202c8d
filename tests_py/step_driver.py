"""Drives a ModelRunner without a scheduler: a test says which request runs how many tokens in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from deltaic import _core
from device import CORE_DEVICE

MAX_MODEL_LEN = 256
BLOCK_SIZE = 16


def make_runner(
    checkpoint: Path,
    max_num_reqs: int = 8,
    device: _core.Device = CORE_DEVICE,
    dtype: _core.DType = _core.DType.f32,
) -> Any:
    """Make a runner whose caches start full of NaN, for max_num_reqs requests of MAX_MODEL_LEN tokens."""
    plan = _core.MemoryPlanOptions(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_reqs,
        block_size=BLOCK_SIZE,
        kv_dtype=dtype,
        conv_state_dtype=dtype,
    )
    kv_cache = _core.make_kv_cache_groups(_core.load_model_config(checkpoint), plan)
    kv_cache.num_blocks = 1 + max_num_reqs * MAX_MODEL_LEN // BLOCK_SIZE
    options = _core.RunnerOptions(
        device=device,
        dtype=dtype,
        max_num_reqs=max_num_reqs,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=max_num_reqs * MAX_MODEL_LEN,
        num_threads=2,
        poison_caches=True,
    )
    return _core.ModelRunner(checkpoint, kv_cache, options)


@dataclass(slots=True)
class Row:
    """What the driver knows of one request."""

    prompt: list[int]
    block_ids: list[list[int]]
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    is_known: bool = False  # to the runner


class StepDriver:
    """Greedy requests on one runner. Blocks are handed out whole, one request after another."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.rows: dict[str, Row] = {}
        self._finished: list[str] = []

    def add(self, req_id: str, prompt: list[int]) -> Row:
        """Add a request; it runs when it is scheduled."""
        taken = {i for row in self.rows.values() for i in row.block_ids[0]}
        free = [i for i in range(1, self.runner.num_blocks) if i not in taken]
        blocks = free[: MAX_MODEL_LEN // BLOCK_SIZE]
        groups = [blocks] if self.runner.gdn_group_id < 0 else [blocks, [blocks[0]]]
        row = self.rows[req_id] = Row(prompt, groups)
        return row

    def finish(self, req_id: str) -> None:
        """End a request at the next step."""
        del self.rows[req_id]
        self._finished.append(req_id)

    def step(self, num_tokens: dict[str, int]) -> None:
        """Run num_tokens[req_id] tokens of each request, and append what was sampled to its output."""
        new = [i for i in num_tokens if not self.rows[i].is_known]
        known = [i for i in num_tokens if self.rows[i].is_known]
        output = self._run(
            _core.SchedulerOutput(
                scheduled_new_reqs=[
                    _core.NewRequestData(
                        req_id=i,
                        prompt_token_ids=self.rows[i].prompt,
                        sampling_params=_core.SamplingParams(temperature=0.0),
                        block_ids=self.rows[i].block_ids,
                    )
                    for i in new
                ],
                scheduled_cached_reqs=_core.CachedRequestData(
                    req_ids=known,
                    num_computed_tokens=[self.rows[i].num_computed_tokens for i in known],
                    num_output_tokens=[len(self.rows[i].output) for i in known],
                    new_block_ids=[None] * len(known),
                ),
                num_scheduled_tokens=num_tokens,
                total_num_scheduled_tokens=sum(num_tokens.values()),
                finished_req_ids=self._finished,
            )
        )
        self._finished = []
        assert set(output.req_ids) == set(num_tokens)
        for i, count in num_tokens.items():
            row = self.rows[i]
            row.is_known = True
            row.num_computed_tokens += count
            sampled = output.sampled_token_ids[output.req_id_to_index[i]]
            has_all = row.num_computed_tokens == len(row.prompt) + len(row.output)
            assert len(sampled) == (1 if has_all else 0)
            row.output += sampled

    def prefill(self, req_id: str, chunk_size: int) -> None:
        """Run a request's prompt in chunks, alone."""
        row = self.rows[req_id]
        while row.num_computed_tokens < len(row.prompt):
            self.step({req_id: min(chunk_size, len(row.prompt) - row.num_computed_tokens)})

    def decode(self, num_steps: int) -> None:
        """Run decode steps of all requests, in one batch."""
        for _ in range(num_steps):
            self.step(dict.fromkeys(self.rows, 1))

    def states(self, req_id: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the conv [conv_dim, columns] and recurrent [heads, value_dim, key_dim] state of a request."""
        slot = self.runner.gdn_state_slots[req_id]
        cache = next(one for one in self.runner.gdn_state if one.layer == layer)
        return cache.conv.numpy()[slot], cache.temporal.numpy()[slot]

    def _run(self, scheduled: Any) -> Any:
        assert self.runner.execute_model(scheduled) is None
        return self.runner.sample_tokens()
