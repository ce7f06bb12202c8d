from __future__ import annotations

import os
from pathlib import Path

import deltaic
import pytest
from deltaic.tokenizer import Tokenizer
from device import DEVICE
from hypothesis import settings

# Of engines that no test puts elsewhere, in this process and in those that tests start.
os.environ["DELTAIC_DEVICE"] = DEVICE

# How long an example takes depends on what else the machine does.
settings.register_profile("deltaic", deadline=None)
settings.load_profile("deltaic")


@pytest.fixture(scope="session")
def default_model() -> Path:
    return Path(deltaic.__file__).parent / "default_model"


@pytest.fixture(scope="session")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)
