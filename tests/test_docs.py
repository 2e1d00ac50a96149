"""The documents cite tests and files that exist."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
from pathlib import Path

import pytest
from nvrtc_tools import import_nvrtc

from cupyfa import select, support
from cupyfa.select import CANDIDATES
from cupyfa.support import support_table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)+)")
FILE = re.compile(r"`((?:cuda|cupyfa|tests|docs|notebooks)/[\w./]+\.\w+)")
ABBREVIATED = re.compile(r"`(?!tests/)[\w./]*::(?:\w+::)*[tT]est\w*`")
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


def sections(text: str) -> dict[str, list[str]]:
    """Rows of a document's tables by heading; a table's head and rule are no rows."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        elif line.startswith("| ") and not line.startswith(("| # |", "| figure |")):
            found.setdefault(title, []).append(line)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_ids_are_written_out(document: Path) -> None:
    assert ABBREVIATED.findall(document.read_text(encoding="utf-8")) == []


def test_an_abbreviated_id_is_found() -> None:
    assert ABBREVIATED.findall("`tests/test_a.py::test_b`, `::test_c`, `test_a.py::test_d`") == [
        "`::test_c`",
        "`test_a.py::test_d`",
    ]


# The rows of the specification's failure tables: one that is deleted, or added, is noticed.
FAILURES = {
    "0x02 Hopper: copies, matrix units, registers": 11,
    "0x03 Producer, consumers and the shared-memory ring": 11,
    "0x04 Pingpong between consumer warpgroups": 17,
    "0x05 Two stages inside one warpgroup": 13,
    "0x06 FP8 on Hopper: layout is part of the arithmetic": 4 + 12,  # four contracts, then the table
    "0x07 Blackwell: tensor memory and CTA pairs": 11 + 12,  # the mutations, then the table
    "0x08 FlashAttention-4 forward": 9,
    "0x09 Softmax numerics": 9,
    "0x0A FlashAttention-4 backward": 12,
    "0x0B Scheduling": 11,
    "0x0D Reading benchmarks": 3 + 8,  # the table, then what the text says
    "Architecture and dispatch": 6,
    "Pipelines and synchronisation": 15,
    "Memory and layout": 4,
    "Numbers": 5,
    "Measurement": 11,
}


def test_the_failure_lab_has_every_row() -> None:
    rows = sections((ROOT / "docs/failure_lab.md").read_text(encoding="utf-8"))
    assert {title: len(lines) for title, lines in rows.items()} == FAILURES
    numbers = {title: [line.split("|")[1].strip() for line in lines] for title, lines in rows.items()}
    assert [title for title, found in numbers.items() if len(set(found)) != len(found)] == []


def test_every_row_of_the_failure_lab_says_what_shows_it() -> None:
    rows = [
        row for rows in sections((ROOT / "docs/failure_lab.md").read_text(encoding="utf-8")).values() for row in rows
    ]
    assert [row for row in rows if not re.search(r"`tests/|emulator|kernel|later|`docs/", row.rsplit("|", 2)[1])] == []


def test_every_figure_names_a_test() -> None:
    rows = [row for rows in sections((ROOT / "docs/figures.md").read_text(encoding="utf-8")).values() for row in rows]
    assert rows
    assert [row for row in rows if not re.search(rf"{TEST.pattern}|^ none: ", row.rsplit("|", 2)[1])] == []


# --- what is supported ---


def test_the_readme_has_the_table_of_what_is_supported() -> None:
    assert f"\n{support_table()}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_knows_every_tile_that_windows_and_options_take() -> None:
    table = support_table()
    assert {f"{row.tile_m}x{row.tile_n}" for row in CANDIDATES} == set(re.findall(r"\d+x\d+", table))
    assert [line for line in table.splitlines() if line.startswith("* ")] == [
        "* sm_90 (Hopper: H100, H200): yes",
        "* sm_100 (Blackwell: B200): not yet",
        "* sm_103 (Blackwell: B300): not yet",
    ]


def test_the_table_follows_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    only = [row for row in CANDIDATES if row.head_dim == 256]
    monkeypatch.setattr(select, "CANDIDATES", only)
    monkeypatch.setattr(support, "CANDIDATES", only)
    rows = [line for line in support_table().splitlines() if line.startswith("| up to")]
    assert rows == ["| up to 256 | float16, bfloat16 |" + 6 * " 128x64 |" + " 128x48, 128x32 |"]


# --- what users reported ---

#: What a case may wait for, because it is not there.
FEATURES = ("varlen", "seqused", "backward", "FP8", "decode", "paged cache", "merge_states", "later work")
CASE_TEST = re.compile(r"^def (test((?:_c\d\d)+)_\w+)", re.MULTILINE)


def user_cases() -> dict[str, list[str]]:
    """Cells of the rows of docs/user_cases.md by number."""
    rows = re.findall(
        r"^\| ([CP]\d+) \|(.*)\|$", (ROOT / "docs/user_cases.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len({number for number, _ in rows}) == len(rows)
    return {number: [cell.strip() for cell in cells.split("|")] for number, cells in rows}


def test_every_user_case_has_a_row() -> None:
    assert [number for number in user_cases() if number.startswith("C")] == [f"C{n:02}" for n in range(1, 65)]


def test_every_user_case_names_a_test_or_what_it_waits_for() -> None:
    shown = {number: cells[-1] for number, cells in user_cases().items()}
    assert [n for n, cell in shown.items() if not TEST.search(cell) and not cell.startswith(FEATURES)] == []


def test_every_test_with_a_number_is_in_the_row_of_it() -> None:
    cases, found = user_cases(), 0
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        for name, numbers in CASE_TEST.findall(path.read_text(encoding="utf-8")):
            for number in numbers.upper().strip("_").split("_"):
                found += 1
                assert f"`{path.relative_to(ROOT).as_posix()}::{name}`" in cases[number][-1], (number, name)
    assert found >= 35


# --- the emulator ---

EMULATOR = (ROOT / "docs/emulator.md").read_text(encoding="utf-8")


def table(title: str) -> dict[str, list[str]]:
    """The table below a heading of docs/emulator.md: the name in a row's first cell, and its other cells."""
    section = re.split(r"^#+ ", EMULATOR.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| `(\w+)`(?: \(\w+\))? \|(.*)\|$", section, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_every_hazard_is_explained() -> None:
    rows = table("Hazards")
    assert list(rows) == list(pytest.importorskip("cupyfa.emulator._core").HAZARDS)
    assert [name for name, cells in rows.items() if len(cells) != 2 or not all(cells)] == []


def test_every_policy_is_explained() -> None:
    assert list(table("Policies")) == list(pytest.importorskip("cupyfa.emulator.policies").POLICIES)


def test_a_kernel_of_ones_own_is_reported_as_written() -> None:
    pytest.importorskip("cupyfa.emulator._core")
    import_nvrtc()
    section = EMULATOR.split("\n## Your own kernel\n", 1)[1].split("\n## ", 1)[0]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)), {})
    (report,) = re.findall(
        r"\n```\n(.*?)\n```\n", re.sub(r"```python\n.*?```", "", section, flags=re.DOTALL), re.DOTALL
    )
    clean = "clean: {} on sm_90a, policy {}, seed 0"
    assert said.getvalue() == "\n".join([clean.format("double", "eager"), report, clean.format("mirrored", "lazy"), ""])
