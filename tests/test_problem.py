"""Every check on arguments: what is refused, in which words, and what is not."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bad_calls import BAD_CALLS, GOOD, KV, BadCall, Q, Where, qkv, zeros

import cupyfa
from cupyfa.errors import type_name
from cupyfa.operand import Addresses, Arrays, Layout, Operand
from cupyfa.options import Options, check_flag, check_options
from cupyfa.problem import Problem, check_alignment, check_overlap, check_workspace
from cupyfa.select import H200, select
from cupyfa.spec import Bias, DType
from cupyfa.testing import as_bshd

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def as_if_on_gpu(*, layout: Any = "BSHD", return_lse: Any = False, config: Any = None, **arguments: Any) -> Problem:
    """Check NumPy arrays as if they were CuPy arrays on device 0."""
    names = ("softmax_scale", "causal", "window_size", "softcap")
    check_flag("return_lse", return_lse)
    options = check_options(**{name: arguments.pop(name) for name in names if name in arguments}, layout=layout)
    arrays = Arrays(**arguments)
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, 0))
    problem = Problem.from_operands(operands, options, want_lse=False, current_device=0)
    select(problem, H200, config)
    if arrays.out is None:
        arrays = arrays._replace(out=zeros(np, arrays.q.shape, arrays.q.dtype))
    places = {name: x.ctypes.data if x.size else 0 for name, x in arrays.given().items()}
    check_alignment(problem, Addresses(**places))
    check_overlap(problem, Addresses(**places))
    return problem


def ids(calls: list[BadCall]) -> list[Any]:
    return [pytest.param(call, id=call.id) for call in calls]


def needs_arrays(call: BadCall) -> bool:
    return all(isinstance(x, np.ndarray) or (x is None and n not in "qkv") for n, x in arrays_of(call).items())


def arrays_of(call: BadCall) -> dict[str, Any]:
    return {name: x for name, x in call.make(np).items() if name in Arrays._fields}


ON_CPU = [call for call in BAD_CALLS if call.where in (Where.BOTH, Where.NUMPY)]
BY_OPERANDS = [call for call in BAD_CALLS if call.where in (Where.BOTH, Where.GPU_RULES) and needs_arrays(call)]


def refused(call: BadCall, function: Any) -> None:
    with pytest.raises(call.error) as caught:
        function(**call.make(np))
    assert type(caught.value) is call.error
    assert re.match("attention: " + call.message, str(caught.value)), str(caught.value)


def test_the_table_is_large_and_its_names_are_unique() -> None:
    assert len({call.id for call in BAD_CALLS}) == len(BAD_CALLS)
    assert sum(call.where is not Where.NUMPY for call in BAD_CALLS) >= 170
    assert len(BY_OPERANDS) >= 150


@pytest.mark.parametrize("call", ids(ON_CPU))
def test_numpy_call_is_refused(call: BadCall) -> None:
    refused(call, cupyfa.attention)


@pytest.mark.parametrize("call", ids(BY_OPERANDS))
def test_gpu_call_is_refused_by_its_geometry(call: BadCall) -> None:
    refused(call, as_if_on_gpu)


@pytest.mark.parametrize("call", ids([call for call in BAD_CALLS if call.where is Where.GPU_RULES]))
def test_what_only_the_gpu_refuses_numpy_computes(call: BadCall) -> None:
    out = cupyfa.attention(**call.make(np))
    assert np.isfinite(out.astype(np.float32)).all()


def operand(name: str, shape: tuple[int, ...], dtype: Any = F16, device: int | None = 0, **changes: Any) -> Operand:
    return dataclasses.replace(Operand.contiguous(name, shape, dtype, device), **changes)


def pose(
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand | None = None,
    lse: Operand | None = None,
    *,
    sink: Operand | None = None,
    alibi_slopes: Operand | None = None,
    bias: Operand | None = None,
    layout: Layout = "BSHD",
    want_lse: bool = False,
    device: int | None = 0,
    **options: Any,
) -> Problem:
    operands = Arrays(q, k, v, out, lse, sink, alibi_slopes, bias)
    return Problem.from_operands(
        operands, check_options(**options, layout=layout), want_lse=want_lse, current_device=device
    )


def good(**changes: Operand) -> dict[str, Operand]:
    return {"q": operand("q", Q), "k": operand("k", KV), "v": operand("v", KV), **changes}


# --- Devices ---


@pytest.mark.parametrize("name", [name for name in GOOD if name != "q"])
def test_arrays_on_two_devices(name: str) -> None:
    shape, dtype = GOOD[name]
    message = rf"^attention: {name} is on CUDA device 1 \(CuPy\) but q is on CUDA device 0 \(CuPy\); all arrays must"
    with pytest.raises(ValueError, match=message):
        pose(**good(**{name: operand(name, shape, dtype, device=1)}))


def test_array_of_the_host_beside_one_of_a_device() -> None:
    with pytest.raises(ValueError, match=r"^attention: k is on the host \(NumPy\) but q is on CUDA device 0 \(CuPy\)"):
        pose(**good(k=operand("k", KV, device=None)))


def test_device_that_is_not_current() -> None:
    message = (
        r"^attention: q is on CUDA device 0 but the current device is 2; call it under `with cupy\.cuda\.Device\(0\):`$"
    )
    with pytest.raises(ValueError, match=message):
        pose(**good(), device=2)


def test_problem_on_another_device_that_is_current() -> None:
    arrays = {name: dataclasses.replace(x, device=3) for name, x in good().items()}
    assert pose(**arrays, device=3).out.device == 3


# --- What no array of a test can be ---


@pytest.mark.parametrize("name", ["q", "k"])
def test_sequence_that_an_int_cannot_count(name: str) -> None:
    longest = 2**31 - 1024
    for seqlen in (longest, longest + 1):
        shapes = (
            {"q": (1, seqlen, 1, 8), "k": (1, 4, 1, 8)} if name == "q" else {"q": (1, 4, 1, 8), "k": (1, seqlen, 1, 8)}
        )
        arrays = operand("q", shapes["q"]), operand("k", shapes["k"]), operand("v", shapes["k"])
        if seqlen == longest:
            assert pose(*arrays).batch == 1
        else:
            message = rf"^attention: {name} has seqlen {seqlen}; supported are at most {longest}$"
            with pytest.raises(cupyfa.UnsupportedError, match=message):
                pose(*arrays)


# --- Options ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (1, 1.0), (0.5, 0.5), (np.float32(0.25), 0.25), (np.float64(-2), -2.0), (np.int64(0), 0.0)],
)
def test_scales_become_floats(given: Any, expected: float | None) -> None:
    options = check_options(given, np.bool_(True), layout="BHSD")
    assert options == Options(expected, None, 0, None, "BHSD")
    assert type(options.softmax_scale) is type(expected)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, None), (50, 50.0), (0.5, 0.5), (np.float32(0.25), 0.25), (np.int8(3), 3.0)]
)
def test_caps_become_floats(given: Any, expected: float | None) -> None:
    options = check_options(softcap=given)
    assert options == Options(softcap=expected)
    assert type(options.softcap) is type(expected)


#: The largest scale: float32 holds it times log2(e).
LARGEST = float(np.finfo(np.float32).max) / math.log2(math.e)


@pytest.mark.parametrize("cap", [float(np.finfo(np.float32).tiny), 1e-30, 1.0, 1000.0])
@pytest.mark.parametrize("scale", [None, 0, -1e-30])
def test_any_cap_up_to_1000_is_kept(cap: float, scale: float | None) -> None:
    assert check_options(scale, softcap=cap).softcap == cap


@pytest.mark.parametrize("sign", [1, -1])
def test_a_cap_may_be_small_beside_the_scale(sign: int) -> None:
    fine, cap = sign * LARGEST / 2 * 0.5, 0.5
    assert check_options(fine, softcap=cap).softmax_scale == fine
    with pytest.raises(ValueError, match=r"softmax_scale / softcap must be at most 1\.179e\+38$"):
        check_options(fine * (1 + 2**-52), softcap=cap)


@pytest.mark.parametrize(
    ("causal", "window_size", "left", "right"),
    [
        (False, (None, None), None, None),
        (False, (-1, -1), None, None),
        (False, (None, -1), None, None),
        (False, (0, 0), 0, 0),
        (False, (128, 0), 128, 0),
        (False, [64, 32], 64, 32),
        (False, (np.int64(7), np.uint8(255)), 7, 255),
        (False, (np.int8(-1), np.int16(-1)), None, None),
        (False, (2**70, 5), 2**70, 5),  # a problem drops what hides nothing
        (True, (None, None), None, 0),
        (True, (-1, -1), None, 0),
        (True, (128, None), 128, 0),
        (True, (128, 128), 128, 0),
        (True, (None, 3), None, 0),
        (np.True_, (np.int32(1), 0), 1, 0),
    ],
)
def test_windows_have_one_form(causal: Any, window_size: Any, left: int | None, right: int | None) -> None:
    options = check_options(causal=causal, window_size=window_size)
    assert options == Options(left=left, right=right)
    assert [type(side) for side in options[1:3]] == [type(left), type(right)]


def test_equal_options_are_equal_keys() -> None:
    one = check_options(np.float64(2), True, (np.int64(3), None), 5)
    two = check_options(2.0, False, [3, 0], 5.0)
    assert one == two
    assert hash(one) == hash(two)


def test_options_are_off_by_default() -> None:
    assert check_options() == Options() == Options(None, None, None, None, "BSHD")


# --- Windows ---


def visible(left: int | None, right: int | None, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Which keys each row sees."""
    distance = np.arange(seqlen_k)[None, :] - np.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    seen = np.ones_like(distance, np.bool_)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def windowed(seqlen_q: int, seqlen_k: int, **options: Any) -> Problem:
    k = operand("k", (1, seqlen_k, 1, 8))
    return pose(operand("q", (1, seqlen_q, 1, 8)), k, dataclasses.replace(k, name="v"), **options)


@pytest.mark.parametrize("seqlen_k", [0, 1, 2, 5])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 7])
def test_a_side_that_hides_nothing_is_dropped(seqlen_q: int, seqlen_k: int) -> None:
    """And no other one. A causal mask stays, so that its kernel does not depend on the length."""
    for left in (None, *range(9)):
        for right in (None, *range(9)):
            problem = windowed(seqlen_q, seqlen_k, window_size=(left, right))
            expected = visible(left, right, seqlen_q, seqlen_k)
            np.testing.assert_array_equal(visible(problem.left, problem.right, seqlen_q, seqlen_k), expected)
            assert problem.left in (left, None)
            assert problem.right in (right, None)
            if problem.left is not None:
                assert not visible(problem.left, None, seqlen_q, seqlen_k).all()
            if problem.right is not None and problem.right > 0:
                assert problem.right < seqlen_q - 1  # the first row would miss a key
            if right == 0:
                assert problem.right == 0
            assert problem.causal == (problem.right is not None)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "window_size", "left", "right"),
    [
        (300, 500, (498, 298), 498, 298),
        (300, 500, (499, 299), None, None),
        (300, 500, (2**70, 2**70), None, None),
        (300, 200, (198, 298), 198, 298),
        (300, 200, (199, 299), None, None),
        (1, 500, (0, 0), 0, 0),
        (1, 500, (498, 1), 498, None),
        (2, 500, (None, 1), None, None),
        (500, 1, (0, 3), None, 3),
    ],
)
def test_sides_of_a_problem(
    seqlen_q: int, seqlen_k: int, window_size: tuple[int, int], left: int | None, right: int | None
) -> None:
    problem = windowed(seqlen_q, seqlen_k, window_size=window_size)
    assert (problem.left, problem.right) == (left, right)


@pytest.mark.parametrize(
    "same",
    [
        [{}, {"window_size": (-1, -1)}, {"window_size": (499, None)}, {"window_size": [None, 299]}],
        [
            {"causal": True},
            {"window_size": (None, 0)},
            {"window_size": (1000, 0)},
            {"causal": True, "window_size": (-1, 7)},
        ],
        [
            {"causal": True, "window_size": (64, None)},
            {"window_size": (64, 0)},
            {"causal": True, "window_size": (64, 64)},
        ],
        [{"window_size": (64, None)}, {"window_size": (np.int16(64), -1)}, {"window_size": (64, 300)}],
    ],
    ids=["full", "causal", "causal window", "window"],
)
def test_equal_windows_are_equal_problems(same: list[dict[str, Any]]) -> None:
    problems = {windowed(300, 500, **options) for options in same}
    assert len(problems) == 1


def test_windows_caps_and_arrays_of_heads_make_another_problem() -> None:
    sink, slopes = operand("sink", (1,), F32), operand("alibi_slopes", (1,), F32)
    different: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"window_size": (64, None)},
        {"window_size": (65, None)},
        {"window_size": (None, 64)},
        {"window_size": (64, 64)},
        {"softcap": 1.0},
        {"softcap": 2.0},
        {"sink": sink},
        {"alibi_slopes": slopes},
        {"sink": sink, "alibi_slopes": slopes},
    ]
    assert len({windowed(300, 500, **options) for options in different}) == len(different)


@pytest.mark.parametrize(("right", "fine"), [(1022, True), (1023, False)])
def test_a_right_side_that_an_int_cannot_count(right: int, fine: bool) -> None:
    seqlen_k = 2**31 - 1024 - 1022
    if fine:
        assert windowed(2000, seqlen_k, window_size=(None, right)).right == right
        return
    message = (
        rf"^attention: window_size has the right side {right} with seqlen_k {seqlen_k}; supported are together at most "
        rf"{2**31 - 1024}$"
    )
    with pytest.raises(cupyfa.UnsupportedError, match=message):
        windowed(2000, seqlen_k, window_size=(None, right))
    assert windowed(right, seqlen_k, window_size=(None, right)).right is None  # hides nothing


# --- Arrays with a number for each head ---


def test_slopes_repeat_along_the_batch() -> None:
    q, k = operand("q", (3, 5, 4, 8)), operand("k", (3, 7, 2, 8))
    arrays = {"q": q, "k": k, "v": dataclasses.replace(k, name="v")}
    shared = pose(**arrays, alibi_slopes=operand("alibi_slopes", (4,), F32))
    assert shared.alibi_slopes == operand("alibi_slopes", (3, 4), F32, strides=(0, 4))
    own = operand("alibi_slopes", (3, 4), F32)
    assert pose(**arrays, alibi_slopes=own).alibi_slopes == own
    assert pose(**arrays, sink=operand("sink", (4,), F32)).sink == operand("sink", (4,), F32)
    assert pose(**arrays).sink is pose(**arrays).alibi_slopes is None


def test_one_number_may_stand_for_all_heads() -> None:
    problem = pose(
        **good(),
        sink=operand("sink", (4,), F32, strides=(0,)),
        alibi_slopes=operand("alibi_slopes", (1, 4), F32, strides=(-6, 0)),  # an axis with one index
    )
    assert problem.sink is not None
    assert problem.sink.span == (0, 4)
    assert check_alignment(problem, Addresses(1024, 2048, 4096, 8192, 0, 20, 24)) == ()


def test_arrays_of_float32_may_run_backwards() -> None:
    sink = operand("sink", (4,), F32, strides=(-4,))
    slopes = operand("alibi_slopes", (1, 4), F32, strides=(-16, -4))
    lse = operand("lse", (1, 4, 4), F32, strides=(64, -16, -4))
    problem = pose(**good(sink=sink, alibi_slopes=slopes, lse=lse))
    assert (problem.sink, problem.alibi_slopes, problem.lse) == (sink, slopes, lse)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        # In elements, by batch, head, row and key of the scores (3, 4, 5, 7).
        ((5, 7), (0, 0, 7, 1)),
        ((1, 7), (0, 0, 0, 1)),
        ((5, 1), (0, 0, 1, 0)),
        ((1, 1), (0, 0, 0, 0)),
        ((4, 5, 7), (0, 35, 7, 1)),
        ((1, 5, 7), (0, 0, 7, 1)),
        ((4, 1, 1), (0, 1, 0, 0)),
        ((3, 4, 5, 7), (140, 35, 7, 1)),
        ((3, 1, 5, 7), (35, 0, 7, 1)),
        ((1, 4, 5, 7), (0, 35, 7, 1)),
        ((3, 1, 1, 7), (7, 0, 0, 1)),
        ((1, 1, 5, 7), (0, 0, 7, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_bias_repeats_along_what_it_lacks(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> None:
    q, k = operand("q", (3, 5, 4, 8)), operand("k", (3, 7, 2, 8))
    bias = operand("bias", shape, dtype)
    problem = pose(q, k, dataclasses.replace(k, name="v"), bias=bias)
    in_bytes = tuple(stride * dtype.itemsize for stride in strides)
    assert problem.bias == operand("bias", (3, 4, 5, 7), dtype, strides=in_bytes)
    assert problem.bias.span == bias.span
    in_bhsd = (operand(name, (3, *reversed(x.shape[1:3]), 8)) for name, x in (("q", q), ("k", k), ("v", k)))
    assert pose(*in_bhsd, bias=bias, layout="BHSD").bias == problem.bias


def test_a_bias_makes_another_problem() -> None:
    q, k = operand("q", (1, 5, 4, 8)), operand("k", (1, 8, 2, 8))
    v, bias = dataclasses.replace(k, name="v"), operand("bias", (5, 8), F32)
    different = [
        None,
        bias,
        operand("bias", (5, 8), F16),
        operand("bias", (1, 8), F32),
        dataclasses.replace(bias, strides=(48, 4)),
        dataclasses.replace(bias, aligned=False),
    ]
    assert len({pose(q, k, v, bias=bias) for bias in different}) == len(different)
    assert pose(q, k, v, bias=dataclasses.replace(bias, shape=(1, 5, 8), strides=(12, 32, 4))) == pose(
        q, k, v, bias=bias
    )


def test_a_bias_of_16_bits_begins_at_any_element() -> None:
    q, k = operand("q", (1, 5, 4, 8)), operand("k", (1, 8, 2, 8))
    v = dataclasses.replace(k, name="v")
    places = Addresses(1024, 2048, 4096, 8192, bias=16384 + 2)
    assert check_alignment(pose(q, k, v, bias=operand("bias", (5, 8), F16)), places) == ()
    with pytest.raises(
        ValueError, match=r"^attention: bias begins at address 0x4002; it must be a multiple of 4 bytes"
    ):
        check_alignment(pose(q, k, v, bias=operand("bias", (5, 8), F32)), places)


@pytest.mark.parametrize(
    ("strides", "access"),
    [
        ((160, 160, 32, 4), Bias.TILE),
        ((160, 160, 0, 4), Bias.ROW),
        ((160, 160, -32, 4), Bias.GATHER),
        ((160, -160, 32, 4), Bias.GATHER),
        ((-640, 160, 32, 4), Bias.GATHER),
        ((160, 160, 32, -4), Bias.GATHER),
        ((160, 160, 36, 4), Bias.GATHER),
        ((2**40 - 16, 160, 32, 4), Bias.TILE),
        ((2**40, 160, 32, 4), Bias.GATHER),
    ],
)
def test_a_bias_may_lie_anywhere(strides: tuple[int, ...], access: Bias) -> None:
    """TMA takes some strides; a thread can load from any."""
    q, k = operand("q", (2, 5, 4, 8)), operand("k", (2, 8, 2, 8))
    v, bias = dataclasses.replace(k, name="v"), operand("bias", (2, 4, 5, 8), F32, strides=strides)
    problem = pose(q, k, v, bias=bias)
    assert problem.bias == bias
    assert problem.bias_access is access


def test_a_bias_that_all_scores_share_has_one_element_of_memory() -> None:
    problem = pose(**good(), bias=operand("bias", (1, 1), F32))
    check_overlap(problem, Addresses(1024, 2048, 4096, 8192, bias=8192 - 4))
    for place in (8192, 8192 + 252):
        with pytest.raises(ValueError, match=r"^attention: out shares memory with bias"):
            check_overlap(problem, Addresses(1024, 2048, 4096, 8192, bias=place))


def test_slopes_of_the_layout_bhsd_are_by_head() -> None:
    q, k = operand("q", (2, 6, 5, 24)), operand("k", (2, 3, 7, 24))
    arrays = {"q": q, "k": k, "v": dataclasses.replace(k, name="v"), "layout": "BHSD"}
    assert pose(**arrays, alibi_slopes=operand("alibi_slopes", (2, 6), F32)).heads_q == 6
    with pytest.raises(ValueError, match=r"^attention: alibi_slopes has shape \(2, 5\); .* \(6,\) or \(2, 6\)$"):
        pose(**arrays, alibi_slopes=operand("alibi_slopes", (2, 5), F32))


def test_sink_between_the_rows_of_lse() -> None:
    """Their elements alternate and share no byte; one of them further they do."""
    lse = operand("lse", (1, 4, 4), F32, strides=(128, 32, 8))
    sink = operand("sink", (4,), F32, strides=(8,))
    slopes = operand("alibi_slopes", (4,), F32, strides=(32,))
    problem = pose(**good(lse=lse, sink=sink, alibi_slopes=slopes))
    check_overlap(problem, Addresses(1024, 2048, 4096, 8192, 16384, 16384 + 4, 16384 + 12))
    for name in ("sink", "alibi_slopes"):
        places = Addresses(1024, 2048, 4096, 8192, 16384, 16384 + 4, 16384 + 12)._replace(**{name: 16384 + 8})
        with pytest.raises(ValueError, match=rf"^attention: lse shares memory with {name}; it must be an array of its"):
            check_overlap(problem, places)


def test_arrays_that_were_not_passed_are_nowhere() -> None:
    problem = pose(**good())
    check_overlap(problem, Addresses(1024, 2048, 4096, 8192))
    with pytest.raises(ValueError, match="out shares memory with v"):
        check_overlap(problem, Addresses(1024, 2048, 4096, 4096))


def test_matrices_at_any_address() -> None:
    """A copy helps those; an array of float32 has to be where its numbers are."""
    problem, aligned = pose(**good()), Addresses(1024, 2048, 4096, 8192, 20, 24, 28, 0, 32, 36, 40, 44)
    assert check_alignment(problem, aligned) == ()
    assert check_alignment(problem, aligned._replace(k=2048 + 2, out=8192 + 8)) == ("k", "out")
    for name in ("lse", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        with pytest.raises(ValueError, match=rf"^attention: {name} begins at address 0x402; .* a multiple of 4 bytes"):
            check_alignment(problem, aligned._replace(**{name: 1026}))


def test_a_workspace_of_its_own() -> None:
    problem = pose(**good(sink=operand("sink", (4,), F32)), want_lse=True)
    places = Addresses(1024, 2048, 4096, 8192, 16384, 32768)
    check_workspace(problem, places, 2**20, 2**20, (2**19, 4096))
    for name, address in places._asdict().items():
        if address:
            with pytest.raises(ValueError, match=f"^attention: workspace shares memory with {name}; it must be an arr"):
                check_workspace(problem, places, address - 15, 16, (0, 0))
    check_workspace(problem, places, 1024 - 16, 16, (0, 0))
    check_workspace(problem, places, 2**20 + 4096, 2**20, (2**20, 4096))
    with pytest.raises(ValueError, match=r"^attention: workspace shares memory with plan;"):
        check_workspace(problem, places, 2**20 + 4095, 2**20, (2**20, 4096))


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.125, 1e38, 2.35e38])
def test_any_scale_that_float32_holds_is_kept(scale: float) -> None:
    assert pose(**good(), softmax_scale=scale).softmax_scale == scale


def test_default_scale() -> None:
    assert pose(**good()).softmax_scale == 1 / math.sqrt(16)


def test_type_names() -> None:
    assert [type_name(t) for t in (list, np.ndarray, np.float16)] == ["list", "numpy.ndarray", "numpy.float16"]


# --- What is fine ---


def test_sizes_and_dtypes() -> None:
    for dtype, expected in ((F16, DType.FLOAT16), (BF16, DType.BFLOAT16)):
        problem = pose(
            operand("q", (3, 5, 6, 24), dtype), operand("k", (3, 7, 2, 24), dtype), operand("v", (3, 7, 2, 24), dtype)
        )
        assert problem.dtype is expected
        sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_kv, problem.head_dim)
        assert sizes == (3, 5, 7, 6, 2, 24)
        assert problem.out == operand("out", (3, 5, 6, 24), dtype)
        assert problem.lse is None


def test_lse_is_planned_when_wanted() -> None:
    assert pose(**good(), want_lse=True).lse == operand("lse", (1, 4, 4), F32)


def test_bhsd_is_a_view() -> None:
    q, k = operand("q", (2, 6, 5, 24)), operand("k", (2, 3, 7, 24))
    problem = pose(q, k, dataclasses.replace(k, name="v"), layout="BHSD")
    assert problem.q.shape == (2, 5, 6, 24)
    assert problem.q.strides == (6 * 5 * 48, 48, 5 * 48, 2)
    assert (problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_kv) == (5, 7, 6, 3)
    assert problem.out.strides == problem.q.strides  # allocated in the caller's layout


def test_equal_geometry_is_an_equal_problem() -> None:
    assert pose(**good()) == pose(**good())
    assert hash(pose(**good())) == hash(pose(**good()))
    assert pose(**good()) != pose(**good(), softmax_scale=0.5)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_interleaved_slices_of_one_buffer(layout: str) -> None:
    # One buffer (batch, seqlen, q k v out, heads, head_dim): the four arrays interleave and share no byte.
    buffer = zeros(np, (2, 5, 4, 3, 16))
    arrays = {name: as_bshd(buffer[:, :, i], layout) for i, name in enumerate(("q", "k", "v", "out"))}
    assert as_if_on_gpu(**arrays, layout=layout).q.strides == (5 * 4 * 96, 4 * 96, 32, 2)
    one_row_up = np.lib.stride_tricks.as_strided(buffer[:, :, 2], shape=(2, 4, 3, 16), strides=buffer[:, :, 2].strides)
    with pytest.raises(ValueError, match="out shares memory with v"):
        as_if_on_gpu(q=buffer[:, :4, 0], k=buffer[:, :, 1], v=buffer[:, :, 2], out=one_row_up)


def test_outputs_that_touch_the_end_of_an_input() -> None:
    buffer = zeros(np, (3 * 256,))
    q, out, rest = (buffer[i * 256 : (i + 1) * 256].reshape(Q) for i in range(3))
    k = zeros(np, KV)
    lse = rest.view(np.float32).reshape(-1)[:16].reshape(1, 4, 4)
    assert as_if_on_gpu(q=q, k=k, v=k, out=out, lse=lse).lse is not None


def test_inputs_may_be_the_same_array() -> None:
    x = zeros(np, Q)
    assert as_if_on_gpu(q=x, k=x, v=x).heads_kv == 4


@pytest.mark.parametrize("stride", [0, 2, 6, -32, 2**50])
def test_stride_of_an_axis_with_one_index_is_free(stride: int) -> None:
    shape = (1, 1, 1, 16)
    odd = [operand(name, shape, strides=(stride, stride, stride, 2)) for name in ("q", "k", "v", "out")]
    problem = pose(*odd)
    assert problem.q.span == (0, 32)
    check_overlap(problem, Addresses(1024, 2048, 4096, 8192))


def test_broadcast_keys_and_values() -> None:
    k = operand("k", (4, 6, 2, 16), strides=(0, 64, 32, 2))
    v = operand("v", (4, 6, 2, 16), strides=(0, 32, 0, 2))
    problem = pose(operand("q", (4, 4, 4, 16)), k, v)
    assert (problem.k.strides, problem.v.span) == ((0, 64, 32, 2), (0, 5 * 32 + 32))
    check_overlap(problem, Addresses(1024, 16384, 32768, 65536))


@pytest.mark.parametrize(
    ("q", "k"), [((0, 4, 4, 16), (0, 6, 2, 16)), ((2, 0, 4, 16), (2, 6, 2, 16)), ((2, 4, 4, 16), (2, 0, 2, 16))]
)
def test_empty_problems(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    problem = as_if_on_gpu(**qkv(np, q, k))
    assert problem.is_empty
    assert not pose(**good()).is_empty


def test_heads_may_be_zero_on_both_sides() -> None:
    assert as_if_on_gpu(**qkv(np, (1, 4, 0, 16), (1, 6, 0, 16))).is_empty


def test_an_output_of_every_other_head_of_an_odd_number() -> None:
    # The heads end where the next row begins: shorter strides do not reach it, whatever their product with the size is.
    out = operand("out", Q, strides=(4 * 7 * 32, 7 * 32, 2 * 32, 2))
    assert pose(operand("q", Q), operand("k", KV), operand("v", KV), out).out.strides == out.strides
    overlapping = dataclasses.replace(out, strides=(4 * 6 * 32, 6 * 32, 2 * 32, 2))  # head 6 is head 0 of the next row
    with pytest.raises(ValueError, match=r"^attention: out has strides .* must not overlap each other"):
        pose(operand("q", Q), operand("k", KV), operand("v", KV), overlapping)


def test_overlap_is_exact_for_strided_outputs() -> None:
    # Rows of q and out alternate; one element further they meet.
    q = operand("q", (1, 4, 1, 16), strides=(256, 64, 32, 2))
    problem = pose(q, operand("k", (1, 6, 1, 16)), operand("v", (1, 6, 1, 16)), dataclasses.replace(q, name="out"))
    check_overlap(problem, Addresses(4096, 65536, 65536, 4096 + 32))
    for shift in (-30, 30, 64, 64 + 30, 3 * 64):
        with pytest.raises(ValueError, match=r"^attention: out shares memory with q; it must be an array of its own"):
            check_overlap(problem, Addresses(4096, 65536, 65536, 4096 + shift))
    check_overlap(problem, Addresses(4096, 65536, 65536, 4096 + 256))


def test_overlap_of_numpy_views_with_negative_strides() -> None:
    x, k = zeros(np, (1, 64, 4, 16)), zeros(np, KV)
    reversed_rows = x[:, ::-1]
    with pytest.raises(ValueError, match="out shares memory with q"):
        cupyfa.attention(reversed_rows, k, k, out=reversed_rows)
    with pytest.raises(ValueError, match="out shares memory with q"):
        cupyfa.attention(reversed_rows, k, k, out=x)
    out = zeros(np, x.shape)[:, ::-1]
    assert cupyfa.attention(reversed_rows, k, k, out=out) is out
