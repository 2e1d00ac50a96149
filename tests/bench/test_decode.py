"""The benchmark of decoding, without a GPU: its problems and its table."""

from __future__ import annotations

import pytest

from cupyfa.bench.decode import CELLS, PEER, DecodeCell, DecodeRow, format_rows
from cupyfa.bench.harness import Timing


def test_the_bytes_are_those_of_k_and_v() -> None:
    assert DecodeCell(1, 131072).cache_bytes == 2**29
    assert DecodeCell(8, 16384, group=8, queries=4, page_size=16).cache_bytes == 2**29


def test_every_size_has_every_group_and_pages_are_beside_rows() -> None:
    for batch, length in {(cell.batch, cell.length) for cell in CELLS}:
        groups = {c.group for c in CELLS if (c.batch, c.length, c.queries, c.page_size) == (batch, length, 1, None)}
        assert groups == {1, 4, 8}
    for cell in CELLS:
        if cell.page_size is not None or cell.queries > 1:
            assert DecodeCell(cell.batch, cell.length, cell.group) in CELLS


@pytest.mark.parametrize(
    ("error", "cells"),
    [
        (1e-4, "| 1 x 131072 | 8 | 1 | - | 134.2 | 150.0 | 0.89 | 0.67 | 1.33 |"),
        (0.5, "| 1 x 131072 | 8 | 1 | - | 134.2 | 150.0 WRONG | 0.89 | 0.67 | 1.33 |"),
    ],
)
def test_a_row(error: float, cells: str) -> None:
    timings = {"cupyfa": Timing(1, (150e-6, 160e-6, 140e-6)), PEER: Timing(1, (200e-6, 210e-6, 190e-6))}
    row = DecodeRow(DecodeCell(1, 131072, 8), "kernel", error, timings)
    assert format_rows([row], 4e12)[-1] == cells


def test_a_row_without_the_peer() -> None:
    row = DecodeRow(DecodeCell(8, 16384, 8, 4, 64), "kernel", 0.0, {"cupyfa": Timing(1, (268.4e-6,))})
    assert format_rows([row], 4e12)[-1] == "| 8 x 16384 | 8 | 4 | 64 | 134.2 | 268.4 | 0.50 | - | - |"
