"""The device of the tests that run a model: DELTAIC_TEST_DEVICE is cpu (the default) or cuda, the first GPU."""

from __future__ import annotations

import os

from deltaic import _core

DEVICE = os.environ.get("DELTAIC_TEST_DEVICE", "cpu")
CORE_DEVICE = _core.Device(_core.DeviceType.cuda if DEVICE == "cuda" else _core.DeviceType.cpu)
