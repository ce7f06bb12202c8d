"""Write the random checkpoints and goldens of this folder. Not needed to run the tests.

    python gen.py omni   # needs transformers 5 with qwen3_omni_moe, and torch
    python gen.py tts    # needs the package qwen-tts and the transformers that it asks for

Each writes a checkpoint in the published layout, omni/ or tts/, and golden.npz in it: greedy codes and samples in f32.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
NUM_FRAMES = 24
NUM_LONG_FRAMES = 150


def randomize(module: torch.nn.Module, seed: int) -> None:
    """Give every parameter values that keep activations near 1 and choices clear."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("cluster_usage"):
                value.copy_(noise.abs() + 0.5)
            elif value.dim() == 1:
                is_scale = "norm" in name.rsplit(".", 2)[-2] and name.endswith("weight")
                small = name.endswith(("alpha", "beta", "bias"))
                value.copy_((1.0 if is_scale else 0.0 if small else 0.3) + 0.1 * noise)
            else:
                fan_in = value[0].numel()
                value.copy_(noise * fan_in**-0.5 * (2.0 if "head" in name or "embedding" in name else 1.0))


def quieten(codec: torch.nn.Module, codes: torch.Tensor) -> torch.Tensor:
    """Make the last convolution so small that no sample is clamped; return the samples."""
    while True:
        samples: torch.Tensor = codec(codes.T[None])[0, 0]
        if float(samples.abs().max()) < 0.9:
            return samples
        codec.decoder[-1].conv.weight.mul_(0.7)
        codec.decoder[-1].conv.bias.mul_(0.7)


def tensors(module: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value.detach().clone().contiguous() for name, value in module.named_parameters()}


def omni() -> None:
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configs
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as models

    common = {"attention_bias": False, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    predictor = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_code_groups": 4, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **common,
    }  # fmt: skip
    text = {
        "vocab_size": 64 + 1024, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}, **common,
    }  # fmt: skip
    control = {name: 70 + i for i, name in enumerate(
        ["codec_pad_id", "codec_bos_id", "codec_eos_token_id", "codec_nothink_id", "codec_think_bos_id",
         "codec_think_eos_id"])}  # fmt: skip
    talker_config = configs.Qwen3OmniMoeTalkerConfig(
        code_predictor_config=predictor, text_config=text, num_code_groups=4, thinker_hidden_size=20,
        accept_hidden_layer=2, speaker_id={"ann": 90}, spatial_merge_size=2, **control,
    )  # fmt: skip
    wav_config = configs.Qwen3OmniMoeCode2WavConfig(
        codebook_size=64, hidden_size=32, max_position_embeddings=256, rope_theta=10000, num_attention_heads=4,
        num_key_value_heads=4, attention_bias=False, sliding_window=8, intermediate_size=48, num_hidden_layers=2,
        num_quantizers=4, upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2), decoder_dim=32,
    )  # fmt: skip
    talker = models.Qwen3OmniMoeTalkerForConditionalGeneration(talker_config).eval().float()
    wav = models.Qwen3OmniMoeCode2Wav(wav_config).eval().float()
    randomize(talker, 1)
    randomize(wav, 2)

    generator = torch.Generator().manual_seed(3)
    prompt, trailing = torch.randn(1, 7, 32, generator=generator), torch.randn(1, 5, 32, generator=generator)
    pad, thinker = torch.randn(1, 1, 32, generator=generator), torch.randn(1, 6, 20, generator=generator)
    with torch.no_grad():
        result = talker.generate(
            inputs_embeds=prompt, attention_mask=torch.ones(1, 7, dtype=torch.long), trailing_text_hidden=trailing,
            tts_pad_embed=pad, talker_input_ids=torch.zeros(1, 7, dtype=torch.long), max_new_tokens=NUM_FRAMES + 1,
            min_new_tokens=NUM_FRAMES + 1, do_sample=False, eos_token_id=control["codec_eos_token_id"],
            repetition_penalty=1.0, suppress_tokens=[i for i in range(64, 64 + 1024)], output_hidden_states=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        codes = torch.stack([step[-1] for step in result.hidden_states if step[-1] is not None], dim=1)[0]
        samples = quieten(wav, codes)
        projected = talker.text_projection(thinker)[0], talker.hidden_projection(thinker)[0]
    folder = HERE / "omni"
    folder.mkdir(exist_ok=True)
    root = {
        "model_type": "qwen3_omni_moe",
        "talker_config": talker_config.to_dict(),
        "code2wav_config": wav_config.to_dict(),
        "tts_pad_token_id": 1, "tts_bos_token_id": 2, "tts_eos_token_id": 3,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(root, indent=1, sort_keys=True) + "\n")
    save_file(tensors(talker, "talker.") | tensors(wav, "code2wav."), folder / "model.safetensors")
    np.savez_compressed(
        folder / "golden.npz", prompt=prompt[0], trailing=trailing[0], pad=pad[0, 0], codes=codes, samples=samples,
        thinker=thinker[0], text_rows=projected[0], hidden_rows=projected[1],
    )  # fmt: skip
    print("omni", codes.shape, samples.shape, float(samples.std()))


def tts() -> None:
    import transformers  # noqa: F401  # before the stand-ins below, which it would look into

    for name in ("sox", "torchaudio", "onnxruntime", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        sys.modules.setdefault(name, types.ModuleType(name))  # for its 25 Hz codec alone
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    from qwen_tts.core.models import configuration_qwen3_tts as configs
    from qwen_tts.core.models import modeling_qwen3_tts as models
    from qwen_tts.core.tokenizer_12hz import configuration_qwen3_tts_tokenizer_v2 as codec_configs
    from qwen_tts.core.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as codec_models

    predictor = {
        "vocab_size": 64, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_code_groups": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    talker_config: dict[str, Any] = {
        "code_predictor_config": predictor, "vocab_size": 64 + 1024, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 256, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "num_code_groups": 4,
        "rope_scaling": {"interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"},
        "text_hidden_size": 40, "text_vocab_size": 128, "spk_id": {"ann": 90, "bob": 91},
        "spk_is_dialect": {"ann": False, "bob": "sichuan"}, "codec_language_id": {"english": 92, "chinese": 93, "sichuan": 94},
        "codec_eos_token_id": 70, "codec_think_id": 71, "codec_nothink_id": 72, "codec_think_bos_id": 73,
        "codec_think_eos_id": 74, "codec_pad_id": 75, "codec_bos_id": 76,
    }  # fmt: skip
    config = configs.Qwen3TTSConfig(
        talker_config=talker_config, tts_pad_token_id=101, tts_bos_token_id=102, tts_eos_token_id=103,
        tts_model_type="custom_voice", tokenizer_type="qwen3_tts_tokenizer_12hz", tts_model_size="0b6",
    )  # fmt: skip
    codec_config = codec_configs.Qwen3TTSTokenizerV2DecoderConfig(
        codebook_size=64, codebook_dim=32, hidden_size=24, latent_dim=32, max_position_embeddings=256, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, sliding_window=8, intermediate_size=48, num_hidden_layers=2,
        num_quantizers=4, upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2), decoder_dim=32,
    )  # fmt: skip
    for one in (config, config.talker_config, config.talker_config.code_predictor_config, codec_config):
        one._attn_implementation = "eager"
    model = models.Qwen3TTSForConditionalGeneration(config).eval().float()
    codec = codec_models.Qwen3TTSTokenizerV2Decoder(codec_config).eval().float()
    randomize(model, 1)
    randomize(codec, 2)

    ids = torch.tensor([[11, 12, 13, 21, 22, 23, 24, 25, 26, 31, 32, 33, 34, 35]])
    instruct = torch.tensor([[41, 42, 43]])
    generator = torch.Generator().manual_seed(4)
    reference = torch.randint(0, 64, (5, 4), generator=generator)
    x_vector = torch.randn(32, generator=generator)
    clone = {
        "ref_code": [reference], "ref_spk_embedding": [x_vector], "x_vector_only_mode": [False], "icl_mode": [True],
    }  # fmt: skip
    cases: dict[str, dict[str, Any]] = {
        "speaker": {"speakers": ["ann"], "languages": ["english"]},
        "auto": {"speakers": [None], "languages": ["auto"], "instruct_ids": [instruct]},
        "dialect": {"speakers": ["bob"], "languages": ["auto"], "non_streaming_mode": True},
        "x_vector": {
            "speakers": [None], "languages": ["chinese"],
            "voice_clone_prompt": {**clone, "ref_code": [None], "x_vector_only_mode": [True], "icl_mode": [False]},
        },
        "clone": {
            "speakers": [None], "languages": ["english"], "voice_clone_prompt": clone,
            "ref_ids": [torch.tensor([[11, 12, 13, 51, 52, 53, 34, 35]])],
        },
    }  # fmt: skip
    golden: dict[str, Any] = {"ids": ids[0], "instruct": instruct[0], "reference": reference, "speaker_vector": x_vector,
                              "reference_text": np.array([51, 52, 53])}  # fmt: skip
    cases["long"] = cases["speaker"]
    with torch.no_grad():
        for name, case in cases.items():
            num_frames = NUM_LONG_FRAMES if name == "long" else NUM_FRAMES
            codes, _ = model.generate(
                input_ids=[ids], max_new_tokens=num_frames + 1, do_sample=False, subtalker_dosample=False,
                repetition_penalty=1.0, **case,
            )  # fmt: skip
            golden[name] = codes[0]
            print("tts", name, codes[0].shape)
        golden["samples"] = quieten(codec, golden["speaker"])
    folder = HERE / "tts"
    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1, sort_keys=True) + "\n")
    skipped = ("speaker_encoder.",)
    stored = {name: value for name, value in tensors(model, "").items() if not name.startswith(skipped)}
    save_file(stored, folder / "model.safetensors")
    outer = {"model_type": "qwen3_tts_tokenizer_12hz", "decoder_config": codec_config.to_dict(),
             "output_sample_rate": 24000, "decode_upsample_rate": 1920}  # fmt: skip
    (folder / "speech_tokenizer" / "config.json").write_text(json.dumps(outer, indent=1, sort_keys=True) + "\n")
    save_file(tensors(codec, "decoder."), folder / "speech_tokenizer" / "model.safetensors")
    np.savez_compressed(folder / "golden.npz", **golden)
    print("tts samples", golden["samples"].shape, float(golden["samples"].std()))


if __name__ == "__main__":
    {"omni": omni, "tts": tts}[sys.argv[1]]()
