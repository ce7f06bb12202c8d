"""A native inference engine for hybrid language models: Gated DeltaNet and full attention."""

from importlib import import_module
from typing import TYPE_CHECKING

from deltaic._core import __version__

if TYPE_CHECKING:
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

if not TYPE_CHECKING:
    # Loaded when first used: the command starts with this package, and until it has it cannot handle Ctrl-C.
    _MODULES = ("llm", "async_llm", "outputs", "sampling_params")

    def __getattr__(name: str) -> object:
        if name in __all__:
            for module in map(import_module, (f"{__name__}.{module}" for module in _MODULES)):
                if name in vars(module):
                    return vars(module)[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
