"""The public API is what tests_py/data/public_api.txt says: nothing leaks, nothing is lost by accident.

Regenerate the file with `python tests_py/test_public_api.py`, and read the difference.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import deltaic

ROOT = Path(__file__).parents[1]
LISTING = Path(__file__).parent / "data" / "public_api.txt"
MODULES = ["deltaic", "deltaic.mamba", "deltaic.server", "deltaic.stages"]
HEADERS = ROOT / "cpp" / "include" / "deltaic"


def python_api() -> Iterator[str]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            yield from members(f"{module_name}.{name}", getattr(module, name))


def members(path: str, value: object) -> Iterator[str]:
    if isinstance(value, type):
        yield f"class {path}{signature(value) if not issubclass(value, enum.Enum) else ''}"
        for name, member in sorted(vars(value).items()):
            if name.startswith("_"):
                continue
            if callable(member) or isinstance(member, (classmethod, staticmethod)):
                yield f"    {path}.{name}{signature(getattr(value, name))}"
            else:
                yield f"    {path}.{name}"
    elif callable(value):
        yield f"{path}{signature(value)}"
    else:
        yield path


def signature(value: object) -> str:
    """Return the parameters with their defaults: types are mypy's business."""
    assert callable(value)
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return "(...)"
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))


def cpp_api() -> Iterator[str]:
    """Yield the types and functions that the public headers declare, by header."""
    type_name = re.compile(r"^(?:struct|class|enum class) (\w+)[^;]*\{", re.MULTILINE)
    function_name = re.compile(r"^[\w:<>,*& ]+[ *&](\w+)\([^;{]*\)(?: const)?(?: noexcept)?(?: \{|;)", re.MULTILINE)
    for header in sorted(HEADERS.glob("*.h")):
        text = re.sub(r"//[^\n]*", "", header.read_text())
        yield from sorted({f"<deltaic/{header.name}> {name}" for name in type_name.findall(text)})
        yield from sorted({f"<deltaic/{header.name}> {name}()" for name in function_name.findall(text)})


def listing() -> str:
    return "\n".join([*python_api(), "", *cpp_api(), ""])


def test_public_api_is_the_listed_one() -> None:
    assert listing() == LISTING.read_text()


def test_page_of_the_python_api_shows_every_public_name() -> None:
    page = (ROOT / "docs" / "python_api.md").read_text()
    shown = set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))
    public = {f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__}
    missing = {name for name in public if name not in shown and name.rpartition(".")[0] not in shown}
    assert missing == {"deltaic.__version__"}
    assert "`deltaic.__version__`" in page


def test_extension_module_exports_its_init_function_alone() -> None:
    module = Path(deltaic._core.__file__)
    symbols = subprocess.run(["nm", "-D", "--defined-only", module], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in symbols.splitlines() if " T " in line}
    assert "PyInit__core" in exported
    assert not [name for name in exported if "deltaic" in name or "cuda" in name.lower()]


if __name__ == "__main__":
    LISTING.write_text(listing())
