"""Sizes: what the user set is kept or refused, what was left open shrinks until it fits."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from deltaic import _core
from deltaic.device import place
from deltaic.engine import Engine
from deltaic.engine_config import EngineConfig
from deltaic.memory_plan import DeviceMemory, MemoryPlan, available_memory_bytes, plan_memory
from deltaic.sampling_params import SamplingParams
from deltaic.scheduler_config import SchedulerConfig

PARITY = Path(__file__).parent / "data" / "parity"
CONFIGS = Path(__file__).parent.parent / "bench" / "configs"
GIB = 1 << 30


def plan_sizes(model: _core.ModelConfig, config: EngineConfig) -> tuple[SchedulerConfig, _core.KVCacheConfig]:
    plan = plan_memory(model, config)
    return plan.sizes, plan.kv_cache


def plan_for_gpu(name: str, free_bytes: int, **options: Any) -> MemoryPlan:
    """Plan for a GPU that need not exist."""
    model = _core.load_model_config(CONFIGS / f"{name}.json")
    config = EngineConfig(device="cuda", **options)
    placement = place(model, config, _core.Device(_core.DeviceType.cuda, 0))
    return plan_memory(model, config, placement=placement, memory=DeviceMemory(free_bytes + GIB, free_bytes))


@pytest.fixture(scope="module")
def hybrid() -> _core.ModelConfig:
    return _core.load_model_config(PARITY / "qwen3_5" / "fp32")


@pytest.fixture(scope="module")
def attention_only() -> _core.ModelConfig:
    return _core.load_model_config(PARITY / "qwen3_tied" / "fp32")


def test_defaults_take_all_that_the_model_has(hybrid: _core.ModelConfig, attention_only: _core.ModelConfig) -> None:
    for model, interval, num_groups in ((hybrid, 256, 2), (attention_only, 0, 1)):
        sizes, kv_cache = plan_sizes(model, EngineConfig(kv_cache_memory_bytes=256 << 20))
        assert sizes.max_model_len == 4096
        assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (32, 2048)
        assert (sizes.mamba_block_size, sizes.num_kv_cache_groups) == (interval, num_groups)
        assert (kv_cache.num_blocks - 1) * 16 >= 4096
        assert (kv_cache.num_snapshot_slots > 0) == (interval > 0)


def test_block_0_is_not_counted() -> None:
    """D74: 64 blocks of 16 tokens refuse max_model_len 1024 and take 1008, which completes; 512 needs 33, not 32."""
    path = PARITY / "qwen3_tied" / "fp32"
    for num_blocks, max_model_len, fits in ((64, 1024, False), (64, 1008, True), (32, 512, False), (33, 512, True)):
        config = EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len)
        if not fits:
            with pytest.raises(MemoryError, match=f"max_model_len is {max_model_len}.*raise num_blocks"):
                Engine.from_checkpoint(path, config)
            continue
        engine = Engine.from_checkpoint(path, config)
        engine.add_request("a", [1] * (max_model_len - 3), SamplingParams(temperature=0.0, max_tokens=None))
        tokens = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None
                tokens += output.new_token_ids
        assert len(tokens) == 3


def test_max_model_len_shrinks_to_what_fits_with_one_line(
    hybrid: _core.ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        sizes, kv_cache = plan_sizes(hybrid, EngineConfig(num_blocks=1 + 20))
    assert sizes.max_model_len == 20 * 16
    (record,) = caplog.records
    assert record.getMessage() == (
        "max_model_len is 320 instead of the model's 4096: the caches have 20 blocks of 16 tokens"
    )
    assert kv_cache.num_blocks == 21


def test_max_num_seqs_shrinks_to_what_fits_with_one_line(
    hybrid: _core.ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """D66: more requests than state slots are never a crash in the middle of a run."""
    with caplog.at_level(logging.WARNING):
        sizes, _ = plan_sizes(hybrid, EngineConfig(kv_cache_memory_bytes=400_000, max_model_len=64))
    assert 1 <= sizes.max_num_seqs < 32
    messages = [record.getMessage() for record in caplog.records]
    assert f"max_num_seqs is {sizes.max_num_seqs} instead of 32: the caches have 400000 bytes" in messages


def test_what_the_user_set_is_refused_with_the_numbers(hybrid: _core.ModelConfig) -> None:
    with pytest.raises(ValueError, match="max_model_len 4097 is beyond the model's 4096 positions"):
        plan_sizes(hybrid, EngineConfig(max_model_len=4097))
    with pytest.raises(MemoryError, match="max_num_seqs"):
        plan_sizes(hybrid, EngineConfig(kv_cache_memory_bytes=400_000, max_num_seqs=1024))
    with pytest.raises(MemoryError, match="max_model_len"):
        plan_sizes(hybrid, EngineConfig(kv_cache_memory_bytes=1_000_000, max_model_len=4096, max_num_seqs=1))


def test_a_mamba_block_beyond_the_context_is_warned_of(
    hybrid: _core.ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """D33: no snapshot could ever be hit, and the hit rate would silently be 0."""
    with caplog.at_level(logging.WARNING):
        plan_sizes(hybrid, EngineConfig(max_model_len=256, kv_cache_memory_bytes=64 << 20))
    assert [record.getMessage() for record in caplog.records] == [
        "prefix caching cannot hit: mamba_block_size 256 is not below max_model_len 256"
    ]


def test_chunked_prefill_off_makes_steps_as_long_as_a_prompt(hybrid: _core.ModelConfig) -> None:
    sizes, _ = plan_sizes(hybrid, EngineConfig(enable_chunked_prefill=False, kv_cache_memory_bytes=64 << 20))
    assert sizes.max_num_batched_tokens == 4096


def test_state_memory_does_not_depend_on_the_number_of_blocks() -> None:
    path = PARITY / "qwen3_5" / "fp32"
    slots = []
    for num_blocks in (100, 1000):
        config = EngineConfig(num_blocks=num_blocks, max_model_len=512, max_num_seqs=4, enable_prefix_caching=False)
        engine = Engine.from_checkpoint(path, config)
        assert engine.runner.num_blocks == num_blocks
        slots.append(engine.runner.num_state_slots)
    assert slots == [4, 4]


def test_available_memory_is_a_sane_number() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "num_blocks",
        "num_snapshot_slots",
        "num_threads",
        "long_prefill_token_threshold",
        "kv_cache_memory_bytes",
    ],
)
def test_numbers_beyond_what_the_core_counts_with_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at most [0-9]+, got {10**20}"):
        EngineConfig(**{name: 10**20})


def test_context_shorter_than_a_block_is_kept(tmp_path: Path) -> None:
    config = json.loads((PARITY / "qwen3_5" / "fp32" / "config.json").read_text())
    text_config = config.get("text_config", config)
    text_config["max_position_embeddings"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes, _ = plan_sizes(_core.load_model_config(tmp_path), EngineConfig(kv_cache_memory_bytes=64 << 20))
    assert sizes.max_model_len == 5
    sizes, _ = plan_sizes(
        _core.load_model_config(PARITY / "qwen3_5" / "fp32"), EngineConfig(block_size=8192, mamba_block_size=8192)
    )
    assert sizes.max_model_len == 4096


def test_a_step_has_no_more_tokens_than_the_requests(hybrid: _core.ModelConfig) -> None:
    config = EngineConfig(max_num_batched_tokens=2**31 - 1, max_num_seqs=3, max_model_len=100)
    assert plan_sizes(hybrid, config)[0].max_num_batched_tokens == 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("poison_caches", "yes"),
        ("enable_prefix_caching", None),
        ("async_scheduling", 1),
        ("enable_chunked_prefill", 0),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", True),
    ],
)
def test_switch_or_share_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


def test_snapshots_that_do_not_fit_are_refused(hybrid: _core.ModelConfig) -> None:
    """max_model_len does not shrink until no prefix is long enough for a snapshot."""
    config = EngineConfig(num_snapshot_slots=10**6, kv_cache_memory_bytes=64 << 20)
    with pytest.raises(MemoryError, match=r"1000000 snapshots.*num_snapshot_slots"):
        plan_sizes(hybrid, config)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


def test_caches_get_what_a_gpu_has_left() -> None:
    plan = plan_for_gpu("qwen3_5_35b_a3b", 140 * GIB)
    assert plan.usable_bytes == int(140 * GIB * 0.9)
    assert plan.weight_bytes == 2 * 34_660_610_688
    assert (plan.sizes.max_num_seqs, plan.sizes.max_num_batched_tokens) == (256, 8192)
    assert plan.sizes.max_model_len == 262144
    # Nothing is left but what no block fits into.
    block_bytes = 16 * 10 * 2 * 2 * 256 * 2
    assert 0 <= plan.left_bytes < block_bytes + GIB // 100
    capacity = _core.cache_capacity(plan.kv_cache, plan.sizes.max_model_len)
    slot_bytes = 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    assert capacity.running_state_bytes == 256 * slot_bytes
    assert capacity.snapshot_bytes == plan.kv_cache.num_snapshot_slots * slot_bytes
    assert plan.kv_cache.num_snapshot_slots > 50
    assert plan.cache_bytes == capacity.kv_bytes + capacity.running_state_bytes + capacity.snapshot_bytes


def test_types_of_the_caches_count() -> None:
    full = plan_for_gpu("qwen3_5_4b", 80 * GIB, max_num_seqs=64, num_snapshot_slots=0)
    half = plan_for_gpu("qwen3_5_4b", 80 * GIB, max_num_seqs=64, num_snapshot_slots=0, recurrent_state_dtype="bfloat16")
    saved = 64 * 24 * 32 * 128 * 128 * 2
    gained = (half.kv_cache.num_blocks - full.kv_cache.num_blocks) * 16 * 8 * 2 * 4 * 256 * 2
    assert saved - gained in range(16 * 8 * 2 * 4 * 256 * 2)
    wide = plan_for_gpu("qwen3_5_4b", 80 * GIB, max_num_seqs=64, num_snapshot_slots=0, kv_cache_dtype="float32")
    assert wide.kv_cache.num_blocks == pytest.approx(full.kv_cache.num_blocks / 2, rel=0.01)
    single = plan_for_gpu("qwen3_5_4b", 80 * GIB, dtype="float32")
    assert single.weight_bytes == 2 * full.weight_bytes


def test_states_of_running_requests_leave_half_for_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = plan_for_gpu("qwen3_5_4b", 23 * GIB)
    capacity = _core.cache_capacity(plan.kv_cache, plan.sizes.max_model_len)
    assert capacity.running_state_bytes <= capacity.kv_bytes + capacity.snapshot_bytes
    assert plan.sizes.max_num_seqs in (64, 128)
    assert "max_num_seqs is" in caplog.text


def test_weights_that_do_not_fit_are_refused_with_the_numbers_and_a_remedy() -> None:
    message = (
        r"cuda:0 has 25\.77 GB free of 26\.84 GB, of which gpu_memory_utilization 0\.9 leaves 23\.19 GB; the weights "
        r"take 69\.32 GB, activations of max_num_batched_tokens 8192 and max_num_seqs 256 .* GB, graphs .* GB: "
        r"raise gpu_memory_utilization, use a GPU with more memory or a smaller model"
    )
    with pytest.raises(MemoryError, match=message):
        plan_for_gpu("qwen3_5_35b_a3b", 24 * GIB)
    with pytest.raises(MemoryError, match="use dtype bfloat16"):
        plan_for_gpu("qwen3_5_9b", 24 * GIB, dtype="float32")
    with pytest.raises(MemoryError, match="lower max_num_batched_tokens or max_num_seqs"):
        plan_for_gpu("qwen3_5_0_8b", 4 * GIB, max_num_batched_tokens=65536, max_num_seqs=2048)


def test_caches_that_the_user_set_must_fit_beside_the_weights() -> None:
    plan = plan_for_gpu("qwen3_5_4b", 80 * GIB, kv_cache_memory_bytes=20 * GIB)
    assert 19 * GIB < plan.cache_bytes <= 20 * GIB
    with pytest.raises(MemoryError, match=r"kv_cache_memory_bytes is 75\.16 GB: lower kv_cache_memory_bytes to [0-9]+"):
        plan_for_gpu("qwen3_5_4b", 80 * GIB, kv_cache_memory_bytes=70 * GIB)


def test_memory_that_runs_out_in_spite_of_the_plan_is_told_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise _core.OutOfMemory("cudaMalloc of 5 bytes failed")

    monkeypatch.setattr(_core, "ModelRunner", refuse)
    config = EngineConfig(device="cpu", num_blocks=100, max_model_len=512, max_num_seqs=4)
    message = (
        r"cudaMalloc of 5 bytes failed \(planned: [0-9.]+ GB free of [0-9.]+ GB on cpu, [0-9.]+ GB for weights, .*: "
        r"lower kv_cache_memory_bytes\)"
    )
    with pytest.raises(MemoryError, match=message):
        Engine.from_checkpoint(PARITY / "qwen3_5" / "fp32", config)
    assert "for caches: lower gpu_memory_utilization or" in plan_for_gpu("qwen3_5_4b", 80 * GIB).describe()


def test_an_attention_model_has_no_states_on_a_gpu() -> None:
    plan = plan_for_gpu("qwen3_8b", 80 * GIB)
    assert (plan.kv_cache.num_snapshot_slots, plan.sizes.max_num_seqs) == (0, 256)
    assert plan.sizes.max_model_len == 40960
