from __future__ import annotations

from pathlib import Path

import pytest
from deltaic.engine_config import EngineConfig
from deltaic.model_info import describe_model, model_info
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
    assert {"state", "snapshots"} <= {name for name, _ in hybrid}
    plain = TINY | {"layer_types": ["full_attention"] * 4, "full_attention_interval": 1}
    rows = dict(describe_model(model_info(write_checkpoint(tmp_path / "plain", **plain), EngineConfig())))
    assert not {"state", "snapshots"} & set(rows)
    assert rows["architecture"] == "qwen3_5, 4 layers (4 full attention)"


def test_what_does_not_fit_is_refused_with_the_numbers(default_model: Path) -> None:
    with pytest.raises(MemoryError, match=r"\d"):
        model_info(default_model, EngineConfig(kv_cache_memory_bytes=1000, max_model_len=64, max_num_seqs=1))
    with pytest.raises(ValueError, match="4096"):
        model_info(default_model, EngineConfig(max_model_len=5000))
