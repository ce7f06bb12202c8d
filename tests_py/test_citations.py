"""What sources and pages cite is in the repository: pages with their headings, files, variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ["bench", "cmake", "cpp", "cuda", "docs", "examples", "python", "scripts", "tests_cpp", "tests_py"]
SUFFIXES = {".c", ".cmake", ".cpp", ".cu", ".cuh", ".h", ".in", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yml"}
PAGE = re.compile(r'(docs/[\w/-]+\.md)((?:,? (?:and )?"[^"\n]+")*)')
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINE_BREAK = re.compile(r"\n *(?://|#|\*)? ?")  # in a comment or a paragraph


class Citation(NamedTuple):
    page: str
    heading: str


def sources() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted({*files, *ROOT.glob("*.md"), *ROOT.glob("*.toml")} - {Path(__file__)})


def citations(text: str) -> list[Citation]:
    """Return what a text cites as `docs/x.md, "Heading"`, once a heading."""
    joined = LINE_BREAK.sub(" ", text)
    found = [(match[1], re.findall(r'"([^"]+)"', match[2])) for match in PAGE.finditer(joined)]
    return [Citation(page, heading) for page, headings in found for heading in headings]


def headings(page: Path) -> set[str]:
    return {heading.replace("`", "").strip() for heading in HEADING.findall(FENCED.sub("", page.read_text()))}


def mentioned_files(text: str) -> set[str]:
    """Return the pages that a text names, and what it names below a folder of the repository; OP stands for any op."""
    pages = set(re.findall(r"(?<![\w/.*<{-])[\w][\w./-]*\.md\b", text))
    below = rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:cpp|cuh?|h|md|py|sh|txt|json|svg|png)\b"
    return pages | {name for name in re.findall(below, text) if not re.search(r"OP[._]", name)}


def test_headings_that_are_cited_exist() -> None:
    cited = [(source, citation) for source in sources() for citation in citations(source.read_text())]
    assert len(cited) >= 30
    wrong = [
        f"{source.relative_to(ROOT)}: {page} has no heading {heading!r}"
        for source, (page, heading) in cited
        if not (ROOT / page).is_file() or heading not in headings(ROOT / page)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_that_are_named_exist() -> None:
    wrong = [
        f"{source.relative_to(ROOT)}: {name}"
        for source in sources()
        for name in sorted(mentioned_files(source.read_text()))
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "docs", source.parent))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        'see docs/models.md, "Norms".',
        '// As there (docs/models.md,\n// "Norms").',
        '    # (docs/models.md, "Norms" and\n    # "Tensor names")',
    ],
)
def test_citations_are_found_across_lines(text: str) -> None:
    assert Citation("docs/models.md", "Norms") in citations(text)


def test_every_variable_that_is_read_has_its_line_in_the_environment_page() -> None:
    reads = re.compile(r'(?:environ\.get\(|environ\[|getenv\(|envvar=)"(\w+)"')
    folders = [ROOT / "python" / "deltaic", ROOT / "cpp", ROOT / "cuda", ROOT / "tests_cpp"]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES]
    names = {name for text in texts for name in reads.findall(text)}
    assert len(names) >= 6
    page = (ROOT / "docs" / "environment.md").read_text()
    assert not [name for name in sorted(names) if f"| `{name}` |" not in page]


def test_numbers_of_bugs_in_tests_are_on_their_page() -> None:
    number = re.compile(r"\bD\d{2,3}\b")
    tests = [path for path in sources() if path.relative_to(ROOT).parts[0] in ("tests_cpp", "tests_py")]
    used = {name for path in tests if path.suffix in (".cpp", ".h", ".py") for name in number.findall(path.read_text())}
    listed = set(re.findall(r"^\| (D\d+) \|", (ROOT / "docs" / "known_bugs.md").read_text(), re.MULTILINE))
    assert used == listed
