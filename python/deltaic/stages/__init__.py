"""Pipelines of models on one engine: a thinker writes, a talker speaks, a decoder makes sound of it."""

from deltaic.stages.channel import Channel, Channels, End
from deltaic.stages.graph import Chunked, Edge, Full, Stage, StageGraph
from deltaic.stages.hook import StageHook
from deltaic.stages.model import PredictorInputs, Preprocessed, StageModel, StepMetadata, Traits
from deltaic.stages.outputs import StageOutput, StepOutputs
from deltaic.stages.payload import PayloadBuffers
from deltaic.stages.predictor import PredictorSampling
from deltaic.stages.runner import StageRunner, StepResult
from deltaic.stages.session import Envelope

__all__ = [
    "Channel",
    "Channels",
    "Chunked",
    "Edge",
    "End",
    "Envelope",
    "Full",
    "PayloadBuffers",
    "PredictorInputs",
    "PredictorSampling",
    "Preprocessed",
    "Stage",
    "StageGraph",
    "StageHook",
    "StageModel",
    "StageOutput",
    "StageRunner",
    "StepMetadata",
    "StepOutputs",
    "StepResult",
    "Traits",
]
