"""What a model declares and implements to run as a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaic import _core
from deltaic.stages.payload import Key, Payload

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Traits:
    """What a model declares once, at load. TypeError for a codes_key that is not two strings."""

    has_talker: bool = False  # has a separate talker submodule
    predictor_graph_safe: bool | None = None  # may be run from a captured graph; None: not declared
    accepts_generators_per_row: bool = False  # else seeded rows go to predict_codes one by one
    predictor_hidden_size: int | None = None  # None: that of the text model
    codes_key: Key = ("codes", "audio")  # where the codes of predict_codes go in the payload
    gpu_resident_keys: tuple[Key, ...] = ()  # tensors that stay on their device; all others come to the host
    replace_keys: tuple[Key, ...] = ()  # of the hand-over: the latest value instead of all rows
    replaces_session_payload: bool = False  # a new segment's payload takes the place of the old one
    payload_at_request_end: bool = False  # hands over once, by make_payload, instead of by postprocess in each step
    has_multimodal_outputs: bool = False  # postprocess returns a StageOutput whose payload is handed over
    wants_step_metadata: bool = False  # begin_step is called
    wants_request_info: bool = False  # payloads that hooks see have the request's id and features
    hides_ids: bool = False  # the model is given embeddings alone

    def __post_init__(self) -> None:
        key: Any = self.codes_key
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) and part for part in key)):
            raise TypeError(f"codes_key is a section and a name, got {key!r}")

    @classmethod
    def parse(cls, declared: Mapping[str, Any]) -> Traits:
        """Take traits by name; ValueError for one that does not exist."""
        known = {one.name for one in fields(cls)}
        unknown = sorted(set(declared) - known)
        if unknown:
            raise ValueError(f"unknown trait {unknown[0]!r}")
        return cls(**declared)


@dataclass(frozen=True, slots=True)
class Preprocessed:
    """What a hook makes of rows; nothing is applied until all of a step has been checked.

    A model that predicts codes gives last_hidden and text_step for every row of decode.
    """

    ids: IntArray  # [num_tokens]
    embeds: FloatArray  # [num_tokens, hidden_size]
    updates: Sequence[Mapping[str, Any]]  # one a row
    last_hidden: FloatArray | None = None  # [num_rows, predictor_hidden_size], of rows that the predictor runs for
    text_step: FloatArray | None = None  # [num_rows, predictor_hidden_size]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What a model is told before the forward, rows in batch order."""

    req_ids: tuple[str, ...]  # one a row
    ids: IntArray  # [num_tokens]
    positions: npt.NDArray[np.int64]  # [num_tokens]
    embeds: FloatArray  # [num_tokens, hidden_size]
    query_start_loc: IntArray  # [num_rows + 1]: where the tokens of a row start


@dataclass(frozen=True, slots=True)
class PredictorInputs:
    """The B rows of one call of the code predictor, of P = predictor_hidden_size. They are views of staging memory."""

    ids: IntArray  # [B]: the first code of each frame
    embeds: FloatArray  # [B, P]: its embedding
    last_hidden: FloatArray  # [B, P]
    text_step: FloatArray  # [B, P]
    generator: Any = None  # rng.RngStream of the only row: uniform(codebook, count) gives numbers in [0, 1)
    generators: Sequence[Any] | None = None  # one a row, None for rows without a seed
    do_sample: bool | None = None  # None: the model decides
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(slots=True)
class StageModel:
    """Base of models written in Python. A hook that is not overridden is absent."""

    traits: Traits = field(default_factory=Traits)

    def preprocess(self, row: _core.StepRow, ids: IntArray, payload: Payload) -> Preprocessed:
        """Make the embeddings of one row, of ids [row.num_tokens]."""
        raise NotImplementedError

    def preprocess_decodes(
        self, rows: Sequence[_core.StepRow], ids: IntArray, payloads: Sequence[Payload]
    ) -> Preprocessed:
        """Make the embeddings of neighbouring decode rows, one token each; ids [num_rows], payloads one a row."""
        raise NotImplementedError

    def predict_codes(self, inputs: PredictorInputs) -> tuple[FloatArray, IntArray]:
        """Return the next embeddings [B, hidden_size] and the codes [B, num_codebooks] of one frame a row."""
        raise NotImplementedError

    def begin_step(self, step: StepMetadata) -> None:
        """Learn which request each row belongs to."""
        raise NotImplementedError

    def postprocess(self, row: _core.StepRow, hidden: FloatArray, payload: Payload) -> Any:
        """Return what the forward of one row gives: hidden states, or a StageOutput with a payload for the next stage.

        hidden [row.num_tokens, hidden_size] is memory of the step; what is to be kept must be copied.
        """
        raise NotImplementedError

    def make_payload(self, req_id: str, payload: Payload) -> Any:
        """Return what a request hands over when it ends; of models that declare payload_at_request_end."""
        raise NotImplementedError

    def positions(self, input_tokens: IntArray) -> Any:
        """Return the rotary positions of a prompt, [num_tokens]; tokens behind it count on from the last.

        A subclass names what more it needs of the request's info, or takes any keyword.
        """
        raise NotImplementedError

    def on_finished(self, req_id: str) -> None:
        """Forget a request."""

    def has_hook(self, name: str) -> bool:
        """Return whether a subclass overrides a hook."""
        return getattr(type(self), name) is not getattr(StageModel, name)
