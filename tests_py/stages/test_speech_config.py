"""Checkpoints whose configs say what cannot be: refused at load, by the file and the field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from deltaic.stages.speech import SpeechPipeline
from speech_driver import make_pipeline


def changed(checkpoint: Path, folder: Path, file: str, path: str, value: Any) -> SpeechPipeline:
    """Load a copy of a checkpoint, one field of which is another value."""
    shutil.copytree(checkpoint, folder)
    config = folder / file
    content = json.loads(config.read_text())
    *parts, name = path.split(".")
    target = content
    for part in parts:
        target = target[part]
    target[name] = value
    config.write_text(json.dumps(content))
    return make_pipeline(folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("talker_config", 3, "talker_config must be an object, got 3"),
        ("talker_config.codec_eos_token_id", "x", r"talker_config.codec_eos_token_id must be an integer in \[0, 80\)"),
        ("talker_config.codec_eos_token_id", 80, r"talker_config.codec_eos_token_id must be an integer in \[0, 80\)"),
        ("talker_config.codec_pad_id", -1, r"talker_config.codec_pad_id must be an integer in \[0, 80\), got -1"),
        ("talker_config.codec_bos_id", True, r"talker_config.codec_bos_id must be an integer in \[0, 80\), got True"),
        ("talker_config.spk_id", [], "talker_config.spk_id must be an object"),
        ("talker_config.spk_id", {"ann": 80}, r"talker_config.spk_id.ann must be an integer in \[0, 80\), got 80"),
        ("talker_config.codec_language_id", {"english": "x"}, "talker_config.codec_language_id.english must be an int"),
        ("tts_pad_token_id", "x", "tts_pad_token_id must be an integer"),
        ("thinker_path", 3, "thinker_path must be a string, got 3"),
    ],
)
def test_a_field_of_the_talker_is_named(tiny_tts: Path, tmp_path: Path, path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"bad/config\.json: {message}"):
        changed(tiny_tts, tmp_path / "bad", "config.json", path, value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("output_sample_rate", 0, r"config.json: output_sample_rate must be an integer in \[1, "),
        ("output_sample_rate", "x", r"config.json: output_sample_rate must be an integer in \[1, "),
        ("decoder_config.num_quantizers", 1, "the codec decodes frames of 1 codes, the talker makes 4"),
        ("decoder_config.num_quantizers", 8, "the codec decodes frames of 8 codes, the talker makes 4"),
        ("decoder_config.upsample_rates", [2, 0], r"decoder_config.upsample_rates\[1\] must be an integer in \[1, "),
        ("decoder_config.upsampling_ratios", [-2, 2], r"decoder_config.upsampling_ratios\[0\] must be an integer in "),
        ("decoder_config.upsample_rates", "x", "decoder_config.upsample_rates must be a list, got 'x'"),
        ("decoder_config.codebook_size", 32, "a codebook of the codec has 32 codes, the code predictor chooses of 64"),
    ],
)
def test_a_field_of_the_codec_is_named(tiny_tts: Path, tmp_path: Path, path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(tiny_tts, tmp_path / "bad", "speech_tokenizer/config.json", path, value)
