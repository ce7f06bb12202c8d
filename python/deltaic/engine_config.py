"""What a user may set about an engine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields

FLOAT_DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
MAX_NUM_THREADS = 4096
MAX_SPECULATIVE_TOKENS = 8
_SWITCHES = ("enable_prefix_caching", "async_scheduling", "poison_caches", "enable_chunked_prefill", "enforce_eager")
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1  # what the core counts with
_RANGES = (
    ("max_model_len", 1, _INT32_MAX),
    ("max_num_seqs", 1, _INT32_MAX),
    ("max_num_batched_tokens", 1, _INT32_MAX),
    ("block_size", 1, _INT32_MAX),
    ("mamba_block_size", 1, _INT32_MAX),
    ("num_snapshot_slots", 0, _INT32_MAX),
    ("long_prefill_token_threshold", 0, _INT32_MAX),
    ("num_threads", 0, MAX_NUM_THREADS),
    ("num_blocks", 2, _INT32_MAX),
    ("kv_cache_memory_bytes", 1, _INT64_MAX),
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and switches of an engine; None: chosen from the model and the machine.

    Raises ValueError naming the field and the numbers, NotImplementedError for what this version does not have.
    """

    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto: DELTAIC_DEVICE, else a GPU if there is one
    dtype: str = "auto"  # of activations, on CUDA of weights too; auto: float32 on the CPU, the checkpoint's on CUDA
    max_model_len: int | None = None  # tokens of one request, prompt and output
    max_num_seqs: int | None = None  # requests of one step
    max_num_batched_tokens: int | None = None  # tokens of one step
    gpu_memory_utilization: float = 0.9  # share of a GPU's free memory that may be used
    kv_cache_memory_bytes: int | None = None  # for all caches
    block_size: int = 16  # tokens in an attention block
    mamba_block_size: int = 256  # recurrent states are kept for prefixes of a multiple of it
    enable_prefix_caching: bool = True
    speculative_tokens: int | str = "auto"  # drafts a step; auto: as many as pay, if the model has a draft module
    scheduling_policy: str = "fcfs"  # or priority: the lowest number first
    async_scheduling: bool = True  # schedule a step while the one before it runs
    num_threads: int = 0  # of the CPU; 0: all that this process may use
    num_blocks: int | None = None  # attention blocks, block 0 included; overrides the division of memory
    num_snapshot_slots: int | None = None  # likewise
    poison_caches: bool = False  # fill the caches with NaN at start-up; results must not change
    long_prefill_token_threshold: int = 0  # most prompt tokens of one request in a step; 0: no such limit
    enable_chunked_prefill: bool = True  # False: a prompt waits for a step that has room for all of it
    load_format: str = "auto"  # or safetensors; dummy: random weights in the shapes of a config.json
    kv_cache_dtype: str = "auto"  # of K and V; auto: dtype
    recurrent_state_dtype: str = "auto"  # of the delta rule's states: float32 (auto) or bfloat16
    enforce_eager: bool = False  # no CUDA graphs

    def __post_init__(self) -> None:
        check_device("device", self.device)
        _check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _check_choice("dtype", self.dtype, FLOAT_DTYPES)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, FLOAT_DTYPES)
        _check_choice("recurrent_state_dtype", self.recurrent_state_dtype, ("auto", "float32", "bfloat16"))
        if self.speculative_tokens != "auto":
            if isinstance(self.speculative_tokens, str):
                raise ValueError(f"speculative_tokens must be 'auto' or a number, got {self.speculative_tokens!r}")
            check_integer("speculative_tokens", self.speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        defaults = {field.name: field.default for field in fields(self)}
        for name, minimum, maximum in _RANGES:
            value = getattr(self, name)
            if value is not None or defaults[name] is not None:
                check_integer(name, value, minimum, maximum)
        if self.mamba_block_size % self.block_size:
            raise ValueError(
                f"mamba_block_size must be a multiple of block_size, got {self.mamba_block_size} and {self.block_size}"
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")


def check_option_names(owner: str, given: Iterable[str], own: Iterable[str]) -> None:
    """Raise TypeError for an option that is neither a field of EngineConfig nor one of the owner's `own`."""
    known = [*own, *(field.name for field in fields(EngineConfig))]
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(sorted(known))}"
            raise TypeError(f"{owner} has no option {name!r}: {hint}")


def check_device(name: str, value: object) -> None:
    """Raise ValueError, naming the setting, for what is no device; whether it is there shows later."""
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", value):
        raise ValueError(f"{name} must be auto, cpu, cuda or cuda:N, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_integer(name: str, value: object, minimum: int | None = None, maximum: int | None = None) -> None:
    """Raise ValueError, naming the setting, for what is no integer or out of a range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r:.60}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value}")
