"""Where a model's files are, and what they say beside the weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from deltaic.extras import how_to_install
from deltaic.sampling_params import SamplingParams

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
# generation_config.json -> SamplingParams
_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_model_folder() -> Path:
    """Return the folder of the model that ships with deltaic."""
    return Path(__file__).parent / "default_model"


def resolve_model(model: str | Path | None, load_format: str = "auto") -> Path:
    """Return the folder of a model: None is the bundled one, a hub id is downloaded.

    With load_format dummy a config.json under any name is a model too, and weights are not downloaded. ValueError when
    there is no such folder, it has no config.json, or the hub does not have it; TypeError for what is no path.
    """
    if model is None:
        return default_model_folder()
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model must be a folder or a hub id, got {model!r:.60}")
    if not str(model):
        raise ValueError("model must be a folder or a hub id, got ''")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model folder {str(path)!r} has no config.json")
        return path
    if path.exists():
        if load_format == "dummy":
            return path
        raise ValueError(
            f"model {str(path)!r} is a file: give the folder that holds it, with its config.json (a config.json alone "
            "is enough for load_format dummy)"
        )
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return _download(model, [name for name in _HUB_FILES if load_format != "dummy" or name != "*.safetensors"])
    raise ValueError(f"model folder {str(path)!r} does not exist (and is no hub id of the form owner/name)")


def _download(hub_id: str, patterns: list[str]) -> Path:
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise ValueError(
            f"model folder {hub_id!r} does not exist; to download it from the hub: {how_to_install('hub')}"
        ) from None
    try:
        folder = hub.snapshot_download(hub_id, allow_patterns=patterns)
    except Exception as error:  # the network, the hub and the file system each raise their own
        raise ValueError(f"model {hub_id!r} is no folder here and cannot be downloaded: {one_line(error)}") from error
    return Path(folder)


def config_file(model: Path) -> Path:
    """Return the config.json of what resolve_model returned."""
    return model / "config.json" if model.is_dir() else model


def weight_file_bytes(model: Path) -> int:
    """Return the bytes of the safetensors files; 0 where there are none."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) if model.is_dir() else 0


def default_sampling_fields(folder: Path) -> dict[str, Any]:
    """Return what generation_config.json sets of SamplingParams; do_sample = false means temperature 0.

    ValueError names the file for a value that SamplingParams refuses.
    """
    path = folder / "generation_config.json"
    config = read_json(path)
    found = {ours: config[theirs] for theirs, ours in _SAMPLING_FIELDS.items() if config.get(theirs) is not None}
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        SamplingParams.from_optional(found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def eos_token_ids(folder: Path, tokenizer_eos: int | None, vocab_size: int) -> list[int]:
    """Return the end-of-sequence ids of a checkpoint, sorted.

    generation_config.json decides, else config.json; the tokenizer's own always belongs to them. Those that a model
    cut down to `vocab_size` rows can never choose are left out. ValueError for what is no token id.
    """
    config = read_json(config_file(folder))
    text_config = config.get("text_config")
    sources = [
        read_json(folder / "generation_config.json"),
        text_config if isinstance(text_config, Mapping) else {},
        config,
    ]
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    for source in sources:
        if (value := source.get("eos_token_id")) is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError(f"eos_token_id of {folder} must be a token id or a list of them, got {value!r}")
            found.update(ids)
            break
    return sorted(i for i in found if i < vocab_size)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} when the file does not exist; ValueError when it holds anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def one_line(error: BaseException) -> str:
    """Return an error's message without its line breaks; the type's name when it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
