"""The problem of gradients: what it holds, what a GPU asks of it, and where its arrays may lie."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cupyfa import UnsupportedError
from cupyfa.backward_problem import (
    GRADIENTS,
    BackwardArrays,
    BackwardProblem,
    check_backward_alignment,
    check_backward_overlap,
    fill_empty,
    gradient_shape,
    with_gradients,
)
from cupyfa.operand import LENGTHS, Operand
from cupyfa.options import check_options


def operand(name: str, *shape: int, dtype: Any = np.float16, device: int | None = 0) -> Operand:
    return Operand.contiguous(name, shape, dtype, device)


def operands(**more: Operand) -> BackwardArrays[Operand]:
    """Of a call with 2 batches, 5 rows, 6 keys, 4 heads for 2, and head_dim 16 and 24; or with others."""
    own = {
        "dout": operand("dout", 2, 5, 4, 24),
        "q": operand("q", 2, 5, 4, 16),
        "k": operand("k", 2, 6, 2, 16),
        "v": operand("v", 2, 6, 2, 24),
        "out": operand("out", 2, 5, 4, 24),
        "lse": operand("lse", 2, 4, 5, dtype=np.float32),
    }
    return BackwardArrays(**(own | more))


def packed(**more: Operand) -> BackwardArrays[Operand]:
    """Of a call with 3 sequences."""
    own = {
        "dout": operand("dout", 10, 4, 24),
        "q": operand("q", 10, 4, 16),
        "k": operand("k", 12, 2, 16),
        "v": operand("v", 12, 2, 24),
        "out": operand("out", 10, 4, 24),
        "lse": operand("lse", 4, 10, dtype=np.float32),
        "cu_seqlens_q": operand("cu_seqlens_q", 4, dtype=np.int32),
        "cu_seqlens_k": operand("cu_seqlens_k", 4, dtype=np.int32),
    }
    return BackwardArrays(**(own | more))


SINK, BIAS = operand("sink", 4, dtype=np.float32), operand("bias", 4, 5, 1)


def make(arrays: BackwardArrays[Operand], *, deterministic: bool = False, **options: Any) -> BackwardProblem:
    return BackwardProblem.of(arrays, check_options(**options), deterministic=deterministic, current_device=0)


def test_it_holds_the_forward_problem_and_the_gradients() -> None:
    dlse = operand("dlse", 2, 4, 5, dtype=np.float32)
    problem = make(operands(dlse=dlse, sink=SINK, bias=BIAS), causal=True, softcap=3.0)
    forward = problem.forward
    assert (forward.batch, forward.seqlen_q, forward.seqlen_k, forward.heads_q, forward.heads_kv) == (2, 5, 6, 4, 2)
    assert (forward.head_dim, forward.head_dim_v, forward.right, forward.softcap) == (16, 24, 0, 3.0)
    assert (forward.out.name, forward.lse, problem.dlse) == ("out", operands().lse, dlse)
    assert [getattr(problem, name).shape for name in ("dq", "dk", "dv")] == [
        (2, 5, 4, 16),
        (2, 6, 2, 16),
        (2, 6, 2, 24),
    ]
    assert problem.dsink == Operand.contiguous("dsink", (4,), np.float32, 0)
    assert problem.dbias is not None
    assert (problem.dbias.shape, problem.dbias.strides) == ((1, 4, 5, 1), (0, 10, 2, 0))
    assert not problem.deterministic
    assert not problem.is_empty


def test_it_is_a_key() -> None:
    first, second = make(operands(bias=BIAS)), make(operands(bias=BIAS))
    assert first == second
    assert hash(first) == hash(second)
    others = [
        make(operands(bias=BIAS), deterministic=True),
        make(operands(bias=BIAS), causal=True),
        make(operands()),
        make(operands(bias=BIAS, dq=dataclasses.replace(operand("dq", 2, 5, 4, 16), strides=(999, 128, 32, 2)))),
        make(operands(bias=BIAS, dlse=operand("dlse", 2, 4, 5, dtype=np.float32))),
    ]
    assert len({first, *others}) == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.deterministic = True  # type: ignore[misc]


def test_every_operand_is_in_its_place() -> None:
    given = packed(
        dlse=operand("dlse", 4, 10, dtype=np.float32), sink=SINK, bias=operand("bias", 10, 12),
        alibi_slopes=operand("alibi_slopes", 4, dtype=np.float32), seqused_q=operand("seqused_q", 3, dtype=np.int32),
        seqused_k=operand("seqused_k", 3, dtype=np.int32),
    )  # fmt: skip
    problem = make(given)
    assert [x and x.name for x in problem.operands] == [*BackwardArrays._fields]
    assert len(problem.spans) == len(BackwardArrays._fields)
    assert {x for x in problem.operands._fields if x.startswith("d") and x not in ("dout", "dlse")} == {*GRADIENTS}
    without = make(operands()).operands
    absent = {"dlse", "sink", "alibi_slopes", "bias", "dsink", "dbias", *LENGTHS}
    assert {name for name, x in without._asdict().items() if x is None} == absent


def test_packed_sequences_have_a_batch_of_1() -> None:
    problem = make(packed(dlse=operand("dlse", 4, 10, dtype=np.float32)))
    assert problem.forward.batch == 3
    assert problem.dout.shape == (1, 10, 4, 24)
    assert problem.forward.out.shape == (1, 10, 4, 24)
    assert problem.dk.shape == (1, 12, 2, 16)
    for x in (problem.forward.lse, problem.dlse):
        assert x is not None
        assert x.shape == (1, 4, 10)


def test_another_layout_is_turned() -> None:
    def turned(x: Operand) -> Operand:
        return x if len(x.shape) == 3 else x.in_bshd("BHSD")

    problem = make(operands().map(lambda _, x: turned(x)), layout="BHSD")
    assert problem.dout == operands().dout
    assert problem.forward.out == operands().out
    assert (problem.dk.shape, problem.dk.strides) == (
        (2, 6, 2, 16),
        (384, 32, 192, 2),
    )  # allocated as the caller sees it
    assert problem.forward.lse == operands().lse


def test_a_problem_without_rows_or_keys_is_empty() -> None:
    none = {"k": operand("k", 2, 0, 2, 16), "v": operand("v", 2, 0, 2, 24)}
    assert make(operands(**none)).is_empty


@pytest.mark.parametrize(
    ("bias", "shape"),
    [
        (operand("bias", 5, 6), (5, 6)),
        (operand("bias", 1, 4, 1, 6), (1, 4, 1, 6)),
        (dataclasses.replace(operand("bias", 4, 5, 6), strides=(12, 0, 2)), (4, 1, 6)),
        (dataclasses.replace(operand("bias", 2, 4, 5, 6), strides=(0, 0, 12, 2)), (1, 1, 5, 6)),
    ],
)
def test_a_bias_has_a_gradient_where_it_is_not_repeated(bias: Operand, shape: tuple[int, ...]) -> None:
    assert gradient_shape(bias) == shape
    problem = make(operands(bias=bias))
    assert problem.dbias is not None
    assert problem.dbias.shape == (1,) * (4 - len(shape)) + shape
    assert all(not stride for stride, size in zip(problem.dbias.strides, problem.dbias.shape, strict=True) if size == 1)


# --- What is checked for a GPU ---


@pytest.mark.parametrize("name", ["lse", "dlse", "dsink", "dbias"])
def test_numbers_lie_at_multiples_of_their_size(name: str) -> None:
    full = {
        "lse": operand("lse", 2, 4, 5, dtype=np.float32),
        "dlse": operand("dlse", 2, 4, 5, dtype=np.float32),
        "dsink": operand("dsink", 4, dtype=np.float32),
        "dbias": operand("dbias", 4, 5, 1),
    }
    odd = dataclasses.replace(full[name], strides=tuple(3 * stride + 1 for stride in full[name].strides))
    with pytest.raises(ValueError, match=rf"^attention: {name} has strides .* bytes; they must be multiples of [24]$"):
        make(operands(sink=SINK, bias=BIAS, **{name: odd}))


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse", "dq", "dk", "dv", "dsink", "dbias"])
def test_all_arrays_are_on_one_device(name: str) -> None:
    there = getattr(
        make(operands(sink=SINK, bias=BIAS, dlse=operand("dlse", 2, 4, 5, dtype=np.float32))).operands, name
    )
    if name == "dbias":
        there = operand("dbias", 4, 5, 1)
    elsewhere = dataclasses.replace(there, name=name, device=1)
    with pytest.raises(ValueError, match=rf"^attention: {name} is on CUDA device 1 \(CuPy\) but q is on CUDA device 0"):
        make(operands(sink=SINK, bias=BIAS, **{name: elsewhere}))


def test_the_current_device_computes() -> None:
    with pytest.raises(
        ValueError, match=r"^attention: q is on CUDA device 0 but the current device is 1; call it under"
    ):
        BackwardProblem.of(operands(), check_options(), deterministic=False, current_device=1)


def test_what_no_kernel_can_do_is_unsupported() -> None:
    wide = {"q": operand("q", 2, 5, 4, 264), "k": operand("k", 2, 6, 2, 264)}
    with pytest.raises(UnsupportedError, match=r"^attention: q has head_dim 264; supported are the multiples of 8"):
        make(operands(**wide))


# --- Addresses ---


def addresses(problem: BackwardProblem, **places: int) -> BackwardArrays[int]:
    """One behind the other, or where they are said to be."""
    begins = (2**20 * (i + 1) for i in range(len(BackwardArrays._fields)))
    at = {name: begin for (name, x), begin in zip(problem.operands._asdict().items(), begins, strict=True) if x}
    return BackwardArrays(**(at | places))


def test_matrices_that_tma_cannot_take_are_named() -> None:
    problem = make(operands(sink=SINK, bias=BIAS))
    assert check_backward_alignment(problem, addresses(problem)) == ()
    unaligned = addresses(problem, dout=1032, dv=2050, bias=4098, dbias=8194)
    assert check_backward_alignment(problem, unaligned) == ("dout", "dv")


@pytest.mark.parametrize(
    ("name", "address", "rest"),
    [
        ("lse", 1026, "4 bytes (a copy is aligned)"),
        ("sink", 1026, "4 bytes (a copy is aligned)"),
        ("bias", 1025, "2 bytes (a copy is aligned)"),
        ("dsink", 1026, "4 bytes (a new array is aligned)"),
        ("dbias", 1027, "2 bytes (a new array is aligned)"),
    ],
)
def test_numbers_begin_at_multiples_of_their_size(name: str, address: int, rest: str) -> None:
    problem = make(operands(sink=SINK, bias=BIAS))
    with pytest.raises(ValueError, match=r"^attention: ") as error:
        check_backward_alignment(problem, addresses(problem, **{name: address}))
    assert str(error.value) == f"attention: {name} begins at address {address:#x}; it must be a multiple of {rest}"


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_shares_memory_with_nothing(name: str) -> None:
    problem = make(operands(sink=SINK, bias=BIAS, dlse=operand("dlse", 2, 4, 5, dtype=np.float32)))
    apart = addresses(problem)
    check_backward_overlap(problem, apart)
    for other, x in problem.operands.given().items():
        begin = getattr(apart, other)
        _, end = x.span
        if other == name:
            continue
        with pytest.raises(
            ValueError, match=r"^attention: (\w+) shares memory with (\w+); it must be an array of"
        ) as error:
            check_backward_overlap(problem, apart._replace(**{name: begin + end - 2}))
        assert {name, other} <= {*str(error.value).replace(";", "").split()}
        check_backward_overlap(problem, apart._replace(**{name: begin + end}))


def test_inputs_may_share_memory() -> None:
    problem = make(operands())
    at = addresses(problem)
    check_backward_overlap(problem, at._replace(dout=at.out, v=at.k))


def test_gradients_that_are_missing_are_made() -> None:
    problem = make(operands(sink=SINK, bias=BIAS))
    made: list[tuple[Any, Any]] = []

    def empty(shape: Any, dtype: Any) -> Any:
        made.append((shape, np.dtype(dtype)))
        return np.empty(shape, dtype)

    arrays: Any = operands(sink=SINK, bias=BIAS).map(lambda _, x: np.empty(x.shape, x.dtype))
    dk = np.empty((2, 6, 2, 16), np.float16)
    full = with_gradients(empty, arrays._replace(dk=dk), problem)
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    assert made == [((2, 5, 4, 16), half), ((2, 6, 2, 24), half), ((4,), single), ((4, 5, 1), half)]
    assert full.dk is dk
    assert all(getattr(full, name) is not None for name in GRADIENTS)


@pytest.mark.parametrize(
    ("offsets", "used", "expected"),
    [
        ([0, 3, 3, 7], None, [0, 1, 2, 3, 4, 5, 6]),
        ([1, 3, 3, 5], None, [1, 2, 3, 4]),
        ([0, 3, 3, 7], [2, 5, 1], [0, 1, 3]),
        ([0, 3, 3, 7], [-1, 5, 9], [3, 4, 5, 6]),
        ([0, 4, 3, 7], None, []),
        ([0, 3, 3, 8], None, []),
        ([-1, 3, 3, 7], None, []),
        ([0], None, []),
    ],
    ids=str,
)
def test_without_keys_a_sink_has_the_gradients_of_the_lse_of_sequences(
    offsets: list[int], used: list[int] | None, expected: list[int]
) -> None:
    """Of those rows; that of no sequence is whatever it is. A sink of -inf has none."""
    dlse = np.float32([[1, 2, 4, 8, 16, 32, 64]] * 2)
    nobodys = [row for row in range(7) if row not in expected]
    dlse[:, nobodys] = np.nan
    rows, keys = np.zeros((7, 2, 8), np.float16), np.zeros((0, 2, 8), np.float16)
    arrays: BackwardArrays[Any] = BackwardArrays(
        *(rows, rows, keys, keys, rows, dlse, dlse, np.float32([1, -np.inf])),
        dq=np.ones_like(rows),
        dk=keys,
        dv=keys,
        dsink=np.full(2, np.nan, np.float32),
        cu_seqlens_q=np.int32(offsets),
        cu_seqlens_k=np.zeros(len(offsets), np.int32),
        seqused_q=None if used is None else np.int32(used),
    )
    fill_empty(np, arrays)
    assert arrays.dsink.tolist() == [sum(2**row for row in expected), 0]
    assert not arrays.dq.any()
