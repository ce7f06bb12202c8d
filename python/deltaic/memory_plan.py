"""Choose an engine's sizes: what the user set, else what the model and the memory allow."""

from __future__ import annotations

import logging
from pathlib import Path

from deltaic import _core
from deltaic.engine_config import EngineConfig
from deltaic.scheduler_config import SchedulerConfig

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = 32
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
MAX_DEFAULT_CACHE_BYTES = 4 << 30


def plan_sizes(model: _core.ModelConfig, config: EngineConfig) -> tuple[SchedulerConfig, _core.KVCacheConfig]:
    """Divide the memory for caches.

    A size that the user left open shrinks until it fits, with one log line; one that the user set is refused with
    the numbers (MemoryError), as is a max_model_len beyond the model's (ValueError).
    """
    num_positions = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > num_positions:
        raise ValueError(f"max_model_len {config.max_model_len} is beyond the model's {num_positions} positions")
    memory_bytes = config.kv_cache_memory_bytes
    if memory_bytes is None:
        memory_bytes = min(MAX_DEFAULT_CACHE_BYTES, available_memory_bytes() // 4)
    has_recurrent_layers = model.num_layers_of(_core.LayerKind.linear_attention) > 0
    options = _core.MemoryPlanOptions(
        memory_bytes=memory_bytes,
        block_size=config.block_size,
        mamba_block_size=config.mamba_block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_blocks=config.num_blocks,
        num_snapshot_slots=config.num_snapshot_slots,
    )
    kv_cache = _fit(model, config, options)
    sizes = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=_max_num_batched_tokens(config, options),
        max_model_len=options.max_model_len,
        block_size=config.block_size,
        mamba_block_size=config.mamba_block_size if has_recurrent_layers else 0,
        num_kv_cache_groups=len(kv_cache.groups),
        enable_prefix_caching=config.enable_prefix_caching,
        policy="priority" if config.scheduling_policy == "priority" else "fcfs",
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )
    _warn_of_useless_snapshots(sizes)
    return sizes, kv_cache


def _max_num_batched_tokens(config: EngineConfig, options: _core.MemoryPlanOptions) -> int:
    """Return the most tokens of a step: never more than all requests have, as the runner's buffers are as large."""
    wanted = config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    if config.max_num_batched_tokens is None and not config.enable_chunked_prefill:
        wanted = max(wanted, options.max_model_len)
    return min(wanted, options.max_num_seqs * options.max_model_len)


def _fit(model: _core.ModelConfig, config: EngineConfig, options: _core.MemoryPlanOptions) -> _core.KVCacheConfig:
    """Set max_model_len and max_num_seqs of `options` to what fits, and return the plan for them."""
    wanted_len = config.max_model_len or model.max_position_embeddings
    wanted_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    options.max_model_len, options.max_num_seqs = wanted_len, wanted_seqs
    # Running requests take state slots before anything else, so first see that there are not too many of them.
    # Snapshots that the user asked for must be of use: a length without any is no way to make them fit.
    shortest = config.mamba_block_size + 1 if config.num_snapshot_slots else config.block_size
    while True:
        options.max_model_len = wanted_len if config.max_model_len is not None else min(shortest, wanted_len)
        try:
            kv_cache = _core.plan_kv_cache(model, options)
            break
        except _core.OutOfMemory:
            if config.max_num_seqs is not None or options.max_num_seqs == 1:
                raise
        options.max_num_seqs //= 2
    if config.max_model_len is None:
        kv_cache = _longest(model, options, wanted_len)
    if options.max_model_len < wanted_len:
        logger.warning(
            "max_model_len is %d instead of the model's %d: the caches have %d blocks of %d tokens",
            options.max_model_len,
            wanted_len,
            kv_cache.num_blocks - 1,
            config.block_size,
        )
    if options.max_num_seqs < wanted_seqs:
        logger.warning(
            "max_num_seqs is %d instead of %d: the caches have %d bytes",
            options.max_num_seqs,
            wanted_seqs,
            options.memory_bytes,
        )
    return kv_cache


def _longest(model: _core.ModelConfig, options: _core.MemoryPlanOptions, limit: int) -> _core.KVCacheConfig:
    """Return the plan for the largest max_model_len up to `limit`, given that one block fits; set it in `options`."""
    low, high = options.max_model_len, limit
    while low < high:
        options.max_model_len = (low + high + 1) // 2
        try:
            _core.plan_kv_cache(model, options)
            low = options.max_model_len
        except _core.OutOfMemory:
            high = options.max_model_len - 1
    options.max_model_len = low
    return _core.plan_kv_cache(model, options)


def _warn_of_useless_snapshots(sizes: SchedulerConfig) -> None:
    interval = sizes.mamba_block_size
    if sizes.enable_prefix_caching and interval >= sizes.max_model_len:
        logger.warning(
            "prefix caching cannot hit: mamba_block_size %d is not below max_model_len %d",
            interval,
            sizes.max_model_len,
        )


def available_memory_bytes() -> int:
    """Return what the machine, and the control group if there is one, has left for this process."""
    available = _meminfo_available()
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable: set kv_cache_memory_bytes")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return None
