from __future__ import annotations

from pathlib import Path

import deltaic
import pytest
from deltaic.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def default_model() -> Path:
    return Path(deltaic.__file__).parent / "default_model"


@pytest.fixture(scope="session")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)
