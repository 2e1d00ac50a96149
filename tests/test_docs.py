"""The documents cite tests and files that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)+)")
FILE = re.compile(r"`((?:cuda|cupyfa|tests|benchmarks|docs|notebooks)/[\w./]+\.\w+)")
LINK = re.compile(r"\]\(([\w./-]+\.md)\)")


@functools.cache
def names(path: str) -> set[str]:
    """Functions, classes and methods of a test file, as in a test id."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(f"::{node.name}")
        if isinstance(node, ast.ClassDef):
            found |= {f"::{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def missing(text: str) -> list[str]:
    """What a document cites and the repository does not have."""
    files = {path for path in FILE.findall(text) if not (ROOT / path).exists()}
    tests = {path + name for path, name in TEST.findall(text) if path not in files and name not in names(path)}
    return sorted(files | tests)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_cites_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert missing(text) == []
    assert [link for link in LINK.findall(text) if not (document.parent / link).exists()] == []


def test_a_wrong_citation_is_found() -> None:
    here = "tests/test_docs.py"
    cited = f"`{here}::test_a_wrong_citation_is_found` `{here}::test_gone` `cupyfa/gone.py` `tests/gone.py::test_x`"
    assert missing(cited) == ["cupyfa/gone.py", "tests/gone.py", f"{here}::test_gone"]


def test_every_row_of_the_failure_lab_says_what_shows_it() -> None:
    rows = [
        line for line in (ROOT / "docs/failure_lab.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "
    ]
    rows = [row for row in rows if not row.startswith("| #")]
    assert len(rows) >= 139  # the specification's tables and measurement failures
    assert [row for row in rows if not re.search(r"`tests/|emulator|kernel|later|`docs/", row.rsplit("|", 2)[1])] == []
