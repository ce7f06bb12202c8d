"""Random checkpoints: as small as a test can use, or as large as it needs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltaic
import numpy as np

# A Qwen3.5 text model of some hundred kilobytes: three Gated DeltaNet layers, one of full attention.
TINY: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "attn_output_gate": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 4095,
    "dtype": "bfloat16",
}


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a dense Qwen3.5 text model with tied embeddings."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, head_dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    num_k, num_v = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim_k, dim_v = config["linear_key_head_dim"], config["linear_value_head_dim"]
    channels = 2 * num_k * dim_k + num_v * dim_v
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        if (i + 1) % config["full_attention_interval"] == 0:
            yield layer + "self_attn.q_proj.weight", (2 * heads * head_dim, hidden)
            yield layer + "self_attn.k_proj.weight", (kv_heads * head_dim, hidden)
            yield layer + "self_attn.v_proj.weight", (kv_heads * head_dim, hidden)
            yield layer + "self_attn.o_proj.weight", (hidden, heads * head_dim)
            yield layer + "self_attn.q_norm.weight", (head_dim,)
            yield layer + "self_attn.k_norm.weight", (head_dim,)
        else:
            yield layer + "linear_attn.in_proj_qkv.weight", (channels, hidden)
            yield layer + "linear_attn.in_proj_z.weight", (num_v * dim_v, hidden)
            yield layer + "linear_attn.in_proj_b.weight", (num_v, hidden)
            yield layer + "linear_attn.in_proj_a.weight", (num_v, hidden)
            yield layer + "linear_attn.conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"])
            yield layer + "linear_attn.A_log", (num_v,)
            yield layer + "linear_attn.dt_bias", (num_v,)
            yield layer + "linear_attn.norm.weight", (dim_v,)
            yield layer + "linear_attn.out_proj.weight", (hidden, num_v * dim_v)
        yield layer + "mlp.gate_proj.weight", (inner, hidden)
        yield layer + "mlp.up_proj.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)


def write_checkpoint(folder: Path, *, seed: int = 0, with_tokenizer: bool = True, **fields: Any) -> Path:
    """Write a random bf16 checkpoint; `fields` change TINY's config. The tokenizer is the bundled model's."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY | fields
    (folder / "config.json").write_text(json.dumps(config))
    if with_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(deltaic.__file__).parent / "default_model" / name, folder)
    shapes = dict(tensor_shapes(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(_values(rng, name, shape).tobytes())
    return folder


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return random values, of a size that keeps activations near 1, as the upper halves of f32."""
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= 0.02 if len(shape) == 1 else shape[-1] ** -0.5
    if name.endswith("linear_attn.norm.weight"):
        values += 1
    return (values.view(np.uint32) >> 16).astype(np.uint16)
