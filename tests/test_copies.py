"""Which matrices are copied, where to, and what they hold then."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from odd_views import ODD_VIEWS, OddView, written
from problems import make_problem

import cupyfa
from cupyfa.copies import Copy, plan_copies, with_copies
from cupyfa.operand import Arrays, Layout, Operand
from cupyfa.options import Options
from cupyfa.problem import Problem
from cupyfa.testing import random_array

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
SHAPES = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16), "out": (2, 5, 4, 16)}


def operands(packed: bool = False, **changes: tuple[int, ...]) -> Arrays[Operand]:
    """Contiguous ones, but for some strides."""
    shapes = {name: shape[packed:] for name, shape in SHAPES.items()}
    arrays = {name: Operand.contiguous(name, shape, F16, 0) for name, shape in shapes.items()}
    arrays |= {name: dataclasses.replace(arrays[name], strides=strides) for name, strides in changes.items()}
    if packed:
        arrays |= {name: Operand.contiguous(name, (4,), np.int32, 0) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return Arrays(**arrays)


def pose(arrays: Arrays[Operand], layout: Layout = "BSHD") -> Problem:
    return Problem.from_operands(arrays, Options(layout=layout), want_lse=True, current_device=0)


def names(copies: tuple[Copy, ...]) -> str:
    return " ".join(copy.name for copy in copies)


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_that_tma_takes_are_not_copied(packed: bool) -> None:
    problem = pose(operands(packed))
    assert plan_copies(problem, "BSHD", (), 0) == ()
    assert with_copies(problem, ()) is problem


#: Of q or out, and whether there is a copy.
STRIDES: list[tuple[tuple[int, ...], bool]] = [
    ((640, 128, 32, 2), False),
    ((1360, 272, 48, 2), False),
    ((32, 64, 320, 2), False),  # heads outside
    ((0, 128, 0, 2), False),
    ((648, 128, 32, 2), True),
    ((800, 130, 32, 2), True),
    ((800, 144, 34, 2), True),
    ((1280, 256, 64, 4), True),
    ((640, 128, 32, 0), True),
    ((640, 2, 10, 40), True),
    ((-640, 128, 32, 2), True),
    ((640, -128, 32, 2), True),
    ((640, 128, -32, 2), True),
    ((640, 128, 32, -2), True),
    ((2**40 - 16, 128, 32, 2), False),
    ((2**40, 128, 32, 2), True),
    ((640, 2**40 - 16, 160, 2), False),
    ((640, 2**40, 160, 2), True),
    ((640, 128, 2**40, 2), True),
]


@pytest.mark.parametrize(
    ("name", "strides", "copied"),
    [("q", *case) for case in STRIDES] + [("out", *case) for case in STRIDES if 0 not in case[0]],
    ids=str,
)
def test_strides_that_need_a_copy(name: str, strides: tuple[int, ...], copied: bool) -> None:
    copies = plan_copies(pose(operands(**{name: strides})), "BSHD", (), 0)
    assert names(copies) == (name if copied else "")


@pytest.mark.parametrize(("row", "copied"), [(2**34 - 16, False), (2**34, True), (-128, True), (136, True), (0, False)])
def test_strides_of_packed_rows(row: int, copied: bool) -> None:
    assert names(plan_copies(pose(operands(True, q=(row, 32, 2))), "BSHD", (), 0)) == ("q" if copied else "")


@pytest.mark.parametrize("stride", [0, 2, 6, -32, 2**50])
def test_stride_of_an_axis_with_one_index_is_free(stride: int) -> None:
    one = Operand("q", (1, 1, 1, 16), (stride, stride, stride, 2), F16, 0)
    problem = pose(Arrays(*(dataclasses.replace(one, name=name) for name in "qkv")))
    assert plan_copies(problem, "BSHD", (), 0) == ()


def test_addresses_that_need_a_copy() -> None:
    """The workspace holds what is before them; each begins at a multiple of 256 bytes, in the order of the call."""
    problem = pose(operands(k=(448, 64, 32, -2)))
    copies = plan_copies(problem, "BSHD", ("out", "q"), 1000)
    assert [(copy.name, copy.begin, copy.size, copy.end) for copy in copies] == [
        ("q", 1024, 1280, 2304),
        ("k", 2304, 896, 3200),
        ("out", 3328, 1280, 4608),
    ]
    changed = with_copies(problem, copies)
    assert changed.v == problem.v
    assert changed.q == problem.q  # the strides were those of a copy
    assert changed.k == dataclasses.replace(problem.k, strides=(448, 64, 32, 2))
    assert dataclasses.replace(changed, k=problem.k) == problem


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_a_copy_is_contiguous_as_the_user_sees_it(layout: Layout) -> None:
    given = operands()
    if layout == "BHSD":
        given = Arrays(
            *(Operand.contiguous(x.name, tuple(x.shape[i] for i in (0, 2, 1, 3)), F16, 0) for x in given[:4])  # type: ignore[union-attr]
        )
    problem = pose(given, layout)
    for copy, user in zip(plan_copies(problem, layout, ("q", "k", "v", "out"), 0), given, strict=False):
        assert user is not None
        assert copy.shape == user.shape
        assert copy.operand == user.in_bshd(layout)


def test_a_packed_copy_has_no_batch() -> None:
    problem = pose(operands(True))
    (copy,) = plan_copies(problem, "BSHD", ("k",), 0)
    assert copy.shape == (7, 2, 16)
    assert copy.operand == problem.k


def test_keys_that_were_broadcast_are_copied_once() -> None:
    problem = pose(operands(k=(0, 34, 0, 2)))
    (copy,) = plan_copies(problem, "BSHD", (), 0)
    assert copy.shape == (1, 7, 1, 16)
    assert copy.operand.shape == (2, 7, 2, 16)
    assert copy.operand.strides == (0, 32, 0, 2)
    keys = random_array((1, 7, 1, 17), F16, 0)[..., :16]
    memory = np.zeros(copy.size, np.uint8)
    copy.read(np.broadcast_to(keys, (2, 7, 2, 16)), memory)
    np.testing.assert_array_equal(memory.view(F16).reshape(1, 7, 1, 16), keys)


def test_columns_that_were_broadcast_are_copied_in_full() -> None:
    (copy,) = plan_copies(pose(operands(v=(448, 64, 32, 0))), "BSHD", (), 0)
    assert copy.shape == (2, 7, 2, 16)
    memory = np.zeros(copy.size, np.uint8)
    value = random_array((2, 7, 2, 1), F16, 0)
    copy.read(np.broadcast_to(value, copy.shape), memory)
    np.testing.assert_array_equal(memory.view(F16).reshape(copy.shape), np.repeat(value, 16, axis=3))


def test_nothing_is_copied_where_nothing_is_computed() -> None:
    problem = make_problem(seqlen_k=0, padding=1)
    assert plan_copies(problem, "BSHD", ("q", "out"), 0) == ()


def test_rows_that_no_copy_makes_short_enough() -> None:
    """Their heads lie outside, so that the strides of the array itself are small."""
    heads = 2**25
    q = Operand("q", (3, heads, 256), (512, 1536, 2), F16, 0)
    k = Operand.contiguous("k", (3, 1, 256), F16, 0)
    given = operands(True)._replace(q=q, k=k, v=dataclasses.replace(k, name="v"), out=None)
    problem = pose(given)
    assert names(plan_copies(dataclasses.replace(problem, out=problem.q), "BSHD", (), 0)) == ""
    message = (
        r"^attention: q has shape \(3, 33554432, 256\); a contiguous copy of it, which its strides or its address make "
        r"necessary, has 17179869184 bytes from one index of an axis to the next, and no kernel takes that many$"
    )
    with pytest.raises(cupyfa.UnsupportedError, match=message):
        plan_copies(dataclasses.replace(problem, out=problem.q), "BSHD", ("q",), 0)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_there_and_back(odd: OddView, dtype: Any) -> None:
    """All bits, whatever they stand for, and none beside the view."""
    shape = (2, 5, 3, 16)
    bits = np.arange(math.prod(shape)).astype(np.uint16) * 136  # all exponents; none of them is the poison
    matrix = bits.reshape(shape).view(dtype)
    copy = Copy(Operand.contiguous("out", shape, dtype, 0), shape, 0)
    memory = np.zeros(copy.size, np.uint8)
    copy.read(odd.holding(np, matrix), memory)
    np.testing.assert_array_equal(memory.view(np.uint16), bits)
    around, view = odd.poisoned(np, shape, dtype)
    copy.write(view, memory)
    np.testing.assert_array_equal(view.view(np.uint16), matrix.view(np.uint16))
    assert written(around) == matrix.size


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_each_odd_view_needs_a_copy(odd: OddView) -> None:
    view = odd.poisoned(np, SHAPES["q"], F16)[1]
    unaligned = view.ctypes.data % 16 != 0
    assert unaligned or names(plan_copies(pose(operands(q=view.strides)), "BSHD", (), 0)) == "q"
