"""Pipelines of models on one engine: a thinker writes, a talker speaks, a decoder makes sound of it."""

from deltaic._core import Delivery, EndStatus, StageEdge
from deltaic.stages.graph import Chunked, Edge, Full, Stage, StageGraph
from deltaic.stages.model import PredictorInputs, Preprocessed, StageModel, StepMetadata, Traits
from deltaic.stages.outputs import StageOutput, StepOutputs
from deltaic.stages.payload import PayloadBuffers
from deltaic.stages.predictor import PredictorSampling
from deltaic.stages.runner import StageRunner
from deltaic.stages.session import Envelope

__all__ = [
    "Chunked",
    "Delivery",
    "Edge",
    "EndStatus",
    "Envelope",
    "Full",
    "PayloadBuffers",
    "PredictorInputs",
    "PredictorSampling",
    "Preprocessed",
    "Stage",
    "StageEdge",
    "StageGraph",
    "StageModel",
    "StageOutput",
    "StageRunner",
    "StepMetadata",
    "StepOutputs",
    "Traits",
]
