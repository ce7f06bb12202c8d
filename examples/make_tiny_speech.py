"""Make a checkpoint that speaks, with random weights, of less than a megabyte: what it says is noise.

    python examples/make_tiny_speech.py tiny-speech
    deltaic speak "Hello" --model tiny-speech -o hello.wav

A thinker and a talker with Gated DeltaNet layers, a code predictor of 4 codebooks and a small causal decoder.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltaic
import numpy as np

CODES, CONTROLS, CODEBOOKS = 64, 16, 4
TEXT_VOCAB = 4096
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def hybrid_config(hidden: int, vocab: int, **fields: Any) -> dict[str, Any]:
    """Return a Qwen3.5 text model: three Gated DeltaNet layers, one of full attention."""
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
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
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "attn_output_gate": True,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        **fields,
    }


def hybrid_shapes(prefix: str, config: dict[str, Any], embedding: str, head: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    yield prefix + embedding, (config["vocab_size"], hidden)
    yield prefix + head, (config["vocab_size"], hidden)
    yield prefix + "model.norm.weight", (hidden,)
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        if (i + 1) % config["full_attention_interval"] == 0:
            yield layer + "self_attn.q_proj.weight", (2 * heads * dim, hidden)
            yield layer + "self_attn.k_proj.weight", (kv_heads * dim, hidden)
            yield layer + "self_attn.v_proj.weight", (kv_heads * dim, hidden)
            yield layer + "self_attn.o_proj.weight", (hidden, heads * dim)
            yield layer + "self_attn.q_norm.weight", (dim,)
            yield layer + "self_attn.k_norm.weight", (dim,)
        else:
            yield layer + "linear_attn.in_proj_qkv.weight", (2 * keys + values, hidden)
            yield layer + "linear_attn.in_proj_z.weight", (values, hidden)
            yield layer + "linear_attn.in_proj_b.weight", (config["linear_num_value_heads"], hidden)
            yield layer + "linear_attn.in_proj_a.weight", (config["linear_num_value_heads"], hidden)
            yield layer + "linear_attn.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
            yield layer + "linear_attn.A_log", (config["linear_num_value_heads"],)
            yield layer + "linear_attn.dt_bias", (config["linear_num_value_heads"],)
            yield layer + "linear_attn.norm.weight", (config["linear_value_head_dim"],)
            yield layer + "linear_attn.out_proj.weight", (hidden, values)
        yield from mlp_shapes(layer, hidden, inner)


def mlp_shapes(layer: str, hidden: int, inner: int) -> Shapes:
    yield layer + "mlp.gate_proj.weight", (inner, hidden)
    yield layer + "mlp.up_proj.weight", (inner, hidden)
    yield layer + "mlp.down_proj.weight", (hidden, inner)


def projection_shapes(name: str, inputs: int, inner: int, outputs: int) -> Shapes:
    for layer, (rows, columns) in {"linear_fc1": (inner, inputs), "linear_fc2": (outputs, inner)}.items():
        yield f"{name}.{layer}.weight", (rows, columns)
        yield f"{name}.{layer}.bias", (rows,)


def attention_shapes(layer: str, config: dict[str, Any]) -> Shapes:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield layer + "input_layernorm.weight", (hidden,)
    yield layer + "post_attention_layernorm.weight", (hidden,)
    yield layer + "self_attn.q_proj.weight", (heads * dim, hidden)
    yield layer + "self_attn.k_proj.weight", (kv_heads * dim, hidden)
    yield layer + "self_attn.v_proj.weight", (kv_heads * dim, hidden)
    yield layer + "self_attn.o_proj.weight", (hidden, heads * dim)


def predictor_shapes(prefix: str, config: dict[str, Any], talker_hidden: int) -> Shapes:
    hidden = config["hidden_size"]
    for i in range(config["num_code_groups"] - 1):
        yield f"{prefix}model.codec_embedding.{i}.weight", (config["vocab_size"], talker_hidden)
        yield f"{prefix}lm_head.{i}.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}model.layers.{i}."
        yield from attention_shapes(layer, config)
        yield layer + "self_attn.q_norm.weight", (config["head_dim"],)
        yield layer + "self_attn.k_norm.weight", (config["head_dim"],)
        yield from mlp_shapes(layer, hidden, config["intermediate_size"])
    yield prefix + "model.norm.weight", (hidden,)
    if hidden != talker_hidden:
        yield prefix + "small_to_mtp_projection.weight", (hidden, talker_hidden)
        yield prefix + "small_to_mtp_projection.bias", (hidden,)


def codec_shapes(prefix: str, config: dict[str, Any]) -> Shapes:
    size, dim, latent = config["codebook_size"], config["codebook_dim"], config["latent_dim"]
    for part, count in (("rvq_first", 1), ("rvq_rest", config["num_quantizers"] - 1)):
        for i in range(count):
            book = f"{prefix}quantizer.{part}.vq.layers.{i}._codebook."
            yield book + "embedding_sum", (size, dim // 2)
            yield book + "cluster_usage", (size,)
        yield f"{prefix}quantizer.{part}.output_proj.weight", (dim, dim // 2, 1)
    yield from conv_shapes(prefix + "pre_conv.conv", (latent, dim, 3))
    hidden, root = config["hidden_size"], prefix + "pre_transformer."
    for name, shape in {"input_proj": (hidden, latent), "output_proj": (latent, hidden)}.items():
        yield from conv_shapes(root + name, shape)
    for i in range(config["num_hidden_layers"]):
        layer = f"{root}layers.{i}."
        yield from attention_shapes(layer, config)
        yield layer + "self_attn_layer_scale.scale", (hidden,)
        yield layer + "mlp_layer_scale.scale", (hidden,)
        yield from mlp_shapes(layer, hidden, config["intermediate_size"])
    yield root + "norm.weight", (hidden,)
    for i, ratio in enumerate(config["upsampling_ratios"]):
        yield from conv_shapes(f"{prefix}upsample.{i}.0.conv", (latent, latent, ratio), out_axis=1)
        block = f"{prefix}upsample.{i}.1."
        yield from conv_shapes(block + "dwconv.conv", (latent, 1, 7))
        yield block + "norm.weight", (latent,)
        yield block + "norm.bias", (latent,)
        yield from conv_shapes(block + "pwconv1", (4 * latent, latent))
        yield from conv_shapes(block + "pwconv2", (latent, 4 * latent))
        yield block + "gamma", (latent,)
    channels = config["decoder_dim"]
    yield from conv_shapes(prefix + "decoder.0.conv", (channels, latent, 7))
    rates = config["upsample_rates"]
    for i, rate in enumerate(rates):
        block = f"{prefix}decoder.{i + 1}.block."
        yield from snake_shapes(block + "0.", channels)
        yield from conv_shapes(block + "1.conv", (channels, channels // 2, 2 * rate), out_axis=1)
        channels //= 2
        for unit in range(2, 5):
            name = f"{block}{unit}."
            yield from snake_shapes(name + "act1.", channels)
            yield from conv_shapes(name + "conv1.conv", (channels, channels, 7))
            yield from snake_shapes(name + "act2.", channels)
            yield from conv_shapes(name + "conv2.conv", (channels, channels, 1))
    yield from snake_shapes(f"{prefix}decoder.{len(rates) + 1}.", channels)
    yield from conv_shapes(f"{prefix}decoder.{len(rates) + 2}.conv", (1, channels, 7))


def conv_shapes(name: str, shape: tuple[int, ...], out_axis: int = 0) -> Shapes:
    yield name + ".weight", shape
    yield name + ".bias", (shape[out_axis],)


def snake_shapes(name: str, channels: int) -> Shapes:
    yield name + "alpha", (channels,)
    yield name + "beta", (channels,)


def values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    """Return random values of a size that keeps activations near 1."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("cluster_usage"):
        return np.abs(noise) + 0.5
    if name.endswith(("_scale.scale", "gamma")):
        return 0.3 + 0.05 * noise
    is_plain_norm = "norm" in name.rsplit(".", 2)[-2] and name.endswith(".weight") and ".linear_attn." not in name
    if len(shape) == 1:
        zero_centred = ("thinker" in name or "talker.model" in name) and "code_predictor" not in name
        one = name.endswith("linear_attn.norm.weight") or (is_plain_norm and not zero_centred)
        return 0.05 * noise + (1.0 if one else 0.0)
    return noise * float(np.prod(shape[1:])) ** -0.5


def write_tensors(path: Path, shapes: Shapes, seed: int, strip: str = "") -> None:
    """Write a safetensors file of f32."""
    rng = np.random.default_rng(seed)
    header: dict[str, Any] = {}
    chunks, end = [], 0
    for name, shape in shapes:
        data = np.ascontiguousarray(values(rng, name, shape), np.float32).tobytes()
        stored = name.removeprefix(strip)
        header[stored] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(data)]}
        chunks.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def write_checkpoint(folder: Path, *, seed: int = 0, with_thinker: bool = True) -> Path:
    """Write the checkpoint; without a thinker it speaks the text that it is given."""
    thinker = hybrid_config(64, TEXT_VOCAB, tie_word_embeddings=False, eos_token_id=TEXT_VOCAB - 1)
    predictor = {
        "vocab_size": CODES, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 64, "num_code_groups": CODEBOOKS,
    }  # fmt: skip
    first = CODES
    talker = hybrid_config(
        48, CODES + CONTROLS, code_predictor_config=predictor, num_code_groups=CODEBOOKS, text_vocab_size=TEXT_VOCAB,
        text_hidden_size=64, accept_hidden_layer=2, codec_pad_id=first, codec_bos_id=first + 1,
        codec_eos_token_id=first + 2, codec_think_id=first + 3, codec_nothink_id=first + 4,
        codec_think_bos_id=first + 5, codec_think_eos_id=first + 6,
        codec_language_id={"english": first + 7, "chinese": first + 8},
        spk_id={"ann": first + 9, "bob": first + 10}, spk_is_dialect={"ann": False, "bob": False},
    )  # fmt: skip
    codec = {
        "codebook_size": CODES, "codebook_dim": 32, "hidden_size": 16, "latent_dim": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "intermediate_size": 32, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "num_hidden_layers": 2, "num_quantizers": CODEBOOKS, "upsample_rates": [2, 2],
        "upsampling_ratios": [2, 2], "decoder_dim": 16,
    }  # fmt: skip
    config = {
        "model_type": "deltaic_speech", "talker_config": talker, "tts_pad_token_id": 1, "tts_bos_token_id": 2,
        "tts_eos_token_id": 3, **({"thinker_path": "thinker"} if with_thinker else {}),
    }  # fmt: skip
    folders = [folder, folder / "speech_tokenizer", *([folder / "thinker"] if with_thinker else [])]
    for one in folders:
        one.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tensors(folder / "model.safetensors", talker_shapes(talker, predictor), seed)
    (folder / "speech_tokenizer" / "config.json").write_text(
        json.dumps({"model_type": "qwen3_tts_tokenizer_12hz", "decoder_config": codec, "output_sample_rate": 200})
    )
    write_tensors(folder / "speech_tokenizer" / "model.safetensors", codec_shapes("decoder.", codec), seed + 1)
    if with_thinker:
        (folder / "thinker" / "config.json").write_text(json.dumps(thinker))
        shapes = hybrid_shapes("thinker.", thinker, "model.embed_tokens.weight", "lm_head.weight")
        write_tensors(folder / "thinker" / "model.safetensors", shapes, seed + 2, strip="thinker.")
    bundled = Path(deltaic.__file__).parent / "default_model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for one in folders[::2]:
            shutil.copy(bundled / name, one)
    return folder


def talker_shapes(talker: dict[str, Any], predictor: dict[str, Any]) -> Shapes:
    hidden, text_hidden = talker["hidden_size"], talker["text_hidden_size"]
    yield from hybrid_shapes("talker.", talker, "model.codec_embedding.weight", "codec_head.weight")
    yield "talker.model.text_embedding.weight", (talker["text_vocab_size"], text_hidden)
    for name in ("text_projection", "hidden_projection"):
        yield from projection_shapes(f"talker.{name}", text_hidden, text_hidden, hidden)
    yield from predictor_shapes("talker.code_predictor.", predictor, hidden)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-thinker", action="store_true", help="speak the text itself, not an answer to it")
    args = parser.parse_args()
    print(write_checkpoint(args.folder, seed=args.seed, with_thinker=not args.no_thinker))
