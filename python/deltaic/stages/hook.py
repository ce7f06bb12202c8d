"""Lets a model written in Python run as a stage of the engine: its hooks around the forward of a ModelRunner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deltaic import _core
from deltaic.stages.handover import Handover
from deltaic.stages.outputs import extract_multimodal, restore_output
from deltaic.stages.runner import StageRunner


class StageHook(_core.StepHook):
    """Fills a step's embeddings by a StageRunner, and gathers what its rows give for the next stage.

    A request whose hook fails gets rows of zeros and is listed by take_failures(): the caller aborts it, and the others
    do not notice.
    """

    def __init__(self, runner: StageRunner, *, gathers: bool = False) -> None:
        super().__init__()
        self.runner = runner
        self.handover = Handover(".".join(key) for key in runner.model.traits.replace_keys)
        self._gathers = gathers
        self._has_postprocess = runner.model.has_hook("postprocess")
        self._failures: dict[str, str] = {}

    def fills_embeddings(self) -> bool:
        return True

    def before_forward(self, step: _core.StepView) -> None:
        runner = self.runner
        rows: Sequence[_core.StepRow] = step.rows
        active = [row.req_id for row in rows]
        runner.inbox.sync(runner.buffers, active)
        result = runner.preprocess(rows, step.input_ids)
        self._failures |= result.failures
        runner.begin_step(rows, step.positions)
        step.inputs_embeds[:] = result.embeds

    def after_forward(self, step: _core.StepView) -> None:
        if not self._has_postprocess:
            return
        traits = self.runner.model.traits
        for row in step.rows:
            if row.req_id in self._failures:
                continue
            tokens = slice(row.first_token, row.first_token + row.num_tokens)
            payload = self.runner.buffers.get(row.req_id)
            result = self.runner.model.postprocess(row, step.hidden[tokens], payload if payload is not None else {})
            result = restore_output(result, has_multimodal_outputs=traits.has_multimodal_outputs)
            _, multimodal = extract_multimodal(result, has_multimodal_outputs=traits.has_multimodal_outputs)
            if self._gathers and multimodal:
                self.handover.add(row.req_id, multimodal, row)

    def take_failures(self) -> dict[str, str]:
        """Return the requests that failed since the last call, and why."""
        failures, self._failures = self._failures, {}
        return failures

    def finish_request(self, req_id: str) -> dict[str, Any]:
        """Forget a request; return what it gave for the next stage, joined."""
        payload, _ = self.handover.take(req_id)
        self.runner.finish_request(req_id)
        return payload
