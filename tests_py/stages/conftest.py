from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _script() -> Any:
    """Return the script of the examples that makes the tiny checkpoint."""
    spec = importlib.util.spec_from_file_location("make_tiny_speech", ROOT / "examples" / "make_tiny_speech.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thinker, talker, predictor and decoder."""
    folder: Path = _script().write_checkpoint(tmp_path_factory.mktemp("speech"))
    return folder


@pytest.fixture(scope="session")
def tiny_tts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a thinker: it speaks the text that it is given."""
    folder: Path = _script().write_checkpoint(tmp_path_factory.mktemp("tts"), with_thinker=False)
    return folder
