"""Gradients beside a bias under the emulator: all ways of reading it, sums over all axes, arrays of any place."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator.test_backward import Call, check, of
from nvrtc_tools import import_nvrtc
from odd_views import ODD_VIEWS, OddView, written
from sampling import sample

import cupyfa
from cupyfa import attention_backward
from cupyfa.emulator import POLICIES
from cupyfa.oracles import backward
from cupyfa.spec import Bias
from cupyfa.testing import BackwardCase, assert_close, random_array


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


#: Rows of the table of candidates that take a bias, each way of reading one, and more steps than slots.
SCHEDULED = [
    of(1, 300, 200, 2, 1, 64, "float16", True, bias="hqk"),
    of(1, 200, 200, 2, 1, 64, "bfloat16", bias="qk", bias_dtype="same", softcap=5.0, deterministic=True),
    of(2, 150, 200, 2, 1, 128, "float16", True, bias="bqk", bias_dtype="same"),
    of(1, 150, 200, 2, 2, 128, "bfloat16", bias="hqk", window_size=(90, 20), alibi=True),
    of(1, 200, 200, 2, 1, 128, "float16", True, bias="qk", deterministic=True),
    of(1, 200, 150, 2, 1, 128, "bfloat16", bias="qk", bias_dtype="same", sink=True, deterministic=True),
    of(1, 150, 150, 2, 1, 128, "bfloat16", True, bias="hqk", softcap=5.0),
    of(1, 130, 150, 2, 1, 256, "float16", bias="hqk", deterministic=True, alibi=True, softcap=5.0, window_size=(90, 9)),
    of(1, 130, 150, 2, 2, 192, "bfloat16", True, bias="qk", bias_dtype="same", head_dim_v=128),
    of(2, 150, 200, 4, 2, 64, "float16", True, bias="k", softcap=5.0),
    of(2, 150, 200, 2, 1, 128, "bfloat16", bias="bhk", bias_dtype="same", alibi=True),
    of(2, 150, 200, 4, 2, 64, "float16", True, bias="q", sink=True, dlse=True),
    of(1, 130, 150, 2, 1, 256, "bfloat16", bias="bhq", bias_dtype="same", sink=True, deterministic=True),
    of(2, 150, 200, 2, 1, 128, "float16", bias="h", sink=True, dlse=True),
]


@pytest.mark.parametrize("policy", sample([*POLICIES], 2))
def test_every_schedule(policy: str) -> None:
    for seed, case in enumerate(SCHEDULED):
        check(case, sms=1 if seed % 2 else None, policy=policy, seed=seed, resident=1 + seed % 4)


def test_the_table_has_every_kernel() -> None:
    selections = [Call(case).prepared.selection for case in SCHEDULED]
    specs = [x.spec for x in selections]
    assert {(x.bias, x.bias_float32) for x in specs} == {
        *itertools.product((Bias.TILE, Bias.ROW, Bias.COLUMN), (False, True))
    }
    for kind in (Bias.TILE, Bias.ROW, Bias.COLUMN):
        assert {x.tile_n for x in specs if x.bias is kind} >= {128}
    of_tiles = [x for x in specs if x.bias is Bias.TILE]
    for field in ("causal", "window", "softcap", "alibi", "deterministic", "dtype"):
        assert len({getattr(x, field) for x in of_tiles}) == 2, field
    assert {(x.head_dim, x.tile_n) for x in of_tiles} == {(64, 128), (128, 128), (128, 64), (192, 64), (256, 64)}


def test_the_gradient_is_the_last_kernel() -> None:
    stages = Call(of(1, 70, 80, 2, 1, 64, bias="k", sink=True), sms=1).prepared.stages
    assert [stage.spec.entry for stage in stages] == [
        "bwd_preprocess.cu",
        "hopper/bwd.cu",
        "bwd_postprocess.cu",
        "bwd_sink.cu",
        "hopper/bwd_bias.cu",
    ]
    assert [stage.geometry.programmatic for stage in stages] == [False, *[True] * 4]


@pytest.mark.parametrize(
    "axes", ["bhqk", "hqk", "bqk", "qk", "bhk", "bk", "hk", "k", "bhq", "bq", "hq", "q", "bh", "b", "h"]
)
def test_sums_over_all_axes(axes: str) -> None:
    """Of more tiles than one along each of them, and of heads that share a key head."""
    check(of(2, 130, 140, 4, 2, 64, "float16", True, bias=axes, sink=True), policy="fine", resident=2)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 200), (2, 200, 1), (1, 65, 129), (3, 64, 128)], ids=str)
def test_few_queries_and_keys(sizes: tuple[int, ...]) -> None:
    check(of(*sizes, 2, 1, 64, "bfloat16", bias="bhqk"))


def test_tiles_that_nobody_sees_have_a_gradient_of_0() -> None:
    call = check(of(1, 300, 300, 1, 1, 64, "float16", bias="qk", window_size=(20, 0)))
    rows, keys = np.ogrid[:300, :300]
    assert not call.guarded["dbias"].array[(keys > rows) | (keys < rows - 20)].any()
    call = check(of(1, 300, 60, 1, 1, 64, "float16", True, bias="qk"))  # rows without keys
    assert not call.guarded["dbias"].array[:240].any()


# --- Bits that repeat ---

ORDERED = [
    of(1, 200, 500, 2, 1, 64, "float16", bias="qk"),
    of(2, 130, 300, 2, 1, 128, "bfloat16", True, bias="k"),
    of(2, 130, 130, 2, 2, 256, "float16", bias="hq", bias_dtype="same", sink=True),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", ORDERED, ids=lambda case: case.id)
def test_c58_bits_of_a_sum_do_not_depend_on_the_schedule(case: BackwardCase, deterministic: bool) -> None:
    """Those of the gradient of the bias never do."""
    found: dict[str, set[bytes]] = {name: set() for name in ("dq", "dk", "dv", "dbias")}
    for policy, resident in itertools.product(("random", "fine"), (1, 4)):
        call = check(
            BackwardCase(case.forward, deterministic=deterministic), policy=policy, seed=resident, resident=resident
        )
        for name, bits in found.items():
            bits.add(call.guarded[name].array.tobytes())
    fixed = {"dk", "dv", "dbias"} | ({"dq"} if deterministic else set())
    assert {name for name, bits in found.items() if len(bits) == 1} >= fixed


# --- Arrays of any place ---

VIEWED = of(1, 65, 70, 2, 1, 64, "float16", True, bias="hqk", deterministic=True)


def run_with(case: BackwardCase = VIEWED, **changes: Any) -> cupyfa.Gradients:
    """Of the case with views in place of its arrays; their values are the same."""
    return attention_backward(**(case.make_arrays() | case.call_options | changes), backend="emulator")


def assert_same_bits(got: cupyfa.Gradients, expected: cupyfa.Gradients) -> None:
    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(np.ravel(x).view(np.uint8), np.ravel(y).view(np.uint8))


VIEWED_16 = of(1, 65, 70, 2, 1, 64, "float16", True, bias="bhqk", bias_dtype="same", deterministic=True)


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_c42_c43_c45_a_bias_anywhere_gives_what_a_contiguous_one_gives(odd: OddView) -> None:
    bias = VIEWED_16.call_options["bias"]
    assert_same_bits(run_with(VIEWED_16, bias=odd.holding(np, bias)), run_with(VIEWED_16))


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_c42_c45_a_gradient_is_written_anywhere_and_nothing_beside_it(odd: OddView) -> None:
    buffer, view = odd.poisoned(np, (1, 2, 65, 70), np.float16)
    got = run_with(VIEWED_16, dbias=view)
    assert got.dbias is view
    np.testing.assert_array_equal(view, run_with(VIEWED_16).dbias)
    assert written(buffer) == view.size


def test_a_bias_of_float32_anywhere() -> None:
    bias, expected = VIEWED.call_options["bias"], run_with()
    wide = np.full((2, 65, 72), np.nan, np.float32)
    views = [
        wide[..., :70],
        wide[..., 1:71],
        np.full((2, 65, 140), np.nan, np.float32)[..., ::-2],
        np.asfortranarray(bias),
    ]
    for view in views:
        view[...] = bias
        assert_same_bits(run_with(bias=view), expected)


@pytest.mark.parametrize("shape", [(1, 1, 65, 70), (1, 2, 1, 70), (1, 2, 65, 1), (1, 1, 1, 70), (1, 1, 1, 1)], ids=str)
def test_a_view_that_repeats_has_one_gradient_for_all(shape: tuple[int, ...]) -> None:
    bias = random_array(shape, np.float32, 3)
    view = np.broadcast_to(bias, (1, 2, 65, 70))
    got = run_with(bias=view)
    assert got.dbias.shape == shape
    assert_same_bits(got, run_with(bias=bias))


# --- What users reported ---


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("of_type", ["float32", "same"])
def test_c11_gradients_of_rows_of_the_most_negative_number_and_of_infinity(dtype: Any, of_type: str) -> None:
    """Of the first, whose probabilities have no digits left, finite ones; of the second, exactly 0."""
    arrays = [random_array((1, 70, 1, 64), dtype, n) for n in range(4)]
    bias = np.zeros((70, 70), np.float32 if of_type == "float32" else dtype)
    bias[3], bias[:, 7] = ml_dtypes.finfo(bias.dtype).min, ml_dtypes.finfo(bias.dtype).min
    bias[5] = -np.inf
    q, k, v, dout = arrays
    (out, lse), pullback = cupyfa.attention_vjp(q, k, v, bias=bias, return_lse=True)
    got = attention_backward(dout, q, k, v, out, lse, bias=bias, backend="emulator")
    for x, y in zip(got[:3], pullback(dout)[:3], strict=True):
        assert np.isfinite(x.astype(np.float32)).all()
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), atol=0.05, rtol=0.02)
    assert not got.dq[:, 5].any()
    assert not got.dbias[5].any()
    others = np.delete(np.arange(70), [3])
    assert not got.dbias[others, 7].any()


def test_c29_gradients_of_a_float32_bias_beside_bfloat16() -> None:
    q, k, v, dout = (random_array((2, 128, 4, 32), ml_dtypes.bfloat16, n) for n in range(4))
    bias = random_array((1, 4, 128, 128), np.float32, 4)
    (out, lse), _ = cupyfa.attention_vjp(q, k, v, bias=bias, return_lse=True)
    got = attention_backward(dout, q, k, v, out, lse, bias=bias, backend="emulator")
    exact = backward.attention_backward(dout, q, k, v, out, lse, bias=bias)
    plain = backward.same_precision(dout, q, k, v, out, lse, bias=bias)
    assert got.dbias.dtype == np.float32
    for name, x, reference, yardstick in zip(got._fields, got, exact, plain, strict=True):
        if reference is not None:
            # What a bias gets was rounded to nothing less than float32, so that the order of additions shows.
            floor = 2.0**-19 * np.abs(reference).max() if name == "dbias" else 0.0
            assert_close(x, reference, yardstick, floor=floor, what=name)


@pytest.mark.parametrize("kind", ["float32", "same"])
def test_c44_rows_that_are_no_multiple_of_16_bytes(kind: str) -> None:
    check(of(2, 43, 43, 2, 1, 64, "float16", bias="bhqk", bias_dtype=kind))
