"""The engine of one stage: a decoder whose weights are a part of a checkpoint, with a hook around its forward."""

from __future__ import annotations

from dataclasses import dataclass

from deltaic import _core
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.memory_plan import plan_memory


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Limits of one stage."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int = 512
    num_threads: int = 0
    num_blocks: int | None = None  # of attention; None: all requests at full length, if memory has room for so many
    block_size: int = 16
    poison_caches: bool = False

    def most_blocks(self) -> int:
        """Return the blocks that the requests can use, block 0 included."""
        needed = -(-self.max_model_len // self.block_size) * self.max_num_seqs + 1
        return needed if self.num_blocks is None else self.num_blocks


def make_stage_engine(
    model: _core.ModelConfig, tensors: _core.StageTensors, sizes: StageSizes, hook: _core.StepHook
) -> Engine:
    """Make an engine without a prefix cache and without steps in flight: the hook's rows must be a request's own."""
    config = EngineConfig(
        device="cpu",
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        enable_prefix_caching=False,
        speculative_tokens=0,
        async_scheduling=False,
        num_threads=sizes.num_threads,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        mamba_block_size=sizes.block_size * 16,
    )
    plan = plan_memory(model, config, weight_bytes=tensors.num_bytes)
    limits, kv_cache = plan.sizes, plan.kv_cache
    options = _core.RunnerOptions(
        device=_core.Device(),
        max_num_reqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_threads=sizes.num_threads,
        poison_caches=sizes.poison_caches,
    )
    runner = _core.make_stage_runner(model, tensors, kv_cache, options)
    runner.set_step_hook(hook)
    cache = _core.CacheManager(
        _core.CacheManagerOptions(
            num_blocks=kv_cache.num_blocks,
            block_size=limits.block_size,
            mamba_block_size=limits.mamba_block_size,
            num_snapshot_slots=kv_cache.num_snapshot_slots,
            first_snapshot_slot=kv_cache.num_running_slots or limits.max_num_seqs,
            enable_prefix_caching=False,
        )
    )
    return Engine(runner, cache, limits, vocab_size=model.vocab_size, async_scheduling=False)
