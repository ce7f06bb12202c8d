"""The limits that a scheduler keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and switches. Raises ValueError naming the field and the numbers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int = 16
    mamba_block_size: int = 0  # 0: the model has no recurrent layers
    num_kv_cache_groups: int = 1  # group 0 is full attention; the others have no block table
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0  # most drafts of a request in a step
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0  # most prompt tokens of one request in a step; 0: no such limit
    enable_chunked_prefill: bool = True  # False: a prompt is cut for snapshots only

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_kv_cache_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens must be at least 0, got {self.num_speculative_tokens}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 0, got {self.long_prefill_token_threshold}"
            )
        if self.mamba_block_size < 0 or self.mamba_block_size % self.block_size:
            raise ValueError(
                f"mamba_block_size must be a multiple of block_size, got {self.mamba_block_size} and {self.block_size}"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be fcfs or priority, got {self.policy!r}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens must be at least max_model_len, got "
                f"{self.max_num_batched_tokens} and {self.max_model_len}"
            )
