from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from deltaic import checkpoint
from deltaic.checkpoint import default_sampling_fields, eos_token_ids, read_json, resolve_model
from deltaic.sampling_params import SamplingParams


def test_end_of_sequence_ids_come_from_all_files(tmp_path: Path, default_model: Path) -> None:
    assert eos_token_ids(default_model, 4095, 4096) == [4093, 4095]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1, "text_config": {"eos_token_id": 2}}))
    assert eos_token_ids(tmp_path, None, 4096) == [2]
    assert eos_token_ids(tmp_path, 4095, 4096) == [2, 4095]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert eos_token_ids(tmp_path, None, 4096) == [7, 8]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "<end>"}))
    with pytest.raises(ValueError, match="eos_token_id"):
        eos_token_ids(tmp_path, None, 4096)


def test_end_of_sequence_ids_without_a_row_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 100, 10**30]}))
    assert eos_token_ids(tmp_path, 101, 100) == [5]


@pytest.mark.parametrize("value", ["<end>", [1, "2"], -1, True, {"id": 1}])
def test_end_of_sequence_id_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match="eos_token_id"):
        eos_token_ids(tmp_path, None, 4096)


def test_generation_config_sets_the_defaults(default_model: Path, tmp_path: Path) -> None:
    assert default_sampling_fields(default_model) == {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    assert default_sampling_fields(tmp_path) == {}
    config = {"do_sample": False, "temperature": 0.6, "max_new_tokens": 2048, "repetition_penalty": 1.05, "top_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    params = SamplingParams.from_optional(default_sampling_fields(tmp_path))
    assert params == SamplingParams(temperature=0, max_tokens=2048, repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "hot"), ("max_new_tokens", 2.5), ("top_p", 7), ("top_k", [1])]
)
def test_default_that_is_refused_is_an_error_of_the_file(tmp_path: Path, field: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ValueError, match=r"generation_config\.json: (temperature|max_tokens|top_p|top_k) must be"):
        default_sampling_fields(tmp_path)


def test_json_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ValueError, match=r"config\.json cannot be read: maximum recursion depth"):
        read_json(tmp_path / "config.json")


def test_model_is_a_folder_or_the_bundled_one(default_model: Path, tmp_path: Path) -> None:
    assert resolve_model(None) == default_model
    assert resolve_model(str(default_model)) == resolve_model(default_model) == default_model
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        resolve_model(default_model / "config.json")
    with pytest.raises(ValueError, match="model must be a folder or a hub id, got ''"):
        resolve_model("")
    for wrong in (5, b"folder", ["folder"], True):
        with pytest.raises(TypeError, match="model must be a folder or a hub id, got"):
            resolve_model(wrong)  # type: ignore[arg-type]
    for missing in ("/no/such/folder", "./nothing", "nothing", Path("owner/name"), "a/b/c", "../x/y"):
        with pytest.raises(ValueError, match="does not exist"):
            resolve_model(missing)


def test_hub_id_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(hub_id: str, allow_patterns: list[str]) -> str:
        if hub_id == "owner/missing":
            raise OSError("404:\nnot found")
        assert (hub_id, "*.safetensors" in allow_patterns) == ("owner/name", True)
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "import_module", lambda _: SimpleNamespace(snapshot_download=snapshot_download))
    assert resolve_model("owner/name") == tmp_path
    with pytest.raises(ValueError, match="cannot be downloaded: 404: not found"):
        resolve_model("owner/missing")


def test_hub_id_without_the_hub_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(checkpoint, "import_module", refuse)
    with pytest.raises(ValueError, match=r"python\S* -m pip install 'deltaic\[hub\]'"):
        resolve_model("owner/name")
