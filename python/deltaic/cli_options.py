"""Options and errors that the commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Checkpoint folder or hub id; the bundled model if left out.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0: greedy; at most 2. Default: the model's.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this share, in (0, 1].")]
TopK = Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest, in [0, 1].")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: discourage tokens that came before.")]
Seed = Annotated[int | None, typer.Option(help="Repeat a sampled text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string; may be given several times.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; the CPU computes in float32.")]
LoadFormat = Annotated[str, typer.Option(help="auto, safetensors, or dummy: random weights for a config.json.")]
KvCacheDtype = Annotated[str, typer.Option(help="Of K and V: auto (as --dtype), float32, bfloat16 or float16.")]
StateDtype = Annotated[
    str, typer.Option("--recurrent-state-dtype", help="Of recurrent states: auto (float32), float32 or bfloat16.")
]
GpuMemory = Annotated[float, typer.Option("--gpu-memory-utilization", help="Share of a GPU's free memory to use.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Use no CUDA graphs.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of one request, prompt and output.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Most requests that run at once.")]
MaxBatchedTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="Most tokens of one step.")]
CacheBytes = Annotated[int | None, typer.Option("--kv-cache-memory-bytes", help="Memory for all caches.")]
SpeculativeTokens = Annotated[
    str, typer.Option(help="Tokens that the model's draft module guesses a step: a number, or auto for what pays.")
]
PrefixCaching = Annotated[bool, typer.Option(help="Reuse what prompts have in common.")]
NumThreads = Annotated[int, typer.Option(help="CPU threads; 0: all that this process may use.")]
System = Annotated[str | None, typer.Option(help="A system message before the first one.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

EngineFields = dict[str, Any]  # of EngineConfig

# Options that set fields of EngineConfig, with their defaults.
_ENGINE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "load_format": (LoadFormat, "auto"),
    "device": (Device, "auto"),
    "dtype": (Dtype, "auto"),
    "kv_cache_dtype": (KvCacheDtype, "auto"),
    "recurrent_state_dtype": (StateDtype, "auto"),
    "max_model_len": (MaxModelLen, None),
    "max_num_seqs": (MaxNumSeqs, None),
    "max_num_batched_tokens": (MaxBatchedTokens, None),
    "gpu_memory_utilization": (GpuMemory, 0.9),
    "kv_cache_memory_bytes": (CacheBytes, None),
    "enforce_eager": (EnforceEager, False),
    "enable_prefix_caching": (PrefixCaching, True),
    "speculative_tokens": (SpeculativeTokens, "auto"),
    "num_threads": (NumThreads, 0),
}


def engine_options(
    *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of an engine in place of its argument `engine`, which gets what they say.

    `defaults` replace those that the options have otherwise.
    """
    assert {*without, *defaults} <= _ENGINE_OPTIONS.keys()
    names = [name for name in _ENGINE_OPTIONS if name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            engine = {name: given.pop(name) for name in names}
            if "speculative_tokens" in engine:
                engine["speculative_tokens"] = number_or_word(engine["speculative_tokens"])
            command(engine=engine, **given)

        parameters = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            added = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            if parameter.name == "engine":
                added = [
                    inspect.Parameter(
                        name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=defaults.get(name, _ENGINE_OPTIONS[name][1]),
                        annotation=_ENGINE_OPTIONS[name][0],
                    )
                    for name in names
                ]
            parameters += added
        del run.__wrapped__  # what is read of the command is what stands here
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


class CommandError(Exception):
    """What ends a command: one line for stderr, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def number_or_word(text: str) -> int | str:
    """Return a number where `text` is one."""
    try:
        return int(text)
    except ValueError:
        return text


@contextmanager
def usage() -> Iterator[None]:
    """Turn what the block refuses into an error of usage."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise CommandError(str(error), 2) from error
