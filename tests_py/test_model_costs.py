"""What models cost by their shapes: the published sizes, and the bounds worked out by hand elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltaic import _core
from deltaic.device import Placement, place
from deltaic.engine_config import EngineConfig
from deltaic.model_costs import ModelCosts, count_parameters

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "bench" / "configs"
PARITY = ROOT / "tests_py" / "data" / "parity"

H200 = (4.3e12, 803e12)  # bytes and operations a second
CUDA = _core.Device(_core.DeviceType.cuda, 0)


def load(name: str) -> tuple[_core.ModelConfig, Placement]:
    model = _core.load_model_config(CONFIGS / f"{name}.json")
    return model, place(model, EngineConfig(), CUDA)


# Hidden, layers, query and K/V heads, head dim, GDN key and value heads, tied, vocabulary, billions of parameters.
SIZES = {
    "qwen3_5_0_8b": (1024, 24, 8, 2, 256, 16, 16, True, 248320, 0.75),
    "qwen3_5_4b": (2560, 32, 16, 4, 256, 16, 32, True, 248320, 4.2),
    "qwen3_5_9b": (4096, 32, 16, 4, 256, 16, 32, False, 248320, 8.95),
    "qwen3_5_27b": (5120, 64, 24, 4, 256, 16, 48, False, 248320, 26.9),
    "qwen3_5_35b_a3b": (2048, 40, 16, 2, 256, 16, 32, False, 248320, 34.7),
    "qwen3_8b": (4096, 36, 32, 8, 128, 0, 0, False, 151936, 8.19),
}


def test_there_is_a_line_for_every_config() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == SIZES.keys()


@pytest.mark.parametrize("name", SIZES)
def test_configs_have_the_published_sizes(name: str) -> None:
    model, placement = load(name)
    hidden, layers, heads, kv_heads, head_dim, key_heads, value_heads, tied, vocabulary, billions = SIZES[name]
    assert (model.hidden_size, model.num_layers, model.vocab_size) == (hidden, layers, vocabulary)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (heads, kv_heads, head_dim)
    assert (model.linear_num_key_heads, model.linear_num_value_heads) == (key_heads, value_heads)
    assert model.tie_word_embeddings == tied
    assert model.num_layers_of(_core.LayerKind.full_attention) == (layers // 4 if key_heads else layers)
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.005)
    assert placement.dtype == _core.DType.bf16
    if key_heads:
        assert (model.linear_key_head_dim, model.linear_value_head_dim, model.linear_conv_kernel_dim) == (128, 128, 4)
        assert model.max_position_embeddings == 262144
        assert model.num_mtp_layers == 1
    if name.endswith("a3b"):
        assert (model.num_experts, model.num_experts_per_token) == (256, 8)
        assert (model.moe_intermediate_size, model.shared_expert_intermediate_size) == (512, 512)
        assert all(model.is_moe_layer)


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in [*CONFIGS.glob("*.json"), *PARITY.glob("*/fp32/config.json")])
)
def test_parts_add_up_to_the_core_s_count(folder: Path) -> None:
    paths = folder.glob("*.json") if folder == CONFIGS else [folder / "config.json"]
    for path in paths:
        model = _core.load_model_config(path)
        assert count_parameters(model).total == model.num_parameters(), path


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("qwen3_5_35b_a3b", {1: 1.41, 8: 4.54, 32: 11.6, 128: 20.1}),
        ("qwen3_5_9b", {1: 3.72, 8: 3.95, 32: 4.71, 128: 7.76}),
        ("qwen3_5_4b", {1: 1.99, 8: 2.21, 32: 2.97, 128: 6.02}),
        ("qwen3_5_0_8b", {1: 0.36, 8: 0.45, 32: 0.73, 128: 1.89}),
    ],
)
def test_decode_bounds_agree_with_those_worked_out_by_hand(name: str, bounds: dict[int, float]) -> None:
    costs = ModelCosts(*load(name))
    for batch_size, bound in bounds.items():
        assert 1e3 * costs.decode_step(batch_size, 1024).seconds(*H200) == pytest.approx(bound, rel=0.03), batch_size


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("qwen3_5_35b_a3b", {2048: 16, 8192: 59}),
        ("qwen3_5_9b", {2048: 37, 8192: 151}),
        ("qwen3_5_4b", {2048: 19, 8192: 81}),
        ("qwen3_5_0_8b", {2048: 2.9, 8192: 13}),
    ],
)
def test_prefill_bounds_agree_with_those_worked_out_by_hand(name: str, bounds: dict[int, float]) -> None:
    costs = ModelCosts(*load(name))
    for num_tokens, bound in bounds.items():
        assert 1e3 * costs.prefill(num_tokens).seconds(*H200) == pytest.approx(bound, rel=0.06), num_tokens


def test_distinct_experts_at_uniform_routing() -> None:
    costs = ModelCosts(*load("qwen3_5_35b_a3b"))
    assert [round(costs.distinct_experts(n)) for n in (1, 8, 32, 128)] == [8, 57, 163, 252]
    assert ModelCosts(*load("qwen3_5_4b")).distinct_experts(8) == 0.0


def test_state_of_a_request() -> None:
    """61.4 MiB: 30 layers of 8192 x 3 in bf16, and of 32 heads of 128 x 128 in f32 or bf16."""
    model, placement = load("qwen3_5_35b_a3b")
    assert ModelCosts(model, placement).state_bytes == 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    half = place(model, EngineConfig(recurrent_state_dtype="bfloat16"), CUDA)
    assert ModelCosts(model, half).state_bytes == 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 2)
    assert ModelCosts(model, placement).kv_bytes_per_token == 10 * 2 * 2 * 256 * 2
