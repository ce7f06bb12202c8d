"""MkDocs hooks: the command line's own help and the public headers become pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADERS = ROOT / "cpp" / "include" / "deltaic"


def on_page_markdown(markdown: str, **_: object) -> str:
    if "[[cli]]" in markdown:
        markdown = markdown.replace("[[cli]]", command_line())
    if "[[headers]]" in markdown:
        markdown = markdown.replace("[[headers]]", public_headers())
    return markdown


def command_line() -> str:
    command = [sys.executable, "-m", "typer", "deltaic.cli", "utils", "docs", "--name", "deltaic"]
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "120"}
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return text.split("# `deltaic`", 1)[1]  # the page has a heading of its own


def public_headers() -> str:
    names = sorted(path.name for path in HEADERS.glob("*.h"))
    return "\n".join(f"## {name}\n\n```cpp\n{(HEADERS / name).read_text()}```\n" for name in names)
