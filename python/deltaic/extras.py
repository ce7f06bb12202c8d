"""Packages that only some commands need."""

from __future__ import annotations

import shlex
import sys


def how_to_install(extra: str) -> str:
    """Return the command that adds an extra's packages to the deltaic that runs, which is not built again."""
    return f"{shlex.quote(sys.executable)} -m pip install 'deltaic[{extra}]'"
