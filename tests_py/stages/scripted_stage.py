"""A stage whose hooks are scripted, for tests of the runner around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from deltaic import _core
from deltaic.stages import PredictorInputs, Preprocessed, StageModel, StageRunner, Traits

HIDDEN = 4
NUM_CODES = 3


def row(req_id: str, first: int, num: int, *, prompt: int, computed: int) -> _core.StepRow:
    return _core.StepRow(
        req_id=req_id, first_token=first, num_tokens=num, num_prompt_tokens=prompt, num_computed_tokens=computed
    )


def decode(req_id: str, first: int, *, prompt: int = 5, computed: int | None = None) -> _core.StepRow:
    return row(req_id, first, 1, prompt=prompt, computed=prompt if computed is None else computed)


def embed(ids: Any) -> Any:
    """Return an embedding from which the id can be read."""
    return np.repeat(np.asarray(ids, np.float32)[:, None], HIDDEN, axis=1)


class ScalarStage(StageModel):
    """Embeds ids as themselves, one row a call, and writes the calls down."""

    def __init__(self, traits: Traits | None = None) -> None:
        super().__init__(traits or Traits())
        self.calls: list[tuple[str, ...]] = []
        self.seen: list[dict[str, Any]] = []
        self.broken: set[str] = set()  # requests whose hook raises

    def preprocess(self, row: _core.StepRow, ids: Any, payload: dict[str, Any]) -> Preprocessed:
        self.calls.append(("scalar", row.req_id))
        self.seen.append(payload)
        if row.req_id in self.broken:
            raise KeyError(f"no voice for {row.req_id}")
        is_decode = not payload["is_prefill"]
        inputs = embed(ids[:1]) if is_decode else None
        return Preprocessed(ids, embed(ids), [{"seen": {"count": len(ids)}}], last_hidden=inputs, text_step=inputs)


class BatchedStage(ScalarStage):
    def preprocess_decodes(self, rows: Sequence[_core.StepRow], ids: Any, payloads: Any) -> Preprocessed:
        self.calls.append(("batched", *(row.req_id for row in rows)))
        self.seen += payloads
        bad = [row.req_id for row in rows if row.req_id in self.broken]
        if bad:
            raise KeyError(f"no voice for {bad[0]}")
        embeds = embed(ids)
        updates = [{"seen": {"id": int(token)}} for token in ids]
        return Preprocessed(ids + 100, embeds, updates, last_hidden=embeds * 2, text_step=embeds * 3)


class PredictorMixin:
    """Codes and embeddings from which the row can be read; random ones where there is a generator."""

    predictions: list[PredictorInputs]
    batches: list[list[int]]

    def predict_codes(self, inputs: PredictorInputs) -> Any:
        self.predictions.append(inputs)
        self.batches.append([int(i) for i in inputs.ids])
        streams = inputs.generators if inputs.generators is not None else [inputs.generator] * len(inputs.ids)
        codes = np.stack(
            [
                np.full(NUM_CODES, token) if stream is None else (stream.uniform(1, NUM_CODES) * 1000).astype(int)
                for token, stream in zip(inputs.ids, streams, strict=True)
            ]
        )
        return inputs.embeds + 0.5, codes


class TalkerStage(PredictorMixin, BatchedStage):
    def __init__(self, traits: Traits | None = None) -> None:
        super().__init__(traits)
        self.predictions, self.batches = [], []


class ScalarTalkerStage(PredictorMixin, ScalarStage):
    def __init__(self, traits: Traits | None = None) -> None:
        super().__init__(traits)
        self.predictions, self.batches = [], []


def make_runner(model: StageModel, *req_ids: str, seeds: dict[str, int] | None = None, **options: Any) -> StageRunner:
    runner = StageRunner(model, hidden_size=HIDDEN, max_num_tokens=16, max_num_reqs=8, **options)
    for req_id in req_ids:
        runner.add_request(req_id, seed=(seeds or {}).get(req_id))
    return runner


@dataclass
class View:
    """What a StepView shows of a step before the forward."""

    rows: Any
    input_ids: Any
    positions: Any


@dataclass
class Prepared:
    """The inputs of a step: views of the runner's persistent buffers, and the requests that fell out."""

    ids: Any
    embeds: Any
    plan: _core.RowPlan
    failures: dict[str, str]


def prepare(runner: StageRunner, rows: Sequence[_core.StepRow], ids: Any) -> Prepared:
    plan = runner.prepare(rows, ids)
    return Prepared(runner.ids[: len(ids)], runner.embeds[: len(ids)], plan, runner.take_failures())


def ids(*values: int) -> Any:
    return np.asarray(values, np.int32)
