"""Packed sequences: the public functions on the CPU, what they refuse, and the oracle."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from typing import Any

import numpy as np
import pytest
from packed import call, hold_to_oracle, reference
from problems import make_problem

import cupyfa
from cupyfa import attention_varlen, debug, dispatch
from cupyfa.copies import plan_copies
from cupyfa.lengths import check_lengths
from cupyfa.operand import Arrays, Operand
from cupyfa.options import check_options
from cupyfa.oracles import dense, packed
from cupyfa.packing import packed_tiles, read_plan
from cupyfa.problem import Problem
from cupyfa.select import H200, select
from cupyfa.spec import Bias, PlanSpec
from cupyfa.testing import PACKED_CASES, PackedCase, guarded_empty, random_array


@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda case: case.id)
def test_case(case: PackedCase) -> None:
    arguments = call(case)
    used = {name: arguments[name] for name in ("seqused_q", "seqused_k") if name in arguments}
    if any((x < 0).any() for x in used.values()):  # the host refuses what the device clamps
        with pytest.raises(ValueError, match=r"^attention: seqused_[qk]\[\d\] is -?\d+; it must be from 0 to"):
            attention_varlen(**arguments)
        return
    shape = arguments["q"].shape
    out = guarded_empty((*shape[:2], arguments["v"].shape[2]), arguments["q"].dtype)
    lse = guarded_empty(shape[1::-1], np.float32)
    result = attention_varlen(**arguments, out=out.array, lse=lse.array, return_lse=True)
    assert result.out is out.array
    assert result.lse is lse.array
    out.check("out")
    lse.check("lse")
    hold_to_oracle(case, *result)


def test_cases_have_their_own_names() -> None:
    assert len({case.id for case in PACKED_CASES}) == len(PACKED_CASES)


def test_the_oracle_is_attention_by_sequence() -> None:
    case = PACKED_CASES[2]
    arguments = call(case)
    out, lse, *_ = reference(case)
    begin = 0
    for n in case.lengths_q:
        rows = slice(begin, begin + n)
        one, lse_of_one = dense.attention(*(arguments[x][None, rows] for x in "qkv"), causal=True)
        assert np.array_equal(out[rows], one[0])
        assert np.array_equal(lse[:, rows], lse_of_one[0])
        begin += n


def test_shapes_of_the_result() -> None:
    arguments = call(PACKED_CASES[-3])
    out, lse = attention_varlen(**arguments, return_lse=True)
    assert out.shape == (*arguments["q"].shape[:2], arguments["v"].shape[2])
    assert lse.shape == arguments["q"].shape[1::-1]
    assert np.array_equal(attention_varlen(**arguments), out)


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


OF_BIAS = (
    r"; it must have 2 to 4 axes and broadcast to \(batch, heads_q, max_seqlen_q, max_seqlen_k\), or more rows and "
    r"keys, \(2, 4, {}, {}\)$"
)
GOOD: dict[str, Any] = {
    "q": zeros(10, 4, 16),
    "k": zeros(12, 2, 16),
    "v": zeros(12, 2, 16),
    "cu_seqlens_q": np.int32([0, 4, 10]),
    "cu_seqlens_k": np.int32([0, 7, 12]),
}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "four axes": ({"q": zeros(1, 10, 4, 16)}, ValueError, r"q has 4 axes, shape \(1, 10, 4, 16\); it needs 3: "),
    "other heads": ({"k": zeros(12, 3, 16)}, ValueError, r"v has 2 heads but k has 3"),
    "other total": ({"v": zeros(11, 2, 16)}, ValueError, r"v has seqlen 11 but k has 12"),
    "no offsets": ({"cu_seqlens_k": None}, TypeError, r"cu_seqlens_k is None; it must be an array of int32"),
    "int64": ({"cu_seqlens_q": np.array([0, 4, 10])}, TypeError, r"cu_seqlens_q has dtype int64; it must be int32"),
    "a list": ({"cu_seqlens_q": [0, 4, 10]}, TypeError, r"cu_seqlens_q is a list but q is a numpy.ndarray"),
    "two axes": ({"cu_seqlens_q": np.int32([[0, 10]])}, ValueError, r"cu_seqlens_q has shape \(1, 2\);"),
    "strided": ({"cu_seqlens_q": np.int32([0, 1, 4, 5, 10])[::2]}, ValueError, r"cu_seqlens_q has stride 8 bytes"),
    "no entry": ({"cu_seqlens_q": np.int32([])}, ValueError, r"cu_seqlens_q has 0 entries; it must have one more"),
    "other batch": ({"cu_seqlens_k": np.int32([0, 12])}, ValueError, r"cu_seqlens_k has 2 entries but"),
    "used of one": ({"seqused_k": np.int32([3])}, ValueError, r"seqused_k has 1 entries; .* each of the 2 sequences"),
    "used floats": ({"seqused_q": np.float32([3, 3])}, TypeError, r"seqused_q has dtype float32; it must be int32"),
    "falling": ({"cu_seqlens_q": np.int32([0, 7, 6])}, ValueError, r"cu_seqlens_q\[2\] is 6, less than .*, 7"),
    "negative": ({"cu_seqlens_q": np.int32([-1, 7, 10])}, ValueError, r"cu_seqlens_q\[0\] is -1; .* 10 rows of q"),
    "beyond": ({"cu_seqlens_k": np.int32([0, 7, 13])}, ValueError, r"cu_seqlens_k\[2\] is 13; .* 12 rows of k"),
    "used beyond": ({"seqused_k": np.int32([3, 6])}, ValueError, r"seqused_k\[1\] is 6; it must be from 0 to 5"),
    "used below": ({"seqused_q": np.int32([-1, 6])}, ValueError, r"seqused_q\[0\] is -1; it must be from 0 to 4"),
    "max float": ({"max_seqlen_q": 3.5}, TypeError, r"max_seqlen_q is 3.5; it must be an integer or None"),
    "max below": ({"max_seqlen_k": -1}, ValueError, r"max_seqlen_k is -1; it must be at least 0"),
    "lse": ({"lse": zeros(10, 4, dtype=np.float32)}, ValueError, r"lse has shape .*\(heads_q, total_q\), \(4, 10\)"),
    "out": ({"out": zeros(10, 4, 8)}, ValueError, r"out has shape \(10, 4, 8\); it must have"),
    "slopes": ({"alibi_slopes": zeros(3, 4, dtype=np.float32)}, ValueError, r"alibi_slopes has shape \(3, 4\)"),
    "bias 1d": ({"bias": zeros(12)}, ValueError, r"bias has shape \(12,\)" + OF_BIAS.format(1, 1)),
    "bias 5d": ({"bias": zeros(1, 1, 1, 7, 7)}, ValueError, r"bias has shape \(1, 1, 1, 7, 7\)" + OF_BIAS.format(1, 1)),
    "bias none": ({"bias": zeros(0, 7)}, ValueError, r"bias has shape \(0, 7\)" + OF_BIAS.format(1, 1)),
    "bias batch": ({"bias": zeros(3, 1, 7, 7)}, ValueError, r"bias has shape \(3, 1, 7, 7\)" + OF_BIAS.format(1, 1)),
    "bias heads": ({"bias": zeros(2, 7, 7)}, ValueError, r"bias has shape \(2, 7, 7\)" + OF_BIAS.format(1, 1)),
    "bias rows": (
        {"bias": zeros(7, 7), "max_seqlen_q": 8, "max_seqlen_k": 5}, ValueError,
        r"bias has shape \(7, 7\)" + OF_BIAS.format(8, 5),
    ),
    "bias keys": (
        {"bias": zeros(7, 7), "max_seqlen_k": 99}, ValueError, r"bias has shape \(7, 7\)" + OF_BIAS.format(1, 12)
    ),
    "bias of fewer rows": (
        {"bias": zeros(5, 7)}, ValueError,
        r"bias has 5 rows but sequence 1 has 6; it must have 1, or as many as the longest sequence$",
    ),
    "bias of fewer keys": (
        {"bias": zeros(2, 1, 6, 6)}, ValueError, r"bias has 6 keys but sequence 0 has 7; it must have 1, or as"
    ),
    "bias dtype": ({"bias": zeros(7, 7, dtype=np.float64)}, TypeError, r"bias has dtype float64; it must be float32"),
    "a plan": ({"plan": 3}, TypeError, r"plan is for CuPy arrays"),
    "workspace": ({"workspace": zeros(3)}, TypeError, r"workspace is for CuPy arrays"),
    "a plan under the emulator": ({"plan": 3, "backend": "emulator"}, TypeError, r"plan is for CuPy arrays"),
    "workspace under the emulator": (
        {"workspace": zeros(3), "backend": "emulator"}, TypeError, r"workspace is for CuPy arrays"
    ),
    "backend": ({"backend": "gpu"}, ValueError, r"backend is 'gpu'; it must be 'emulator' or None"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    changes, error, message = BAD[name]
    attention_varlen(**GOOD)
    with pytest.raises(error, match=f"^attention: {message}"):
        attention_varlen(**(GOOD | changes))


def test_out_may_not_overlap_the_lengths() -> None:
    memory = np.zeros(10 * 4 * 16, np.float16)
    out = memory.reshape(10, 4, 16)
    offsets = memory[:6].view(np.int32)
    with pytest.raises(ValueError, match=r"^attention: out shares memory with cu_seqlens_q"):
        attention_varlen(**(GOOD | {"out": out, "cu_seqlens_q": offsets}))


# --- User cases (public reports of other libraries) ---


def test_c03_c10_nothing_at_all() -> None:
    offsets = np.zeros(3, np.int32)
    out, lse = attention_varlen(zeros(0, 4, 16), zeros(12, 2, 16), zeros(12, 2, 16), offsets, offsets, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 16), (4, 0))
    none = np.zeros(1, np.int32)
    out, lse = attention_varlen(zeros(3, 4, 16), zeros(0, 2, 16), zeros(0, 2, 16), none, none, return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_c06_c07_fewer_rows_than_sequences() -> None:
    hold_to_oracle(case := PackedCase("c06", (0, 1, 0, 1), (0, 3, 0, 5), 9, 3, causal=True), *run(case))
    hold_to_oracle(case := PackedCase("c07", (0, 0, 0, 1), (0, 0, 0, 1), 21, 7, 120), *run(case))


def run(case: PackedCase) -> Any:
    return attention_varlen(**call(case), return_lse=True)


# --- What the GPU path makes of it ---


def problem_of(case: PackedCase, **options: Any) -> Problem:
    arrays = Arrays(**{name: x for name, x in call(case).items() if isinstance(x, np.ndarray)})
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, 0))
    checked = check_options(causal=case.causal)._replace(**options)
    return Problem.from_operands(operands, checked, want_lse=True, current_device=0)


def test_the_expected_length_chooses_the_kernel_and_nothing_else() -> None:
    case = PackedCase("many", (100,) * 30)
    short, long = (select(problem_of(case, max_seqlen_q=n), H200).spec for n in (100, None))
    assert (short.tile_m, long.tile_m) == (128, 192)
    assert short.varlen
    assert not select(make_problem(), H200).spec.varlen


def test_the_bound_of_tiles_holds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(0, 300, rng.integers(1, 9))
        used = rng.integers(0, lengths + 1)
        case = PackedCase(
            "random", tuple(lengths), used_q=tuple(used), before=int(rng.integers(3)), behind=int(rng.integers(3))
        )
        offsets = case.lengths["cu_seqlens_q"]
        edges = [0, *itertools.chain(*zip(offsets[:-1], offsets[:-1] + used, strict=True)), offsets[-1] + case.behind]
        tiles = int(np.sum(-(-np.diff(edges) // 128)))
        assert tiles <= packed_tiles(problem_of(case), 128)


def test_limits() -> None:
    q = Operand("q", (2**30 + 1, 1, 8), (16, 16, 2), np.dtype(np.float16), 0)
    k = Operand("k", (5, 1, 8), (2**34, 16, 2), np.dtype(np.float16), 0)
    offsets = [Operand(f"cu_seqlens_{side}", (2,), (4,), np.dtype(np.int32), 0) for side in "qk"]
    lengths = {operand.name: operand for operand in offsets}

    def problem(q: Operand, k: Operand) -> Problem:
        v = Operand("v", k.shape, k.strides, k.dtype, 0)
        return Problem.from_operands(Arrays(q, k, v, **lengths), check_options(), want_lse=False, current_device=0)

    with pytest.raises(cupyfa.UnsupportedError, match=r"^attention: q has 1073741825 rows; packed sequences may have"):
        problem(q, k)
    small = Operand("q", (5, 1, 8), (16, 16, 2), np.dtype(np.float16), 0)
    assert [copy.name for copy in plan_copies(problem(small, k), "BSHD", (), 0)] == ["k", "v"]


def test_an_empty_plan_has_no_tiles() -> None:
    assert len(read_plan(np.empty(0, np.uint8))) == 0


def test_debug_is_off() -> None:
    assert debug.DEBUG is False
    assert "attention_varlen" in cupyfa.__all__


def test_lengths_are_checked_by_value() -> None:
    problem = problem_of(PACKED_CASES[1])
    lengths = {name: np.int32([0, 100, 101, 231, 488]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    check_lengths(lengths | {"seqused_q": None, "seqused_k": np.int32([100, 1, 130, 257])}, problem)
    with pytest.raises(ValueError, match=re.escape("attention: seqused_k[3] is 258; it must be from 0 to 257")):
        check_lengths(lengths | {"seqused_q": None, "seqused_k": np.int32([100, 1, 130, 258])}, problem)


def test_warmup_knows_packed_calls() -> None:
    warmup = importlib.import_module("cupyfa.warmup")
    packed_call = {"q": (999, 8, 64), "k": (999, 2, 64), "dtype": "float16", "sequences": 7, "max_seqlen_q": 500}
    spec, plan = warmup._specs(0, packed_call | {"causal": True, "sink": True}, H200)
    assert (spec.varlen, spec.causal, spec.sink, spec.tile_m, plan) == (True, True, True, 128, PlanSpec())
    lengths = {"max_seqlen_q": 500, "max_seqlen_k": 512}
    spec, _ = warmup._specs(0, packed_call | lengths | {"bias": (7, 8, 500, 512), "bias_dtype": "float16"}, H200)
    assert (spec.varlen, spec.bias, spec.bias_float32) == (True, Bias.TILE, False)
    with pytest.raises(ValueError, match=r"^attention: bias has shape \(500, 500\); .* \(7, 8, 500, 512\)$"):
        warmup._specs(0, packed_call | lengths | {"bias": (500, 500)}, H200)
    with pytest.raises(TypeError, match=r"^attention: sequences is 'x'; it must be an integer"):
        warmup._specs(0, packed_call | {"sequences": "x"}, H200)


def test_functions_of_a_call_take_the_same_options() -> None:
    ours = inspect.signature(attention_varlen).parameters
    for function in (cupyfa.plan_varlen, cupyfa.workspace_size, cupyfa.explain):
        theirs = inspect.signature(function).parameters
        assert [name for name in theirs if name not in ("layout", "workspace", "arch")] == [
            name for name in ours if name in theirs and name != "workspace"
        ]
    dense = inspect.signature(cupyfa.attention).parameters
    used = ("seqused_q", "seqused_k")  # beside the other lengths, or behind the options
    assert all(name in dense and name in ours for name in used)
    apart = ("layout", *used)
    assert [name for name in ours if name in dense and name not in apart] == [x for x in dense if x not in apart]


def test_plans_are_of_cupy_arrays() -> None:
    with pytest.raises(TypeError, match=r"^attention: q is a numpy.ndarray; a plan is made on the GPU"):
        cupyfa.plan_varlen(**GOOD)
    assert dispatch.VarlenPlan.__name__ in cupyfa.__all__


def test_what_is_used_decides_about_a_bias() -> None:
    arguments = GOOD | {"seqused_q": np.int32([4, 2]), "seqused_k": np.int32([1, 5])}
    attention_varlen(**arguments, bias=zeros(4, 5))
    with pytest.raises(ValueError, match=r"^attention: bias has 4 keys but sequence 1 has 5; "):
        attention_varlen(**arguments, bias=zeros(4, 4))


def test_a_bias_that_repeats_has_any_length() -> None:
    """Whether it has one index, or is a view that repeats it."""
    case = PackedCase("repeated", (100, 7), (90, 60), causal=True)
    arguments = call(case)
    of_keys = random_array((2, 1, 90), np.float32, 3)
    expected = attention_varlen(**arguments, bias=np.tile(of_keys, (1, 100, 1)))
    assert np.array_equal(attention_varlen(**arguments, bias=of_keys), expected)
    for rows in (3, 100):
        assert np.array_equal(attention_varlen(**arguments, bias=np.broadcast_to(of_keys, (2, rows, 90))), expected)


def test_the_bias_of_a_problem_has_its_own_rows_and_keys() -> None:
    def problem(bias: Operand, **options: Any) -> Problem:
        case = PackedCase("bias", (100, 30), (90, 60))
        arrays = Arrays(**{name: x for name, x in call(case).items() if isinstance(x, np.ndarray)})
        operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, 0))._replace(bias=bias)
        checked = check_options()._replace(**options)
        return Problem.from_operands(operands, checked, want_lse=True, current_device=0)

    for shape, rows, keys, access in (
        ((2, 2, 128, 96), 128, 96, Bias.TILE),
        ((1, 96), 130, 96, Bias.ROW),
        ((2, 128, 1), 128, 150, Bias.GATHER),
        ((128, 95), 128, 95, Bias.GATHER),
        ((2**20, 2**32), 130, 150, Bias.TILE),  # sizes in FwdParams are of 32 bits
    ):
        posed = problem(Operand.contiguous("bias", shape, np.float32, 0))
        assert posed.bias is not None
        assert (posed.bias.shape, posed.bias_access) == ((2, 2, rows, keys), access)
    one_key = Operand("bias", (128, 1), (48, 12), np.dtype(np.float32), 0)
    assert problem(one_key).bias_access is Bias.GATHER
    for names, fits in (({"max_seqlen_q": 128, "max_seqlen_k": 96}, True), ({"max_seqlen_q": 500}, False)):
        bias = Operand.contiguous("bias", (128, 96), np.float32, 0)
        if fits:
            problem(bias, **names)
        else:  # no sequence has more rows than the array, 130
            with pytest.raises(ValueError, match=r"max_seqlen_k\), or more rows and keys, \(2, 2, 130, 1\)$"):
                problem(bias, **names)


def test_sequences_beyond_the_lengths() -> None:
    offsets = np.int32([2, 5, 9])
    rows = list(packed.sequences(offsets, offsets, np.int32([-3, 100]), np.int32([1, 0])))
    assert rows == [(slice(2, 2), slice(2, 3)), (slice(5, 9), slice(5, 5))]
