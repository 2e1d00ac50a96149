"""The amalgamated source: complete, each file once, and compiler messages point at the real files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvrtc_tools import import_nvrtc
from test_spec import SPEC

import cupyfa
from cupyfa import sources
from cupyfa.compiler import compile_key, compile_offline
from cupyfa.sources import amalgamate, read

ENTRY = "hopper/fwd.cu"
LINE = re.compile(r'#line (\d+) "cuda/([^"]+)"')


def reachable(entry: str) -> set[str]:
    """Every file that an entry includes, at any depth."""
    seen: set[str] = set()
    todo = [entry]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += re.findall(r'^\s*#\s*include\s+"([^"]+)"', read(path), re.MULTILINE)
    return seen


@pytest.fixture
def empty_cache() -> Iterator[None]:
    amalgamate.cache_clear()
    yield
    amalgamate.cache_clear()


def test_no_include_is_left() -> None:
    assert not re.search(r"^\s*#\s*include", amalgamate(ENTRY), re.MULTILINE)
    assert "#pragma once" not in amalgamate(ENTRY)


def test_each_file_is_there_once() -> None:
    begun = [match[2] for match in LINE.finditer(amalgamate(ENTRY)) if match[1] == "1"]
    assert len(begun) == len(set(begun))
    assert set(begun) == reachable(ENTRY)
    assert {"params.h", "spec.cuh", "hopper/consumer.cuh", "ptx/wgmma.cuh"} <= set(begun)


def test_every_line_is_where_its_mark_says() -> None:
    files = {path: read(path).splitlines() for path in reachable(ENTRY)}
    shown: dict[str, set[int]] = {path: set() for path in files}
    path, number = "", 0
    for line in amalgamate(ENTRY).splitlines():
        if mark := LINE.fullmatch(line):
            path, number = mark[2], int(mark[1])
            continue
        assert files[path][number - 1] == line, f"cuda/{path}:{number}"
        shown[path].add(number)
        number += 1
    for path, lines in files.items():
        hidden = {lines[i - 1] for i in range(1, len(lines) + 1) if i not in shown[path]}
        assert all(re.match(r'\s*#\s*(include\s+"|pragma\s+once)', line) for line in hidden), path


def test_compiler_message_points_at_the_real_line() -> None:
    import_nvrtc()
    text = "head_dim and head_dim_v are padded to multiples of 32"
    source = read(ENTRY)
    line = source.count("\n", 0, source.rindex("static_assert(", 0, source.index(text))) + 1
    with pytest.raises(
        cupyfa.CompileError, match=rf"cuda/hopper/fwd\.cu\({line}\): error: static assertion failed.*{text}"
    ):
        compile_offline(dataclasses.replace(SPEC, head_dim=72))


def test_edited_include_is_another_key(monkeypatch: pytest.MonkeyPatch, empty_cache: None) -> None:
    before = compile_key(SPEC)

    def edited(path: str) -> str:
        return read(path) + ("// edited\n" if path == "ptx/types.cuh" else "")

    monkeypatch.setattr(sources, "read", edited)
    amalgamate.cache_clear()
    after = compile_key(SPEC)
    assert after[:-1] == before[:-1]
    assert after[-1] != before[-1]
    assert "// edited" in after[-1]


def test_cycles_and_repeats_are_cut(monkeypatch: pytest.MonkeyPatch, empty_cache: None) -> None:
    files = {
        "a.cu": '#include "b.cuh"\n  #  include "c.cuh"\nA\n#include "b.cuh"\nlast',
        "b.cuh": '#pragma once\n#include "c.cuh"\nB\n',
        "c.cuh": '#include "a.cu"\nC\n',
    }
    monkeypatch.setattr(sources, "read", files.__getitem__)
    assert amalgamate("a.cu").splitlines() == [
        '#line 1 "cuda/a.cu"',
        '#line 1 "cuda/b.cuh"',
        '#line 2 "cuda/b.cuh"',
        '#line 1 "cuda/c.cuh"',
        '#line 2 "cuda/c.cuh"',
        "C",
        '#line 3 "cuda/b.cuh"',
        "B",
        '#line 2 "cuda/a.cu"',
        '#line 3 "cuda/a.cu"',
        "A",
        '#line 5 "cuda/a.cu"',
        "last",
    ]


def test_missing_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        amalgamate("hopper/nothing.cu")


def test_sources_are_those_of_the_tree() -> None:
    root = Path(__file__).resolve().parent.parent / "cuda"
    for path in reachable(ENTRY):
        assert read(path) == (root / path).read_text(encoding="utf-8")
