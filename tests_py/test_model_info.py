from __future__ import annotations

from pathlib import Path

import pytest
from deltaic.engine_config import EngineConfig
from deltaic.model_info import describe_model, model_info, parse_size
from tiny_model import TINY, write_checkpoint


def test_sizes_of_the_bundled_model(default_model: Path) -> None:
    found = model_info(default_model, EngineConfig(max_num_seqs=4, num_blocks=101, num_snapshot_slots=2))
    assert (found.architecture, found.num_layers) == ("qwen3_5", 8)
    assert (found.num_linear_attention_layers, found.num_full_attention_layers, found.num_mtp_layers) == (6, 2, 1)
    assert found.weight_bytes == (default_model / "model.safetensors").stat().st_size
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 64 * 4  # layers, K and V, heads, head_dim, f32
    # Six layers: the last three inputs of 1,024 channels, and a 64 x 64 matrix for each of 8 heads.
    assert found.state_bytes_per_sequence == 6 * (3 * 1024 + 8 * 64 * 64) * 4
    assert found.num_cache_tokens == 100 * 16
    assert found.cache_bytes == 101 * 16 * found.kv_bytes_per_token + (4 + 2) * found.state_bytes_per_sequence
    assert found.num_full_length_sequences == 100 * 16 // found.max_model_len


def test_more_requests_fit_than_may_run(default_model: Path) -> None:
    found = model_info(default_model, EngineConfig(max_num_seqs=3, max_model_len=64, num_blocks=1000))
    assert found.num_full_length_sequences == 3


def test_table_has_states_only_for_models_that_have_them(tmp_path: Path) -> None:
    hybrid = describe_model(model_info(write_checkpoint(tmp_path / "hybrid"), EngineConfig()))
    assert {"state", "  states", "  snapshots"} <= {name for name, _ in hybrid}
    plain = TINY | {"layer_types": ["full_attention"] * 4, "full_attention_interval": 1}
    rows = dict(describe_model(model_info(write_checkpoint(tmp_path / "plain", **plain), EngineConfig())))
    assert not {"state", "  states", "  snapshots"} & set(rows)
    assert rows["architecture"] == "qwen3_5, 4 layers (4 full attention)"


def test_plan_for_a_gpu_that_is_not_here() -> None:
    config_file = Path(__file__).parent.parent / "bench" / "configs" / "qwen3_5_35b_a3b.json"
    found = model_info(config_file, EngineConfig(device="cuda:1"), 141 * 10**9)
    assert (found.device, found.dtype, found.file_bytes) == ("cuda:1", "bf16", 0)
    assert (found.total_memory_bytes, found.usable_memory_bytes) == (141 * 10**9, int(141e9 * 0.9))
    parts = found.weight_bytes + found.activation_bytes + found.graph_bytes + found.cache_bytes
    assert parts + found.left_memory_bytes == found.usable_memory_bytes
    rows = dict(describe_model(found))
    assert rows["memory"] == "cuda:1: 131.3 GiB free of 131.3 GiB, 118.2 GiB may be used"
    assert rows["  weights"] == "64.6 GiB in bf16"
    assert rows["weights"] == "none: a config.json alone"
    assert "256 running requests" in rows["  states"]
    with pytest.raises(ValueError, match="must not be 'cpu'"):
        model_info(config_file, EngineConfig(device="cpu"), 10**9)
    with pytest.raises(MemoryError, match=r"the weights take 69\.32 GB"):
        model_info(config_file, EngineConfig(), 24 * 10**9)


def test_sizes_are_read_as_people_write_them() -> None:
    for text, value in (("141GB", 141 * 10**9), ("24GiB", 24 << 30), ("1.5 g", 1_500_000_000), ("80000", 80000)):
        assert parse_size("device_memory", text) == value
    for text in ("", "GB", "-1GB", "1XB", "1e9", "nan"):
        with pytest.raises(ValueError, match="device_memory must be a size like 141GB or 24GiB"):
            parse_size("device_memory", text)


def test_what_does_not_fit_is_refused_with_the_numbers(default_model: Path) -> None:
    with pytest.raises(MemoryError, match=r"\d"):
        model_info(default_model, EngineConfig(kv_cache_memory_bytes=1000, max_model_len=64, max_num_seqs=1))
    with pytest.raises(ValueError, match="4096"):
        model_info(default_model, EngineConfig(max_model_len=5000))
