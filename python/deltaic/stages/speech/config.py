"""Reading checkpoints that speak: Qwen3-TTS, Qwen3-Omni's talker, and pipelines with a decoder of any family."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltaic import _core

MODEL_TYPES = ("qwen3_tts", "qwen3_omni_moe", "deltaic_speech")
_CODE_DECODER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings",
    "attention_bias", "hidden_act",
)  # fmt: skip
_EXPERT_FIELDS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ControlIds:
    """Token ids that a prompt is made of. The codec's are of the talker's vocabulary, the others of the text's."""

    codec_pad: int
    codec_bos: int
    codec_eos: int
    codec_think: int
    codec_nothink: int
    codec_think_bos: int
    codec_think_eos: int
    tts_pad: int
    tts_bos: int
    tts_eos: int


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """What a checkpoint of several models says of itself."""

    folder: Path
    model_type: str
    talker_model: _core.ModelConfig  # of the talker's decoder
    talker: _core.TalkerConfig
    codec: _core.CodecConfig
    codec_path: Path  # of the codec's tensors, which start with codec_prefix
    codec_prefix: str
    ids: ControlIds
    speakers: Mapping[str, int]
    languages: Mapping[str, int]
    dialects: Mapping[str, str] = field(default_factory=dict)  # speaker -> language that "auto" means
    sample_rate: int = 24000  # samples per second
    thinker_folder: Path | None = None  # a text model that writes what is spoken
    hidden_layer: int = -1  # of the thinker, for the talker

    @property
    def num_codebooks(self) -> int:
        count: int = self.talker.predictor.num_codebooks
        return count

    @property
    def frames_per_second(self) -> float:
        """Return how many frames of codes make a second of sound."""
        rates = (*self.codec.upsampling_ratios, *self.codec.upsample_rates)
        return self.sample_rate / math.prod(rates)

    @property
    def codebook_size(self) -> int:
        size: int = self.codec.codebook_size
        return size


def is_speech_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a model that load_speech_config reads."""
    path = folder / "config.json"
    return path.is_file() and json.loads(path.read_text()).get("model_type") in MODEL_TYPES


def load_speech_config(folder: str | Path) -> SpeechConfig:
    """Read the configs of a checkpoint folder. ValueError naming the file and the field that is wrong."""
    folder = Path(folder)
    root = _read(folder / "config.json")
    model_type = root.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}, which does not speak; deltaic speaks with "
            f"{', '.join(MODEL_TYPES)}"
        )
    is_omni = model_type == "qwen3_omni_moe"
    fields = _Fields(folder / "config.json", root)
    talker = fields.part("talker_config")
    text = talker.part("text_config") if is_omni else talker
    predictor = _predictor(talker, text)
    if is_omni:
        codec_fields = fields.part("code2wav_config")
        codec_path, codec_prefix, sample_rate = folder, "code2wav.", 24000
        text_hidden, projection = talker["thinker_hidden_size"], text["intermediate_size"]
    else:
        codec_path, codec_prefix = folder / "speech_tokenizer", "decoder."
        codec_root = _Fields(codec_path / "config.json", _read(codec_path / "config.json"))
        codec_fields = codec_root.part("decoder_config")
        sample_rate = codec_root.integer("output_sample_rate", default=24000, least=1)
        text_hidden = projection = talker["text_hidden_size"]
    dialects = {name: value for name, value in (talker.get("spk_is_dialect") or {}).items() if value}
    thinker = root.get("thinker_path")
    if thinker is not None and not isinstance(thinker, str):
        raise ValueError(f"{folder / 'config.json'}: thinker_path must be a string, got {thinker!r:.60}")
    vocab_size = text.integer("vocab_size", least=1)
    codec = _codec(codec_fields, has_quantizer=not is_omni)
    if codec.num_codebooks != predictor.num_codebooks:
        raise ValueError(
            f"{codec_path}: the codec decodes frames of {codec.num_codebooks} codes, the talker makes "
            f"{predictor.num_codebooks}"
        )
    if predictor.decoder.vocab_size > codec.codebook_size:
        raise ValueError(
            f"{codec_path}: a codebook of the codec has {codec.codebook_size} codes, the code predictor chooses of "
            f"{predictor.decoder.vocab_size}"
        )

    def codec_id(name: str, default: int | None = None) -> int:
        return talker.integer(name, default=default, limit=vocab_size)

    return SpeechConfig(
        folder=folder,
        model_type=model_type,
        talker_model=_talker_model(text),
        talker=_core.TalkerConfig(
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            text_vocab_size=0 if is_omni else int(talker.get("text_vocab_size", 0)),
            text_hidden_size=text_hidden,
            projection_size=projection,
            predictor=predictor,
        ),
        codec=codec,
        codec_path=codec_path,
        codec_prefix=codec_prefix,
        ids=ControlIds(
            codec_pad=codec_id("codec_pad_id"),
            codec_bos=codec_id("codec_bos_id"),
            codec_eos=codec_id("codec_eos_token_id"),
            codec_think=codec_id("codec_think_id", codec_id("codec_nothink_id")),
            codec_nothink=codec_id("codec_nothink_id"),
            codec_think_bos=codec_id("codec_think_bos_id"),
            codec_think_eos=codec_id("codec_think_eos_id"),
            tts_pad=fields.integer("tts_pad_token_id"),
            tts_bos=fields.integer("tts_bos_token_id"),
            tts_eos=fields.integer("tts_eos_token_id"),
        ),
        speakers=talker.ids("speaker_id" if is_omni else "spk_id", limit=vocab_size),
        languages=talker.ids("codec_language_id", limit=vocab_size),
        dialects={name.lower(): str(value).lower() for name, value in dialects.items()},
        sample_rate=sample_rate,
        thinker_folder=folder / thinker if thinker else None,
        hidden_layer=int(talker.get("accept_hidden_layer", -1)),
    )


class _Fields:
    """One object of a JSON file; what is missing is an error that names it."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path, self._prefix = path, prefix
        self.values = values

    def __getitem__(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise ValueError(f"{self._path}: {self._prefix}{name} is missing")
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def part(self, name: str) -> _Fields:
        return _Fields(self._path, self._object(name, self[name]), f"{self._prefix}{name}.")

    def integer(self, name: str, *, default: int | None = None, least: int = 0, limit: int = 1 << 31) -> int:
        """Return an integer in [least, limit)."""
        return self._integer(name, self[name] if default is None else self.get(name, default), least, limit)

    def counts(self, name: str) -> list[int]:
        """Return a list of integers above 0."""
        values = self[name]
        if not isinstance(values, list):
            raise ValueError(f"{self._path}: {self._prefix}{name} must be a list, got {values!r:.60}")
        return [self._integer(f"{name}[{i}]", value, 1, 1 << 16) for i, value in enumerate(values)]

    def ids(self, name: str, *, limit: int) -> dict[str, int]:
        """Return the ids below `limit` of names, those in lower case; none where the field is missing."""
        ids = self._object(name, self.get(name, {}))
        return {key.lower(): self._integer(f"{name}.{key}", one, 0, limit) for key, one in ids.items()}

    def _integer(self, name: str, value: Any, least: int, limit: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < limit:
            raise ValueError(
                f"{self._path}: {self._prefix}{name} must be an integer in [{least}, {limit}), got {value!r:.60}"
            )
        return value

    def _object(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._path}: {self._prefix}{name} must be an object, got {value!r:.60}")
        return value


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object")
    return values


def _talker_model(text: _Fields) -> _core.ModelConfig:
    """Return the config of the talker's decoder: of the family that it names, else Qwen3's."""
    model_type = str(text.get("model_type", ""))
    if model_type.startswith(("qwen3_5", "qwen3_next")):
        return _core.parse_model_config(json.dumps({**text.values, "tie_word_embeddings": False}))
    has_experts = bool(text.get("num_experts") or text.get("num_local_experts"))
    names = _CODE_DECODER_FIELDS + (_EXPERT_FIELDS if has_experts else ())
    fields = {name: text.values[name] for name in names if text.values.get(name) is not None}
    model = _core.parse_model_config(
        json.dumps({**_plain_rope(fields), "model_type": "qwen3_moe" if has_experts else "qwen3"})
    )
    if has_experts:
        model.shared_expert_intermediate_size = int(text.get("shared_expert_intermediate_size", 0))
    return model


def _predictor(talker: _Fields, text: _Fields) -> _core.CodePredictorConfig:
    fields = talker.part("code_predictor_config")
    decoder = {name: fields.values[name] for name in _CODE_DECODER_FIELDS if fields.values.get(name) is not None}
    return _core.CodePredictorConfig(
        decoder=_core.parse_model_config(json.dumps({**_plain_rope(decoder), "model_type": "qwen3"})),
        num_codebooks=fields.get("num_code_groups", talker.get("num_code_groups", 16)),
        talker_hidden_size=text["hidden_size"],
    )


def _plain_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields without M-RoPE: the three positions of a talker's tokens are always equal."""
    rope = fields.get("rope_parameters")
    if isinstance(rope, Mapping):
        fields = {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    return fields


def _codec(fields: _Fields, *, has_quantizer: bool) -> _core.CodecConfig:
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    rope = fields.get("rope_parameters") or {}
    return _core.CodecConfig(
        transformer=_core.CodecTransformerConfig(
            hidden_size=hidden,
            num_layers=fields["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads", heads),
            head_dim=fields.get("head_dim", hidden // heads),
            intermediate_size=fields["intermediate_size"],
            sliding_window=fields["sliding_window"],
            rope_theta=float(fields.get("rope_theta", rope.get("rope_theta", 10000.0))),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-5)),
        ),
        num_codebooks=fields["num_quantizers"],
        codebook_size=fields["codebook_size"],
        codebook_dim=fields["codebook_dim"] if has_quantizer else 0,
        latent_dim=fields["latent_dim"] if has_quantizer else hidden,
        decoder_dim=fields["decoder_dim"],
        upsampling_ratios=fields.counts("upsampling_ratios"),
        upsample_rates=fields.counts("upsample_rates"),
    )
