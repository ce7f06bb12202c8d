"""Runs a model written in Python as a stage: its hooks, its requests' payloads, and what passes over its edges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltaic import _core
from deltaic.stages.model import IntArray, Preprocessed, StageModel, StepMetadata
from deltaic.stages.mrope import filter_position_arguments
from deltaic.stages.outputs import StepOutputs, extract_multimodal, restore_output
from deltaic.stages.payload import PayloadBuffers, hand_over
from deltaic.stages.predictor import PredictorDriver, PredictorSampling
from deltaic.stages.session import Envelope, Updates, with_request_info

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StageRequest:
    """What the runner knows of a live request beside its payload."""

    req_id: str
    seed: int | None = None  # the request's own, never a deployment's
    info: Mapping[str, Any] = field(default_factory=dict)
    prompt_positions: Any = None  # of models with a positions hook


@dataclass(slots=True)
class _Staged:
    """What a hook made of one row."""

    update: Mapping[str, Any]
    id: int  # of its first token
    embed: Any
    last_hidden: Any = None
    text_step: Any = None
    codes: Any = None


class StageRunner(_core.StageRunner):
    """Runs the hooks of one model over the rows of a step; the hook of the ModelRunner that has the model's decoder.

    The plan, the order of the hooks and the commit are those of every stage, native ones too: see
    cpp/src/stages/stage_runner.h. `source` is the edge that the model's payloads come over, `target` the one that it
    hands over to: by postprocess in each step, or by make_payload when a request ends.
    """

    def __init__(
        self,
        model: StageModel,
        *,
        hidden_size: int,
        max_num_tokens: int,
        max_num_reqs: int,
        capture_sizes: Sequence[int] = (),
        sampling: PredictorSampling | None = None,
        graph_wrapper: Callable[[], Callable[[Any], Any]] | None = None,
        keys: tuple[tuple[str, str], ...] = (),
        source: _core.StageEdge | None = None,
        target: _core.StageEdge | None = None,
        has_prefix_cache: bool = False,
        on_payload: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        super().__init__(hidden_size, max_num_tokens)
        self.model = model
        self.buffers = PayloadBuffers(model.traits.gpu_resident_keys)
        self.source, self.target = source, target
        self.on_payload = on_payload  # is told of what a step gives the client
        self._updates = Updates(self.buffers, keys, model.traits.replaces_session_payload)
        self._requests: dict[str, StageRequest] = {}
        self._staged: dict[str, _Staged] = {}  # by request, of the step that is being prepared
        self._failures: dict[str, str] = {}  # beside those of preprocessing
        self._failed: set[str] = set()  # all that take_failures has not told yet
        self._outputs: StepOutputs | None = None
        self._has_batched_hook = model.has_hook("preprocess_decodes")
        self.defers_payload = self._defers(has_prefix_cache)
        maker = "make_payload" if self.defers_payload else "postprocess"
        self.makes_payload = model.has_hook(maker) and (target is not None or on_payload is not None)
        if target is not None and not model.has_hook(maker):
            raise ValueError(f"{type(model).__name__} has no {maker}, and an edge waits for what it makes")
        self.predictor: PredictorDriver | None = None
        if model.has_hook("predict_codes"):
            self.predictor = PredictorDriver(
                model,
                hidden_size=hidden_size,
                max_num_reqs=max_num_reqs,
                capture_sizes=capture_sizes,
                sampling=sampling,
                graph_wrapper=graph_wrapper,
            )

    def _defers(self, has_prefix_cache: bool) -> bool:
        """Return whether payloads stay where they are until their request ends.

        A prefix cache needs the rows of each step, and an edge in chunks hands over as it goes.
        """
        if not self.model.traits.payload_at_request_end or has_prefix_cache:
            return False
        return self.target is not None and bool(self.target.mode.is_full)

    # ---- requests -------------------------------------------------------------------------------------------------

    def add_request(
        self,
        req_id: str,
        payload: object = None,
        *,
        seed: int | None = None,
        info: Mapping[str, Any] | None = None,
        token_ids: IntArray | None = None,
    ) -> None:
        """Begin a request with its conditioning, as bytes of serialize or a dict; what came early for it is taken.

        token_ids: its prompt, of which a model with a positions hook tells the positions.
        ValueError for an id that is in use; a request that is refused leaves nothing behind.
        """
        if req_id in self._requests:
            raise ValueError(f"request id {req_id!r} is in use")
        request = StageRequest(req_id, seed, info or {})
        if self.model.has_hook("positions") and token_ids is not None:
            request.prompt_positions = self._positions_of(request, token_ids)
        self.buffers.add(req_id)
        try:
            self._updates.apply([Envelope(req_id, payload)])
            if self.source is not None:
                self.source.open(req_id)
        except BaseException:
            self.buffers.remove(req_id)
            raise
        self._requests[req_id] = request

    def extend_prompt(self, req_id: str, token_ids: IntArray) -> None:
        """Tell that a running request's prompt has grown: its positions are made anew."""
        request = self._requests[req_id]
        if self.model.has_hook("positions"):
            request.prompt_positions = self._positions_of(request, token_ids)

    def update_requests(self, envelopes: Sequence[Envelope]) -> None:
        """Apply what arrived for live requests."""
        self._updates.apply(envelopes)

    def finish_request(self, req_id: str, error: str | None = None) -> None:
        """Forget a request and all that is kept for it; its end goes over the edge, behind what it made.

        A make_payload that raises makes that end an error. Unknown requests are ignored.
        """
        if self._requests.pop(req_id, None) is None:
            return
        payload = self.buffers.get(req_id)
        if self.defers_payload and error is None and payload is not None:
            try:
                self._give(req_id, self.model.make_payload(req_id, payload), None)
            except Exception as failure:
                logger.error("%s made no payload of %s", type(self.model).__name__, req_id, exc_info=failure)
                error = f"{type(failure).__name__}: {failure}"
        if self.target is not None:
            self.target.end(req_id, _core.EndStatus.error if error else _core.EndStatus.ok, error or "")
        self._failed.discard(req_id)
        self.buffers.remove(req_id)
        if self.source is not None:
            self.source.forget(req_id)
        if self.predictor is not None:
            self.predictor.streams.remove(req_id)
        self.model.on_finished(req_id)

    def take_failures(self) -> dict[str, str]:
        """Return the requests that failed since the last call, and why: the caller aborts them."""
        failures: dict[str, str] = super().take_failures() | self._failures
        self._failures = {}
        self._failed.clear()
        return failures

    # ---- a step ---------------------------------------------------------------------------------------------------

    def before_forward(self, step: _core.StepView) -> None:
        """Take the payloads that have come for the step's requests, then prepare it."""
        self.take_payloads()
        super().before_forward(step)

    def take_payloads(self) -> None:
        """Merge what has come over the source edge for requests that have begun; for others it stays parked there."""
        if self.source is None:
            return
        for delivery in self.source.take():
            if delivery.status is None:
                self.buffers.merge(delivery.id, delivery.payload)
            elif delivery.status != _core.EndStatus.ok and delivery.id in self._requests:
                self._fail(delivery.id, delivery.error or "the stage before it was cancelled")

    def has_batched_hook(self) -> bool:
        """Return whether the model takes decode rows together."""
        return self._has_batched_hook

    def has_predictor(self) -> bool:
        """Return whether the model predicts codes."""
        return self.predictor is not None

    def preprocess_rows(self, rows: list[_core.StepRow], is_batched: bool, ids: Any, embeds: Any) -> str | None:
        """Run the model's hook over neighbouring rows and write ids [num_tokens] and embeds [num_tokens, hidden_size].

        Returns why the hook failed, or None; ValueError for a result of another shape.
        """
        payloads = [self._payload_of(row) for row in rows]
        try:
            if is_batched:
                result = self.model.preprocess_decodes(rows, ids.copy(), payloads)
            else:
                result = self.model.preprocess(rows[0], ids.copy(), payloads[0])
                self._check(result, embeds.shape, rows)
        except Exception as error:
            if len(rows) == 1:
                self._failed.add(rows[0].req_id)
            return f"{type(error).__name__}: {error}"
        if is_batched:  # whose fault it is cannot be told: the step fails
            self._check(result, embeds.shape, rows)
        if not self.model.traits.hides_ids:
            ids[:] = result.ids
        embeds[:] = result.embeds
        begin = rows[0].first_token
        for index, row in enumerate(rows):
            token = row.first_token - begin
            one = _Staged(result.updates[index], int(result.ids[token]), result.embeds[token])
            if result.last_hidden is not None and result.text_step is not None:
                one.last_hidden, one.text_step = result.last_hidden[index], result.text_step[index]
            self._staged[row.req_id] = one
        return None

    def predict_rows(self, rows: list[_core.StepRow], embeds: Any) -> None:
        """Run the code predictor for preprocessed rows and write the next embeddings [num_rows, hidden_size]."""
        predictor = self.predictor
        assert predictor is not None
        for index, row in enumerate(rows):
            one = self._staged[row.req_id]
            predictor.ids[index] = one.id
            predictor.embeds[index] = one.embed
            predictor.last_hidden[index] = one.last_hidden
            predictor.text_step[index] = one.text_step
        req_ids = [row.req_id for row in rows]
        seeds = [self._requests[req_id].seed if req_id in self._requests else None for req_id in req_ids]
        embeds[:], codes = predictor.run(req_ids, seeds)
        for index, req_id in enumerate(req_ids):
            self._staged[req_id].codes = codes[index : index + 1]

    def commit_rows(self, rows: list[_core.StepRow]) -> None:
        """Merge what the hooks made of rows, codes included, into their requests' payloads."""
        section, name = self.model.traits.codes_key
        for row in rows:
            one = self._staged[row.req_id]
            self.buffers.merge(row.req_id, one.update)
            if one.codes is not None:
                self.buffers.merge(row.req_id, {section: {name: one.codes}})
        self._staged.clear()

    def begin_step(self, step: _core.StepView) -> None:
        """Tell a model that wants it which request each row belongs to, and write the positions that it asks for."""
        rows: Sequence[_core.StepRow] = step.rows
        if self.model.has_hook("positions"):
            self._write_positions(rows, step.positions)
        if not (self.model.traits.wants_step_metadata and self.model.has_hook("begin_step")):
            return
        num_tokens = len(step.input_ids)
        self.model.begin_step(
            StepMetadata(
                req_ids=tuple(row.req_id for row in rows),
                ids=self.ids[:num_tokens],
                positions=step.positions,
                embeds=self.embeds[:num_tokens],
                query_start_loc=np.asarray([*(row.first_token for row in rows), num_tokens], np.int32),
            )
        )

    def after_forward(self, step: _core.StepView) -> None:
        """Hand over what the model makes of the rows of the step."""
        if not self.makes_payload or self.defers_payload:
            return
        if self._outputs is None:  # of the most tokens that a step can have
            capture = np.empty((len(self.ids), step.hidden.shape[1]), np.float32)
            self._outputs = StepOutputs({"hidden": capture})
        traits = self.model.traits
        req_ids = [row.req_id for row in step.rows for _ in range(row.num_tokens)]
        hidden = self._outputs.publish(req_ids, {"hidden": step.hidden}).fields["hidden"]
        for row in step.rows:
            if row.req_id in self._failed:
                continue
            tokens = slice(row.first_token, row.first_token + row.num_tokens)
            payload = self.buffers.get(row.req_id)
            try:
                result = self.model.postprocess(row, hidden[tokens], payload if payload is not None else {})
                self._give(row.req_id, result, row, has_multimodal_outputs=traits.has_multimodal_outputs)
            except Exception as error:
                self._fail(row.req_id, f"{type(error).__name__}: {error}")

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _fail(self, req_id: str, why: str) -> None:
        self._failures[req_id] = why
        self._failed.add(req_id)

    def _give(self, req_id: str, result: Any, row: Any, *, has_multimodal_outputs: bool = True) -> None:
        """Give the payload of a result to the next stage and to the client: the same object, made once."""
        result = restore_output(result, has_multimodal_outputs=has_multimodal_outputs)
        _, payload = extract_multimodal(result, has_multimodal_outputs=has_multimodal_outputs)
        if not payload:
            return
        if self.target is not None:
            hand_over(self.target, req_id, payload, row)
        if self.on_payload is not None:
            self.on_payload(req_id, payload)

    def _payload_of(self, row: _core.StepRow) -> dict[str, Any]:
        """Return what a hook sees of a request: its payload and the runner's facts, which win over stale ones."""
        payload = self.buffers.get(row.req_id)
        facts = {
            "request_id": row.req_id,
            "prompt_len": row.num_prompt_tokens,
            "num_computed_tokens": row.num_computed_tokens,
            "is_prefill": row.is_prefill,
        }
        request = self._requests.get(row.req_id)
        info = None if request is None else request.info
        seen = with_request_info(payload or {}, row.req_id, info, wanted=self.model.traits.wants_request_info)
        return {**seen, **facts}

    def _check(self, result: Any, shape: tuple[int, int], rows: Sequence[_core.StepRow]) -> None:
        """Raise ValueError for what is no Preprocessed of these rows, with all that the predictor needs of them."""
        if not isinstance(result, Preprocessed):
            raise ValueError(f"decode preprocessing returned a {type(result).__name__}, not a Preprocessed")
        num_tokens, num_rows = shape[0], len(rows)
        wanted = (("ids", result.ids, num_tokens), ("embeddings", result.embeds, num_tokens))
        for what, given, count in (*wanted, ("updates", result.updates, num_rows)):
            if len(given) != count:
                raise ValueError(f"decode preprocessing returned {len(given)} {what} for {count}")
        _check_array("ids", result.ids, (num_tokens,), "iu")
        for update in result.updates:
            if not isinstance(update, Mapping):
                raise ValueError(
                    f"decode preprocessing returned an update that is a {type(update).__name__}, not a dict"
                )
        _check_array("embeddings", result.embeds, shape, "fiu")
        for what, inputs in (("last hidden states", result.last_hidden), ("text steps", result.text_step)):
            if inputs is not None and len(inputs) != num_rows:
                raise ValueError(f"decode preprocessing returned {len(inputs)} {what} for {num_rows}")
        predictor = self.predictor
        if predictor is None or rows[0].is_prefill or rows[0].num_tokens != 1:
            return
        if result.last_hidden is None or result.text_step is None:
            raise ValueError(
                f"decode preprocessing of request {rows[0].req_id!r} returned no last hidden state and text step for "
                "the code predictor"
            )
        for what, inputs in (("last hidden states", result.last_hidden), ("text steps", result.text_step)):
            _check_array(what, inputs, (num_rows, predictor.embeds.shape[1]), "fiu")

    def _positions_of(self, request: StageRequest, token_ids: IntArray) -> Any:
        arguments = filter_position_arguments(self.model.positions, dict(request.info))
        positions = np.asarray(self.model.positions(token_ids, **arguments), np.int64)
        if positions.shape != (len(token_ids),):
            raise ValueError(f"positions returned {positions.shape}, wanted ({len(token_ids)},)")
        return positions

    def _write_positions(self, rows: Sequence[_core.StepRow], positions: Any) -> None:
        for row in rows:
            request = self._requests.get(row.req_id)
            if request is None or request.prompt_positions is None:
                continue
            prompt = request.prompt_positions
            counts = row.num_computed_tokens + np.arange(row.num_tokens)
            behind = np.maximum(counts - len(prompt) + 1, 0)
            positions[row.first_token : row.first_token + row.num_tokens] = (
                prompt[np.minimum(counts, len(prompt) - 1)] + behind
            )


def _check_array(what: str, values: Any, shape: tuple[int, ...], kinds: str) -> None:
    """Raise ValueError unless values are an array of this shape whose type is of these kinds of numbers."""
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"decode preprocessing returned {what} of shape {array.shape}, wanted {shape}")
    if array.dtype.kind not in kinds:
        raise ValueError(f"decode preprocessing returned {what} of type {array.dtype}")
