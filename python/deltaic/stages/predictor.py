"""Running a model's code predictor for the decode rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltaic.stages.model import FloatArray, IntArray, PredictorInputs, StageModel, Traits
from deltaic.stages.payload import Array
from deltaic.stages.rng import RngStreams


@dataclass(frozen=True, slots=True)
class PredictorSampling:
    """How the residual codes are chosen; None: the model decides. A seed belongs to a request, never in here."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def from_deployment(cls, given: Mapping[str, Any]) -> PredictorSampling:
        """Take a deployment's values as they are; its seed is for other samplers."""
        return cls(**{name: given.get(name) for name in ("do_sample", "temperature", "top_k", "top_p")})


def captures_predictor(traits: Traits, *, has_predictor: bool, full_graphs: bool) -> bool:
    """Return whether the predictor is run from a graph.

    A model that says so decides; one that does not is safe when its talker is a module of its own.
    """
    if not has_predictor or not full_graphs or not traits.has_talker:
        return False
    return True if traits.predictor_graph_safe is None else traits.predictor_graph_safe


class PredictorDriver:
    """Stages the inputs of the predictor in fixed memory and hands its results back, a row a request."""

    def __init__(
        self,
        model: StageModel,
        *,
        hidden_size: int,
        max_num_reqs: int,
        capture_sizes: Sequence[int] = (),
        sampling: PredictorSampling | None = None,
        graph_wrapper: Callable[[], Callable[[Any], Any]] | None = None,
    ) -> None:
        self._model = model
        self._sampling = sampling or PredictorSampling()
        self._hidden_size = hidden_size
        size = model.traits.predictor_hidden_size or hidden_size
        rows = max([max_num_reqs, *capture_sizes])
        self.ids = np.zeros(rows, np.int32)
        self.embeds = np.zeros((rows, size), np.float32)
        self.last_hidden = np.zeros((rows, size), np.float32)
        self.text_step = np.zeros((rows, size), np.float32)
        self.streams = RngStreams()
        predict: Callable[..., tuple[FloatArray, IntArray]] = model.predict_codes
        full_graphs = graph_wrapper is not None
        self.is_captured = captures_predictor(model.traits, has_predictor=True, full_graphs=full_graphs)
        if self.is_captured and graph_wrapper is not None:
            predict = graph_wrapper()(predict)
        self._predict = predict

    def run(self, req_ids: Sequence[str], seeds: Sequence[int | None]) -> tuple[FloatArray, IntArray]:
        """Run the first len(req_ids) staged rows; return their next embeddings and their codes.

        A seed gives the same codes alone and in any batch. The staging memory is as before when this returns or raises.
        ValueError when the model returns too few rows, or rows of another size.
        """
        count = len(req_ids)
        streams = [self.streams.get(req_id, seed) for req_id, seed in zip(req_ids, seeds, strict=True)]
        seeded = any(stream is not None for stream in streams)
        if count > 1 and seeded and not self._model.traits.accepts_generators_per_row:
            embeds, codes = self._run_row_by_row(streams)
        elif count > 1 and seeded:
            embeds, codes = self._call(count, generators=streams)
        else:
            embeds, codes = self._call(count, generator=streams[0] if count == 1 else None)
        for stream in streams:
            if stream is not None:
                stream.frame += 1
        return embeds, codes

    def _run_row_by_row(self, streams: Sequence[Any]) -> tuple[FloatArray, IntArray]:
        staged: tuple[Array, ...] = (self.ids, self.embeds, self.last_hidden, self.text_step)
        saved = [array[0].copy() for array in staged]
        results = []
        try:
            for row, stream in enumerate(streams):
                if row > 0:
                    for array in staged:
                        array[0] = array[row]
                results.append(self._call(1, generator=stream))
        finally:
            for array, first in zip(staged, saved, strict=True):
                array[0] = first
        return np.concatenate([r[0] for r in results]), np.concatenate([r[1] for r in results])

    def _call(self, count: int, *, generator: Any = None, generators: Any = None) -> tuple[FloatArray, IntArray]:
        sampling = self._sampling
        inputs = PredictorInputs(
            ids=self.ids[:count],
            embeds=self.embeds[:count],
            last_hidden=self.last_hidden[:count],
            text_step=self.text_step[:count],
            generator=generator,
            generators=generators,
            do_sample=sampling.do_sample,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        embeds, codes = self._predict(inputs)
        if len(embeds) < count or len(codes) < count:
            raise ValueError(
                f"the code predictor returned {len(embeds)} embeddings and {len(codes)} rows of codes for {count} rows"
            )
        if np.shape(embeds)[1:] != (self._hidden_size,):
            raise ValueError(
                f"the code predictor returned embeddings of {np.shape(embeds)[1:]}, wanted ({self._hidden_size},)"
            )
        # Copies: a captured predictor writes its results to the same memory in each step.
        return np.array(embeds[:count], np.float32), np.array(codes[:count])
