from __future__ import annotations

from pathlib import Path

import deltaic
import pytest
from deltaic.tokenizer import Tokenizer
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("deltaic", deadline=None)
settings.load_profile("deltaic")


@pytest.fixture(scope="session")
def default_model() -> Path:
    return Path(deltaic.__file__).parent / "default_model"


@pytest.fixture(scope="session")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)
