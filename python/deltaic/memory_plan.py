"""Choose an engine's sizes: what the user set, else what the model and the memory allow."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from deltaic import _core
from deltaic.device import DTYPE_BYTES, Placement, place
from deltaic.device_buffers import activation_bytes, draft_module_bytes, metadata_bytes, sampler_bytes
from deltaic.engine_config import EngineConfig
from deltaic.model_costs import count_draft_parameters
from deltaic.scheduler_config import SchedulerConfig

logger = logging.getLogger(__name__)

MAX_DEFAULT_CACHE_BYTES = 4 << 30  # on the CPU, which shares its memory with others
GRAPH_BYTES = 512 << 20  # of a GPU: captured graphs, the libraries' workspaces, loaded kernels


@dataclass(frozen=True, slots=True)
class DefaultSizes:
    """What a step may hold when nobody says."""

    max_num_seqs: int
    max_num_batched_tokens: int


DEFAULT_SIZES = {
    _core.DeviceType.cpu: DefaultSizes(max_num_seqs=32, max_num_batched_tokens=2048),
    _core.DeviceType.cuda: DefaultSizes(max_num_seqs=256, max_num_batched_tokens=8192),
}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, in bytes, before anything is loaded."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of a device is divided, and the sizes that follow from it. Bytes but for `sizes`, `kv_cache`."""

    placement: Placement
    memory: DeviceMemory
    usable_bytes: int  # that this engine may take
    weight_bytes: int
    activation_bytes: int  # hidden states, workspaces, logits, the sampler's state
    graph_bytes: int
    cache_bytes: int
    sizes: SchedulerConfig
    kv_cache: _core.KVCacheConfig

    @property
    def left_bytes(self) -> int:
        """Return what no part of the plan takes."""
        return self.usable_bytes - self.weight_bytes - self.activation_bytes - self.graph_bytes - self.cache_bytes

    def describe(self) -> str:
        """Return a line for an error: where the memory was to go, and what to lower."""
        return (
            f"{gigabytes(self.memory.free_bytes)} free of {gigabytes(self.memory.total_bytes)} on "
            f"{self.placement.device_name}, {gigabytes(self.weight_bytes)} for weights, "
            f"{gigabytes(self.activation_bytes)} for activations, {gigabytes(self.graph_bytes)} for graphs, "
            f"{gigabytes(self.cache_bytes)} for caches: lower "
            + ("gpu_memory_utilization or " if self.placement.is_cuda else "")
            + "kv_cache_memory_bytes"
        )


def plan_memory(
    model: _core.ModelConfig,
    config: EngineConfig,
    *,
    placement: Placement | None = None,
    memory: DeviceMemory | None = None,
    weight_bytes: int | None = None,
    num_speculative_tokens: int = 0,
) -> MemoryPlan:
    """Divide the memory of a device, by default the one that `config` names, as it is now.

    A size that the user left open shrinks until it fits, with one log line; one that the user set is refused with
    the numbers (MemoryError), as is a max_model_len beyond the model's (ValueError). weight_bytes are the bytes of the
    weights where they are known; else they follow from the shapes. With num_speculative_tokens there is room for the
    draft module's cache and the rows of verified steps.
    """
    num_positions = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > num_positions:
        raise ValueError(f"max_model_len {config.max_model_len} is beyond the model's {num_positions} positions")
    placement = placement or place(model, config)
    memory = memory or device_memory(placement)
    if weight_bytes is None:
        num_parameters = model.num_parameters() + (count_draft_parameters(model) if num_speculative_tokens else 0)
        weight_bytes = num_parameters * DTYPE_BYTES[matrix_dtype(model, placement)]
    budget = _Budget(model, config, placement, memory, weight_bytes, num_speculative_tokens)
    options = _core.MemoryPlanOptions(
        memory_bytes=budget.cache_bytes(),
        block_size=config.block_size,
        mamba_block_size=config.mamba_block_size,
        num_speculative_tokens=num_speculative_tokens,
        with_draft_module=num_speculative_tokens > 0,
        enable_prefix_caching=config.enable_prefix_caching,
        num_blocks=config.num_blocks,
        num_snapshot_slots=config.num_snapshot_slots,
        kv_dtype=placement.kv_dtype,
        conv_state_dtype=placement.conv_state_dtype,
        recurrent_state_dtype=placement.recurrent_state_dtype,
    )
    kv_cache = _fit(model, config, options, DEFAULT_SIZES[placement.device.type].max_num_seqs)
    has_recurrent_layers = model.num_layers_of(_core.LayerKind.linear_attention) > 0
    sizes = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=_max_num_batched_tokens(config, options, budget.max_num_batched_tokens),
        max_model_len=options.max_model_len,
        block_size=config.block_size,
        mamba_block_size=config.mamba_block_size if has_recurrent_layers else 0,
        num_kv_cache_groups=len(kv_cache.groups),
        enable_prefix_caching=config.enable_prefix_caching,
        num_speculative_tokens=num_speculative_tokens,
        policy="priority" if config.scheduling_policy == "priority" else "fcfs",
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )
    _warn_of_useless_snapshots(sizes)
    capacity = _core.cache_capacity(kv_cache, sizes.max_model_len)
    return MemoryPlan(
        placement=placement,
        memory=memory,
        usable_bytes=budget.usable_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=budget.activation_bytes(sizes.max_num_batched_tokens, sizes.max_num_seqs, sizes.max_model_len),
        graph_bytes=budget.graph_bytes,
        cache_bytes=capacity.kv_bytes + capacity.running_state_bytes + capacity.snapshot_bytes,
        sizes=sizes,
        kv_cache=kv_cache,
    )


def matrix_dtype(model: _core.ModelConfig, placement: Placement) -> _core.DType:
    """Return the type of matrices: the CPU keeps bf16 as it is stored."""
    return _core.DType.bf16 if not placement.is_cuda and model.dtype == _core.DType.bf16 else placement.dtype


class _Budget:
    """What is there for caches."""

    def __init__(
        self,
        model: _core.ModelConfig,
        config: EngineConfig,
        placement: Placement,
        memory: DeviceMemory,
        weight_bytes: int,
        num_drafts: int,
    ) -> None:
        self._model, self._config, self._placement = model, config, placement
        self._memory, self._weight_bytes, self._num_drafts = memory, weight_bytes, num_drafts
        defaults = DEFAULT_SIZES[placement.device.type]
        self.max_num_batched_tokens = config.max_num_batched_tokens or defaults.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs or defaults.max_num_seqs
        share = config.gpu_memory_utilization if placement.is_cuda else 1.0
        self.usable_bytes = int(memory.free_bytes * share)
        self.graph_bytes = GRAPH_BYTES if placement.is_cuda else 0

    def activation_bytes(self, num_tokens: int, num_seqs: int, max_model_len: int) -> int:
        model, placement = self._model, self._placement
        num_tokens = max(num_tokens, num_seqs * (1 + self._num_drafts))
        num_bytes = (
            activation_bytes(model, placement, num_tokens, num_seqs, max_model_len)
            + sampler_bytes(model, placement, num_seqs, self._num_drafts)
            + metadata_bytes(placement, num_tokens, num_seqs, max_model_len, self._config.block_size)
        )
        if self._num_drafts:
            num_bytes += draft_module_bytes(model, placement, num_tokens, num_seqs, max_model_len)
        return num_bytes

    def cache_bytes(self) -> int:
        """Return the bytes for caches: what the user set, else what weights and activations leave."""
        config = self._config
        if not self._placement.is_cuda:
            caches = config.kv_cache_memory_bytes or min(MAX_DEFAULT_CACHE_BYTES, self.usable_bytes // 4)
            if config.load_format == "dummy" and self._weight_bytes + caches > self.usable_bytes:
                raise MemoryError(
                    f"random weights take {gigabytes(self._weight_bytes)} and the caches {gigabytes(caches)}, the "
                    f"machine has {gigabytes(self.usable_bytes)} left: use a smaller model"
                )
            return caches
        max_model_len = config.max_model_len or self._model.max_position_embeddings
        activations = self.activation_bytes(self.max_num_batched_tokens, self._max_num_seqs, max_model_len)
        left = self.usable_bytes - self._weight_bytes - activations - self.graph_bytes
        wanted = config.kv_cache_memory_bytes
        if left <= 0 or (wanted is not None and wanted > left):
            raise MemoryError(self._too_little(activations, left))
        return left if wanted is None else wanted

    def _too_little(self, activations: int, left: int) -> str:
        config = self._config
        remedies = []
        if left > 0:
            remedies.append(f"lower kv_cache_memory_bytes to {left}")
        if config.gpu_memory_utilization < 0.95:
            remedies.append("raise gpu_memory_utilization")
        if self._placement.dtype == _core.DType.f32:
            remedies.append("use dtype bfloat16")
        if activations > self._weight_bytes // 8:
            remedies.append("lower max_num_batched_tokens or max_num_seqs")
        remedies.append("use a GPU with more memory or a smaller model")
        caches = "" if left <= 0 else f", and kv_cache_memory_bytes is {gigabytes(config.kv_cache_memory_bytes or 0)}"
        return (
            f"{self._placement.device_name} has {gigabytes(self._memory.free_bytes)} free of "
            f"{gigabytes(self._memory.total_bytes)}, of which gpu_memory_utilization {config.gpu_memory_utilization:g} "
            f"leaves {gigabytes(self.usable_bytes)}; the weights take {gigabytes(self._weight_bytes)}, activations of "
            f"max_num_batched_tokens {self.max_num_batched_tokens} and max_num_seqs {self._max_num_seqs} "
            f"{gigabytes(activations)}, graphs {gigabytes(self.graph_bytes)}{caches}: {', '.join(remedies)}"
        )


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def device_memory(placement: Placement) -> DeviceMemory:
    """Return what the device has now."""
    if placement.is_cuda:
        free, total = _core.device_memory(placement.device)
        return DeviceMemory(total_bytes=total, free_bytes=free)
    return DeviceMemory(total_bytes=_meminfo("MemTotal"), free_bytes=available_memory_bytes())


def _max_num_batched_tokens(config: EngineConfig, options: _core.MemoryPlanOptions, wanted: int) -> int:
    """Return the most tokens of a step: never more than all requests have, as the runner's buffers are as large."""
    if config.max_num_batched_tokens is None and not config.enable_chunked_prefill:
        wanted = max(wanted, options.max_model_len)
    return min(wanted, options.max_num_seqs * options.max_model_len)


def _fit(
    model: _core.ModelConfig, config: EngineConfig, options: _core.MemoryPlanOptions, default_seqs: int
) -> _core.KVCacheConfig:
    """Set max_model_len and max_num_seqs of `options` to what fits, and return the plan for them."""
    wanted_len = config.max_model_len or model.max_position_embeddings
    wanted_seqs = config.max_num_seqs or default_seqs
    options.max_model_len, options.max_num_seqs = wanted_len, wanted_seqs
    # Running requests take state slots before anything else, so first see that there are not too many of them.
    # Snapshots that the user asked for must be of use: a length without any is no way to make them fit.
    shortest = config.mamba_block_size + 1 if config.num_snapshot_slots else config.block_size
    while True:
        options.max_model_len = wanted_len if config.max_model_len is not None else min(shortest, wanted_len)
        try:
            kv_cache = _core.plan_kv_cache(model, options)
            if config.max_num_seqs is not None or options.max_num_seqs == 1 or not _crowded(kv_cache, options):
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


def _crowded(kv_cache: _core.KVCacheConfig, options: _core.MemoryPlanOptions) -> bool:
    """Return whether the states of running requests take more than half of the caches."""
    states = _core.cache_capacity(kv_cache, options.max_model_len).running_state_bytes
    return options.num_blocks is None and states > options.memory_bytes // 2


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
    available = _meminfo("MemAvailable")
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}: set kv_cache_memory_bytes")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return None
