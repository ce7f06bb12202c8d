"""Preprocessing of a step for models written in Python: plan, validate, commit. The reference backend, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltaic import _core
from deltaic.stages.model import IntArray, Preprocessed, StageModel, StepMetadata
from deltaic.stages.payload import PayloadBuffers
from deltaic.stages.predictor import PredictorDriver, PredictorSampling
from deltaic.stages.session import Envelope, PayloadInbox, Updates, with_request_info


@dataclass(slots=True)
class StageRequest:
    """What the runner knows of a live request beside its payload."""

    req_id: str
    seed: int | None = None  # the request's own, never a deployment's
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class StepResult:
    """The inputs of the forward: views of the runner's persistent buffers, and the requests that fell out."""

    ids: IntArray
    embeds: Any
    plan: _core.RowPlan
    failures: dict[str, str]  # req_id -> error; their rows are zeros


@dataclass(slots=True)
class _Staged:
    """What the hooks made of one row."""

    ids: IntArray
    embeds: Any
    update: Mapping[str, Any]
    last_hidden: Any = None
    text_step: Any = None


class StageRunner:
    """Runs the hooks of one model over the rows of a step.

    Everything a hook returns is checked before anything is written, so a step that raises has changed nothing. A hook
    that raises for a row fails that row's request alone.
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
    ) -> None:
        self.model = model
        self.ids = np.zeros(max_num_tokens, np.int32)
        self.embeds = np.zeros((max_num_tokens, hidden_size), np.float32)
        self.buffers = PayloadBuffers(model.traits.gpu_resident_keys)
        self.inbox = PayloadInbox()
        self._updates = Updates(self.buffers, keys, model.traits.replaces_session_payload)
        self._requests: dict[str, StageRequest] = {}
        self._has_batched_hook = model.has_hook("preprocess_decodes")
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

    # ---- requests -------------------------------------------------------------------------------------------------

    def add_request(
        self, req_id: str, payload: object = None, *, seed: int | None = None, info: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a request with its conditioning, as bytes of serialize or a dict."""
        self._requests[req_id] = StageRequest(req_id, seed, info or {})
        self.buffers.add(req_id)
        self._updates.apply([Envelope(req_id, payload)])

    def update_requests(self, envelopes: Sequence[Envelope]) -> None:
        """Apply what arrived for live requests."""
        self._updates.apply(envelopes)

    def finish_request(self, req_id: str) -> None:
        """Forget a request and all that is kept for it."""
        self._requests.pop(req_id, None)
        self.buffers.remove(req_id)
        self.inbox.discard(req_id)
        if self.predictor is not None:
            self.predictor.streams.remove(req_id)
        self.model.on_finished(req_id)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def preprocess(self, rows: Sequence[_core.StepRow], ids: IntArray) -> StepResult:
        """Fill the persistent ids and embeddings of a step's tokens; rows behind them stay as they are.

        RuntimeError for rows that overlap or leave gaps, ValueError for a hook that returns the wrong number of rows;
        nothing has changed then.
        """
        num_tokens = len(ids)
        plan = _core.plan_rows(
            rows, num_tokens, has_batched_hook=self._has_batched_hook, has_predictor=self.predictor is not None
        )
        payloads = [self._payload_of(row) for row in rows]
        failures: dict[str, str] = {}
        staged: dict[int, _Staged] = {}
        for run in plan.runs:
            indices = range(run.first_row, run.first_row + run.num_rows)
            self._run_hooks([(i, rows[i], payloads[i]) for i in indices], ids, run.is_batched, staged, failures)
        codes = self._predict([i for i in plan.predictor_rows if i in staged], rows, staged)
        self._commit(rows, ids, staged, codes, failures)
        return StepResult(self.ids[:num_tokens], self.embeds[:num_tokens], plan, failures)

    def begin_step(self, rows: Sequence[_core.StepRow], positions: Any) -> None:
        """Tell a model that wants it which request each row belongs to."""
        if not (self.model.traits.wants_step_metadata and self.model.has_hook("begin_step")):
            return
        num_tokens = sum(row.num_tokens for row in rows)
        starts = [row.first_token for row in rows]
        self.model.begin_step(
            StepMetadata(
                req_ids=tuple(row.req_id for row in rows),
                ids=self.ids[:num_tokens],
                positions=positions,
                embeds=self.embeds[:num_tokens],
                query_start_loc=np.asarray([*starts, num_tokens], np.int32),
            )
        )

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

    def _run_hooks(
        self,
        group: list[tuple[int, _core.StepRow, dict[str, Any]]],
        ids: IntArray,
        is_batched: bool,
        staged: dict[int, _Staged],
        failures: dict[str, str],
    ) -> None:
        first, last = group[0][1], group[-1][1]
        span = ids[first.first_token : last.first_token + last.num_tokens]
        try:
            if is_batched:
                result = self.model.preprocess_decodes([row for _, row, _ in group], span, [p for _, _, p in group])
            else:
                result = self.model.preprocess(first, span, group[0][2])
        except Exception as error:
            if len(group) == 1:
                failures[first.req_id] = f"{type(error).__name__}: {error}"
                return
            for member in group:  # find the request that it is about
                self._run_hooks([member], ids, True, staged, failures)
            return
        self._check(result, len(span), len(group))
        for position, (index, row, _) in enumerate(group):
            begin = row.first_token - first.first_token
            tokens = slice(begin, begin + row.num_tokens)
            one = _Staged(result.ids[tokens], result.embeds[tokens], result.updates[position])
            if result.last_hidden is not None and result.text_step is not None:
                one.last_hidden, one.text_step = result.last_hidden[position], result.text_step[position]
            staged[index] = one

    def _check(self, result: Preprocessed, num_tokens: int, num_rows: int) -> None:
        wanted = (("ids", result.ids, num_tokens), ("embeddings", result.embeds, num_tokens))
        for what, given, count in (*wanted, ("updates", result.updates, num_rows)):
            if len(given) != count:
                raise ValueError(f"decode preprocessing returned {len(given)} {what} for {count}")
        if np.ndim(result.ids) != 1:
            raise ValueError(
                f"decode preprocessing returned ids of shape {np.shape(result.ids)}, wanted ({num_tokens},)"
            )
        for update in result.updates:
            if not isinstance(update, Mapping):
                raise ValueError(
                    f"decode preprocessing returned an update that is a {type(update).__name__}, not a dict"
                )
        if np.shape(result.embeds)[1:] != self.embeds.shape[1:]:
            raise ValueError(
                f"decode preprocessing returned embeddings of {np.shape(result.embeds)[1:]}, wanted "
                f"{self.embeds.shape[1:]}"
            )
        for what, rows in (("last hidden states", result.last_hidden), ("text steps", result.text_step)):
            if rows is not None and len(rows) != num_rows:
                raise ValueError(f"decode preprocessing returned {len(rows)} {what} for {num_rows}")

    def _predict(
        self, indices: list[int], rows: Sequence[_core.StepRow], staged: dict[int, _Staged]
    ) -> dict[int, tuple[Any, Any]]:
        """Run the predictor once for all its rows; return next embedding and codes by row."""
        predictor = self.predictor
        if predictor is None or not indices:
            return {}
        for position, index in enumerate(indices):
            one = staged[index]
            if one.last_hidden is None or one.text_step is None:
                raise ValueError(
                    f"decode preprocessing of request {rows[index].req_id!r} returned no last hidden state and text "
                    "step for the code predictor"
                )
            predictor.ids[position] = one.ids[0]
            predictor.embeds[position] = one.embeds[0]
            predictor.last_hidden[position] = one.last_hidden
            predictor.text_step[position] = one.text_step
        req_ids = [rows[index].req_id for index in indices]
        seeds = [self._requests[req_id].seed if req_id in self._requests else None for req_id in req_ids]
        embeds, codes = predictor.run(req_ids, seeds)
        return {index: (embeds[i], codes[i : i + 1]) for i, index in enumerate(indices)}

    def _commit(
        self,
        rows: Sequence[_core.StepRow],
        ids: IntArray,
        staged: dict[int, _Staged],
        codes: dict[int, tuple[Any, Any]],
        failures: dict[str, str],
    ) -> None:
        section, name = self.model.traits.codes_key
        for index, row in enumerate(rows):
            tokens = slice(row.first_token, row.first_token + row.num_tokens)
            one = staged.get(index)
            if one is None:
                self.ids[tokens], self.embeds[tokens] = ids[tokens], 0.0
                continue
            self.ids[tokens] = ids[tokens] if self.model.traits.hides_ids else one.ids
            self.embeds[tokens] = one.embeds
            self.buffers.merge(row.req_id, one.update)
            if index in codes:
                self.embeds[row.first_token] = codes[index][0]
                self.buffers.merge(row.req_id, {section: {name: codes[index][1]}})
