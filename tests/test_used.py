"""Sequences of a batch that use a part of their rows: the public functions on the CPU, and the oracle."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import numpy as np
import pytest
from problems import make_problem
from used import USED_CASES, UsedCase, hold_to_oracle

import cupyfa
from cupyfa import attention
from cupyfa.copies import plan_copies
from cupyfa.lengths import check_lengths
from cupyfa.operand import Operand, rows_to_next
from cupyfa.oracles import online, packed
from cupyfa.packed import Used
from cupyfa.packing import packed_tiles
from cupyfa.select import H200, select
from cupyfa.spec import PlanSpec
from cupyfa.testing import guarded_empty

warmup = importlib.import_module("cupyfa.warmup")  # the function has its name

LENGTHS = Used(Operand.contiguous("seqused_q", (2,), np.int32, 0), None)


@pytest.mark.parametrize("case", USED_CASES, ids=lambda case: case.id)
def test_case(case: UsedCase) -> None:
    arguments = case.call()
    if case.id == "beyond both ends":  # the host refuses what the device clamps
        with pytest.raises(ValueError, match=r"^attention: seqused_q\[0\] is -3; it must be from 0 to 100, the"):
            attention(**arguments)
        return
    q, v = arguments["q"], arguments["v"]
    heads_first = case.layout == "BHSD"
    out = guarded_empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = guarded_empty((q.shape[0], q.shape[1 if heads_first else 2], q.shape[2 if heads_first else 1]), np.float32)
    result = attention(**arguments, out=out.array, lse=lse.array, return_lse=True)
    assert result.out is out.array
    assert result.lse is lse.array
    out.check("out")
    lse.check("lse")
    hold_to_oracle(case, *result)


def test_the_oracle_is_attention_of_what_is_used() -> None:
    case = USED_CASES[0]
    arguments = case.call()
    del arguments["layout"]
    out, lse = packed.of_batch(**arguments)
    for i, (rows, keys) in enumerate(zip(case.used_q or (), case.used_k or (), strict=True)):
        of_one = (arguments["q"][i : i + 1, :rows], *(arguments[x][i : i + 1, :keys] for x in "kv"))
        one, lse_of_one = online.attention(*of_one)
        assert np.array_equal(out[i, :rows], one[0])
        assert np.array_equal(lse[i, :, :rows], lse_of_one[0])
        assert not out[i, rows:].any()
        assert np.isneginf(lse[i, :, rows:]).all()


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seqused_k": np.int32([3])}, ValueError, r"seqused_k has 1 entries; it must have one for each of the 2 seq"),
        ({"seqused_q": np.array([3, 3])}, TypeError, r"seqused_q has dtype int64; it must be int32"),
        ({"seqused_q": np.int32([[3, 3]])}, ValueError, r"seqused_q has shape \(1, 2\); it must have one axis"),
        ({"seqused_k": np.int32([1, 2, 3])[::2]}, ValueError, r"seqused_k has stride 8 bytes; it must be contiguous"),
        ({"seqused_k": [3, 3]}, TypeError, r"seqused_k is a list but q is a numpy.ndarray"),
        ({"seqused_k": np.int32([3, 7])}, ValueError, r"seqused_k\[1\] is 7; it must be from 0 to 6, the rows of the"),
        ({"seqused_q": np.int32([5, 1])}, ValueError, r"seqused_q\[0\] is 5; it must be from 0 to 4, the rows of the"),
        ({"seqused_q": np.int32([-1, 1])}, ValueError, r"seqused_q\[0\] is -1; it must be from 0 to 4"),
    ],
    ids=str,
)
def test_bad_lengths(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^attention: {message}"):
        attention(zeros(2, 4, 4, 16), zeros(2, 6, 2, 16), zeros(2, 6, 2, 16), **changes)


@pytest.mark.parametrize(
    ("shape", "strides", "rows"),
    [
        ((3, 5, 2, 64), (1280, 256, 128, 2), 5),  # one behind the other
        ((3, 5, 2, 64), (2560, 256, 128, 2), 10),  # the beginnings of longer ones
        ((3, 5, 2, 64), (0, 256, 128, 2), 0),  # the same for all
        ((3, 5, 2, 64), (256, 768, 128, 2), None),  # (seqlen, batch, heads, head_dim)
        ((3, 5, 2, 64), (1280, 0, 128, 2), None),  # one row
        ((3, 5, 2, 64), (-1280, 256, 128, 2), None),
        ((3, 1, 2, 64), (1000, 7, 128, 2), 1),  # a row each: any stride
        ((1, 5, 2, 64), (7, 256, 128, 2), 0),
        ((3, 5, 2, 64), (2**29 * 256, 256, 128, 2), None),  # the last begins behind 2^30 rows
    ],
    ids=str,
)
def test_how_many_rows_behind_a_sequence_the_next_one_begins(
    shape: tuple[int, ...], strides: tuple[int, ...], rows: int | None
) -> None:
    assert rows_to_next(Operand("k", shape, strides, np.dtype(np.float16), 0)) == rows


def problem_of(**changes: Any) -> Any:
    posed = make_problem(batch=2, seqlen_q=300, seqlen_k=500, head_dim=64, **changes)
    return dataclasses.replace(posed, used=LENGTHS)


def test_what_is_copied() -> None:
    posed = problem_of()
    assert plan_copies(posed, "BSHD", (), 100) == ()
    by_heads = dataclasses.replace(posed.q, strides=(posed.q.strides[2], *posed.q.strides[1:]))
    (copy,) = plan_copies(dataclasses.replace(posed, q=by_heads), "BSHD", (), 100)
    assert (copy.name, copy.begin) == ("q", 256)
    assert rows_to_next(copy.operand) == 300
    longer = dataclasses.replace(posed.v, strides=(2 * posed.v.strides[0], *posed.v.strides[1:]))
    copies = plan_copies(dataclasses.replace(posed, v=longer), "BSHD", (), 0)  # v alone begins at other rows
    assert [copy.name for copy in copies] == ["k", "v"]
    assert [rows_to_next(copy.operand) for copy in copies] == [500, 500]
    same = dataclasses.replace(posed.k, strides=(0, 0, *posed.k.strides[2:]))
    (copy, _) = plan_copies(dataclasses.replace(posed, k=same), "BSHD", (), 0)
    assert copy.shape == posed.k.shape  # a plan cannot repeat rows


def test_kernel_and_plan() -> None:
    posed = problem_of(causal=True)
    selection = select(posed, H200)
    assert selection.spec.varlen
    assert packed_tiles(posed, 128) == 2 * 300 // 128 + 5


def test_the_explanation() -> None:
    arguments = USED_CASES[0].call()
    lines = str(cupyfa.explain(**arguments)).splitlines()
    assert lines == [
        "attention bfloat16: batch 3, seqlen 200 x 260, heads 4/2, head_dim 64, seqused_q, seqused_k",
        "runs    on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.packed",
    ]
    explanation = cupyfa.explain(**arguments, arch="sm_90a")
    assert explanation.planner is not None
    assert explanation.workspace_bytes > 0
    assert re.search(r"(?m)^plan    .*at most 11 query tiles of a head$", str(explanation))


def test_lengths_are_checked_against_each_sequence() -> None:
    posed = problem_of()
    check_lengths({"seqused_q": np.int32([0, 300]), "seqused_k": None}, posed)
    with pytest.raises(ValueError, match=r"^attention: seqused_q\[1\] is 301; it must be from 0 to 300"):
        check_lengths({"seqused_q": np.int32([0, 301]), "seqused_k": None}, posed)


def test_warmup_knows_lengths() -> None:
    call = {"q": (2, 300, 4, 64), "k": (2, 500, 2, 64), "dtype": "float16", "causal": True}
    assert [spec.varlen for spec in warmup._specs(0, call, H200)] == [False]  # type: ignore[union-attr]
    spec, plan = warmup._specs(0, call | {"seqused_k": True}, H200)
    assert spec == select(problem_of(heads_q=4, causal=True), H200).spec
    assert plan == PlanSpec()
