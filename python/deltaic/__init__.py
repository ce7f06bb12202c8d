"""A native inference engine for hybrid language models: Gated DeltaNet and full attention."""

from deltaic._core import __version__
from deltaic.async_llm import AsyncLLM
from deltaic.llm import LLM
from deltaic.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from deltaic.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]
