"""The online recurrence against the dense reference, under the project's tolerance."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hard_scores import KINDS, harden

from cupyfa.oracles import dense, online
from cupyfa.oracles.exp2.polynomial import exp2_polynomial
from cupyfa.oracles.float32 import fma_rn
from cupyfa.oracles.logits import NaturalLogits
from cupyfa.oracles.softmax import OnlineSoftmax, SpeculativeSoftmax
from cupyfa.testing import (
    CASES,
    Case,
    as_bshd,
    assert_close,
    assert_lse_close,
    guarded_empty,
    random_array,
    score_magnitude,
)

DTYPES = [np.float16, ml_dtypes.bfloat16]


def check(q, k, v, *, context=None, tile_m=128, tile_n=128, **options):
    """Run the recurrence, exact and speculative, into guarded results and compare them with the dense oracles."""
    reference, reference_lse = dense.attention(q, k, v, **options)
    yardstick, _ = dense.same_precision(q, k, v, **options)
    magnitude = score_magnitude(q, k, options.get("softmax_scale"), options.get("softcap"))
    tiles = {"tile_m": tile_m, "tile_n": tile_n}
    results = []
    for speculative in (False, True)[: 1 + (q.dtype in DTYPES)]:
        out = guarded_empty(reference.shape, q.dtype)
        lse = guarded_empty(reference_lse.shape, np.float32)
        got = online.attention(q, k, v, out=out.array, lse=lse.array, speculative=speculative, **tiles, **options)
        assert got[0] is out.array
        assert got[1] is lse.array
        out.check("out")
        lse.check("lse")
        assert_close(out.array, reference, yardstick, context=(context, speculative))
        assert_lse_close(lse.array, reference_lse, score_magnitude=magnitude, context=(context, speculative))
        results.append((out.array, lse.array))
    return results[0]


def inputs(shape_q, shape_k, dtype, seed=0, amplitude=1.0):
    q, k = (random_array(s, dtype, seed + n, amplitude=amplitude) for n, s in enumerate((shape_q, shape_k)))
    return q, k, random_array(shape_k, dtype, seed + 2)


def sample():
    """Every third case and the first of each group, without large ones: the whole table is there for kernels.

    Cases with options are small: all of them.
    """
    for n, case in enumerate(CASES):
        first = n == 0 or case.group != CASES[n - 1].group
        if (
            first
            or len(case.options) > 2
            or (n % 3 == 0 and case.batch * case.heads_q * case.seqlen_q * case.seqlen_k < 10_000_000)
        ):
            yield case


SAMPLE = list(sample())


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.id)
def test_case_table(case: Case):
    q, k, v = (as_bshd(x, case.layout) for x in case.make_inputs())
    check(q, k, v, context=case, **case.options)


def test_sample_has_every_group():
    assert {case.group for case in SAMPLE} == {case.group for case in CASES}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("tile_m", "tile_n"), [(1, 1), (16, 8), (64, 176), (128, 80), (192, 128), (1000, 1000), (7, 13)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tile_sizes(dtype, tile_m, tile_n, causal):
    q, k, v = inputs((2, 61, 4, 32), (2, 97, 2, 32), dtype)
    check(q, k, v, causal=causal, tile_m=tile_m, tile_n=tile_n)


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -0.125, 1e-30, 3.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales(dtype, causal, scale):
    q, k, v = inputs((1, 40, 2, 16), (1, 33, 1, 16), dtype)
    out, lse = check(q, k, v, softmax_scale=scale, causal=causal, tile_m=16, tile_n=16)
    if scale == 0:
        seen = (np.arange(40) - 6).clip(0) if causal else np.full(40, 33)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[0, 1], np.log(seen), rtol=1e-6, atol=1e-37)
        assert (out[0, :7] == 0).all() == causal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (300, 1), (130, 0), (64, 32), (200, 72)])
def test_rows_without_keys(seqlen_q, seqlen_k, dtype):
    q, k, v = inputs((2, seqlen_q, 2, 16), (2, seqlen_k, 1, 16), dtype)
    out, lse = check(q, k, v, causal=True, tile_m=16, tile_n=16)
    blind = seqlen_q - seqlen_k
    assert (out[:, :blind] == 0).all()
    assert np.isneginf(lse[:, :, :blind]).all()
    assert np.isfinite(lse[:, :, blind:]).all()


@pytest.mark.parametrize("speculative", [False, True])
def test_rows_without_keys_are_0_whatever_v_is(speculative):
    q, k, v = inputs((1, 40, 2, 16), (1, 21, 1, 16), np.float16)
    v[...] = np.nan
    out, _ = online.attention(q, k, v, causal=True, tile_m=16, tile_n=16, speculative=speculative)
    assert (out[:, :19] == 0).all()
    assert np.isnan(out[:, 19:]).all()


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (1, 3, 0, 8)])
def test_empty_results(shape):
    x = np.zeros(shape, np.float16)
    out, lse = online.attention(x, x, x)
    assert out.shape == shape
    assert lse.shape == (shape[0], shape[2], shape[1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores(dtype, causal):
    q, k, v = inputs((1, 70, 2, 32), (1, 90, 2, 32), dtype, amplitude=60.0)
    _, lse = check(q, k, v, causal=causal, tile_m=32, tile_n=16)
    assert np.abs(lse[np.isfinite(lse)]).max() > 5e3


def test_maximum_may_stay_far_below_zero():
    # A maximum that starts at 0 instead of -inf would underflow every weight.
    q, k = np.full((1, 3, 1, 16), 4, np.float16), np.full((1, 40, 1, 16), -40, np.float16)
    v = random_array((1, 40, 1, 16), np.float16, 3)
    _, lse = check(q, k, v, causal=True, tile_m=2, tile_n=8)
    assert lse.max() < -600


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True])
def test_special_values_reach_exactly_the_rows_that_see_them(where, special, causal):
    q, k, v = inputs((1, 40, 2, 16), (1, 40, 2, 16), ml_dtypes.bfloat16)
    clean, clean_lse = online.attention(q, k, v, causal=causal, tile_m=16, tile_n=8)
    {"q": q, "k": k, "v": v}[where][0, 21, 1, 5] = special
    out, lse = check(q, k, v, causal=causal, tile_m=16, tile_n=8)  # compares the NaN and Inf patterns
    rows = np.arange(40)
    touched = rows == 21 if where == "q" else (rows >= 21 if causal else rows >= 0)
    np.testing.assert_array_equal(out[0, :, 0], clean[0, :, 0])
    np.testing.assert_array_equal(out[0, ~touched, 1], clean[0, ~touched, 1])
    np.testing.assert_array_equal(lse[0, 1, ~touched], clean_lse[0, 1, ~touched])
    # An infinite q or k leaves a row finite where all of its scores are -inf, or where the infinite key has weight 0.
    changed = (out[0, :, 1].astype(np.float32) != clean[0, :, 1].astype(np.float32)).any(axis=1)
    assert changed[touched].mean() > 0.4


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_into_any_strides(dtype):
    q, k, v = inputs((2, 37, 4, 16), (2, 50, 2, 16), dtype)
    expected, expected_lse = online.attention(q, k, v)
    for make in (
        lambda shape, kind: np.full(shape[::-1], 7, kind).transpose(range(len(shape))[::-1]),
        lambda shape, kind: np.full([2 * n for n in shape], 7, kind)[tuple(slice(None, None, 2) for _ in shape)],
    ):
        out, lse = make(expected.shape, dtype), make(expected_lse.shape, np.float32)
        got, got_lse = online.attention(q, k, v, out=out, lse=lse)
        assert got is out
        assert got_lse is lse
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)
        if out.base.size > 2 * out.size:
            assert (out.base[1::2] == 7).all()  # nothing beside the view was touched


def test_reads_any_strides():
    q, k, v = inputs((2, 37, 4, 16), (2, 50, 2, 16), np.float16)
    expected, expected_lse = online.attention(q, k, v)
    turned = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v)]
    assert not turned[0].flags.c_contiguous
    out, lse = online.attention(*turned)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("bad", ["shape", "dtype", "lse"])
def test_wrong_results_are_refused(bad):
    x = np.zeros((1, 4, 1, 8), np.float16)
    options = {
        "shape": {"out": np.empty((1, 4, 1, 16), np.float16)},
        "dtype": {"out": np.empty((1, 4, 1, 8), np.float32)},
        "lse": {"lse": np.empty((1, 1, 4), np.float64)},
    }[bad]
    with pytest.raises(ValueError, match=f"attention: {next(iter(options))} is .* it must be"):
        online.attention(x, x, x, **options)


def test_groups_of_heads_do_not_mix(monkeypatch):
    q, k, v = inputs((5, 9, 6, 8), (5, 20, 3, 8), np.float16)
    together = online.attention(q, k, v, causal=True, tile_m=4, tile_n=8)
    monkeypatch.setattr(online, "_STEP_BUDGET", 1)
    for b in range(5):
        for h in range(6):
            alone = online.attention(
                q[b : b + 1, :, h : h + 1], k[b : b + 1, :, h // 2 : h // 2 + 1], v[b : b + 1, :, h // 2 : h // 2 + 1],
                causal=True, tile_m=4, tile_n=8,
            )  # fmt: skip
            np.testing.assert_allclose(
                alone[0][0, :, 0].astype(np.float32), together[0][b, :, h].astype(np.float32), rtol=2e-3, atol=1e-6
            )
            np.testing.assert_allclose(alone[1][0, 0], together[1][b, h], rtol=1e-6, atol=1e-6)


# --- Windows, softcap, sink, slopes, bias ---


def all_options(heads, sink=2.0):
    """Every option at once, but for a bias."""
    slopes = np.exp2(-np.arange(1, heads + 1)).astype(np.float32)
    return {
        "window_size": (21, 9),
        "softcap": 3.0,
        "sink": np.full(heads, sink, np.float32),
        "alibi_slopes": slopes,
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("tile_m", "tile_n"), [(1, 1), (16, 8), (64, 176), (128, 80), (192, 128), (1000, 1000), (7, 13)]
)
@pytest.mark.parametrize("lengths", [(61, 97), (97, 61), (61, 61)])
@pytest.mark.parametrize("options", [*all_options(4), "all"])
def test_options_in_all_tile_sizes(options, lengths, tile_m, tile_n, causal):
    q, k, v = inputs((2, lengths[0], 4, 32), (2, lengths[1], 2, 32), np.float16)
    every = all_options(4)
    check(
        q, k, v, causal=causal, tile_m=tile_m, tile_n=tile_n, **every if options == "all" else {options: every[options]}
    )


def biased(heads, seqlen_q, seqlen_k, dtype=np.float32):
    """Some hidden keys, a row that sees none, and one whose keys are all as far down as can be."""
    bias = random_array((1, heads, seqlen_q, seqlen_k), dtype, 9, amplitude=3.0)
    bias[bias > 6] = -np.inf
    bias[..., 3, :], bias[..., 5, :] = -np.inf, np.finfo(np.float32).min if dtype == np.float32 else -np.inf
    return bias


@pytest.mark.parametrize(
    ("tile_m", "tile_n"), [(1, 1), (16, 8), (64, 176), (128, 80), (192, 128), (1000, 1000), (7, 13)]
)
@pytest.mark.parametrize("lengths", [(61, 97), (97, 61)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_bias_in_all_tile_sizes(dtype, lengths, tile_m, tile_n):
    q, k, v = inputs((2, lengths[0], 4, 32), (2, lengths[1], 2, 32), np.float16)
    bias = biased(4, *lengths, dtype)
    tiles = {"tile_m": tile_m, "tile_n": tile_n}
    check(q, k, v, bias=bias, **tiles)
    check(q, k, v, bias=bias, causal=True, **tiles)
    every = all_options(4)
    del every["sink"]  # beside which the lowest row would vanish
    check(q, k, v, bias=bias, **every, **tiles)
    check(q, k, v, bias=np.maximum(bias, -9), **all_options(4), **tiles)


def test_a_bias_makes_natural_logits():
    got = []

    class Spy(OnlineSoftmax):
        def update(self, scores):
            got.append((type(self.logits), scores.copy()))
            return super().update(scores)

    q, k = (random_array((1, n, 1, 16), np.float16, n, amplitude=3.0) for n in (20, 33))
    bias = random_array((20, 33), np.float32, 5)
    scores = -q[0, :, 0].astype(np.float32) @ k[0, :, 0].astype(np.float32).T
    expected = fma_rn(np.float32(0.3), scores, bias)
    distance = np.abs(np.arange(33) - (np.arange(20)[:, None] + 13)).astype(np.float32)
    for slopes in (None, np.float32([0.7])):
        got.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(online, "OnlineSoftmax", Spy)
            online.attention(q, k, k, softmax_scale=-0.3, alibi_slopes=slopes, bias=bias)
        if slopes is not None:
            expected = fma_rn(-slopes[0], distance, expected)
        ((kind, logits),) = got
        assert kind is NaturalLogits
        np.testing.assert_array_equal(logits[0], expected)


@pytest.mark.parametrize("make", [OnlineSoftmax, lambda *a: SpeculativeSoftmax(*a, ml_dtypes.bfloat16)])
@np.errstate(over="ignore", divide="ignore")
def test_natural_logits_of_any_size(make):
    """In whatever order the blocks come, of ordinary keys, of the lowest numbers, of none, of the largest ones."""
    low, high, none = np.float32(np.finfo(np.float32).min), np.float32(np.finfo(np.float32).max), np.float32(-np.inf)
    for values in itertools.permutations([np.float32(3), low, none, high, np.float32(-2e38)], 3):
        softmax = make((1,), None)
        O = np.zeros((1, 1), np.float32)
        for value in values:
            P, shrink = softmax.update(np.full((1, 7), value))
            O = O * shrink + P.sum()
        inverse, lse = softmax.finish()
        top = max(values)
        assert (O * inverse).item() == pytest.approx(1.0, rel=1e-6)
        assert lse.item() == pytest.approx(float(top) + math.log(7), rel=1e-6)
    softmax = make((1,), None)
    softmax.update(np.full((1, 7), none))
    inverse, lse = softmax.finish()
    assert (inverse.item(), lse.item()) == (0.0, -math.inf)
    inverse, lse = softmax.finish(np.float32([[2.5]]))
    assert (inverse.item(), lse.item()) == (0.0, 2.5)


@pytest.mark.parametrize("threshold", [0, 4, 8])
def test_natural_logits_are_scaled_ones(threshold):
    random = np.random.default_rng(11)
    natural, scaled = OnlineSoftmax((32,), None, threshold), OnlineSoftmax((32,), math.log2(math.e), threshold)
    for spread in (1, 3, 10, 30, 1):
        scores = random.normal(0, spread, (32, 40)).astype(np.float32)
        for a, b in zip(natural.update(scores), scaled.update(scores), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-30)
    for sink in (None, np.float32([[3.0]])):
        for a, b in zip(natural.finish(sink), scaled.finish(sink), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6)


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_options_that_change_nothing(causal, speculative):
    q, k, v = inputs((2, 50, 4, 16), (2, 50, 2, 16), np.float16)
    tiles = {"tile_m": 16, "tile_n": 8, "speculative": speculative}
    plain = online.attention(q, k, v, causal=causal, **tiles)
    for options in (
        {"window_size": (50, 50)},
        {"window_size": (49, 49)},
        {"window_size": (-1, None)},
        {"sink": np.full(4, -np.inf, np.float32)},
    ):
        for a, b in zip(online.attention(q, k, v, causal=causal, **options, **tiles), plain, strict=True):
            np.testing.assert_array_equal(a, b)
    # Here the scale comes before the maximum and not in the exponent: equal but for rounding.
    out, lse = online.attention(q, k, v, causal=causal, alibi_slopes=np.zeros(4, np.float32), **tiles)
    np.testing.assert_allclose(out.astype(float), plain[0].astype(float), rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(lse, plain[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("speculative", [False, True])
def test_windows_that_are_causal(speculative):
    q, k, v = inputs((1, 50, 2, 16), (1, 50, 1, 16), np.float16)
    tiles = {"tile_m": 16, "tile_n": 8, "speculative": speculative}
    causal = online.attention(q, k, v, causal=True, **tiles)
    for window_size in [(None, 0), (50, 0), (49, 0)]:
        for a, b in zip(online.attention(q, k, v, window_size=window_size, **tiles), causal, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("window_size", "count"), [((6, 0), 7), ((0, 0), 1), ((0, 6), 7), ((16, 16), 33)])
def test_windows_count_their_own_key(window_size, count):
    q, k = (np.zeros((1, n, 1, 8), np.float16) for n in (60, 90))
    _, lse = online.attention(q, k, k, window_size=window_size, tile_m=16, tile_n=8)
    np.testing.assert_allclose(lse[0, 0, : 60 - window_size[1]], np.log(count), rtol=1e-6, atol=1e-7)
    if count == 1:
        v = random_array((1, 90, 1, 8), np.float16, 1)
        out, _ = online.attention(q, k, v, window_size=window_size, tile_m=16, tile_n=8)
        np.testing.assert_array_equal(out, v[:, 30:])


def test_a_window_visits_the_blocks_that_it_needs(monkeypatch):
    seen = []
    update = OnlineSoftmax.update

    def spy(self, scores):
        seen.append(float(scores[..., -1].max()))
        return update(self, scores)

    monkeypatch.setattr(OnlineSoftmax, "update", spy)
    q, k = np.zeros((1, 8, 1, 8), np.float16), np.zeros((1, 80, 1, 8), np.float16)
    q[..., 0], k[0, :, 0, 0] = 1, np.arange(80)
    for left, last_block in ((24, []), (25, [47])):  # the first row, at key 72, sees keys from 48 or 47 on
        seen.clear()
        online.attention(q, k, k, softmax_scale=0.1, window_size=(left, 3), tile_n=8)
        assert seen == [79, 71, 63, 55, *last_block]


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_keys_outside_of_the_window_never_reach_a_row(where, special, speculative):
    q, k, v = inputs((1, 40, 2, 16), (1, 40, 2, 16), np.float16)
    for names in ((), ("softcap",), ("alibi_slopes",), ("softcap", "alibi_slopes", "sink")):
        options = {name: value for name, value in all_options(2).items() if name in names}
        options |= {"window_size": (9, 2), "tile_m": 16, "tile_n": 8, "speculative": speculative}
        clean, clean_lse = online.attention(q, k, v, **options)
        bad = {"k": k.copy(), "v": v.copy()}
        bad[where][0, 21, 1, 5] = special
        out, lse = online.attention(q, bad["k"], bad["v"], **options)
        touched = (np.arange(40) >= 19) & (np.arange(40) <= 30)
        np.testing.assert_array_equal(out[0, :, 0], clean[0, :, 0])
        # With speculation a row takes a new maximum when another one of its warp does: P is rounded otherwise.
        near = 2e-3 if speculative else 0
        np.testing.assert_allclose(
            out[0, ~touched, 1].astype(float), clean[0, ~touched, 1].astype(float), rtol=0, atol=near
        )
        np.testing.assert_allclose(lse[0, 1, ~touched], clean_lse[0, 1, ~touched], rtol=0, atol=near)
        changed = (out[0, :, 1] != clean[0, :, 1]).any(axis=1)
        assert changed[touched].mean() > 0.4
        del options["speculative"]
        check(q, bad["k"], bad["v"], **options)  # compares the NaN and Inf patterns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", [5e3, 1e4])
def test_a_softcap_saturates(score, dtype):
    q, k, v = (np.zeros((1, n, 1, 16), dtype) for n in (2, 3, 3))
    q[0, 0, 0, 0], q[0, 1, 0, 0] = 1, -1
    k[0, :, 0, 0] = score, -score, np.inf
    v[0, :, 0, :3] = np.eye(3)
    with np.errstate(invalid="raise"):
        out, lse = check(q, k, v, softmax_scale=1.0, softcap=50.0)
    np.testing.assert_allclose(lse[0, 0], [50 + math.log(2), 50], rtol=1e-6)
    np.testing.assert_array_equal(out[0, :, 0, :3].astype(float).round(), [[0, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0, 3e4])
@pytest.mark.parametrize("slopes", [None, np.float32([0.3])])
def test_logits_are_rounded_at_each_step(softcap, slopes):
    softmaxes = []

    class Spy(OnlineSoftmax):
        def update(self, scores):
            softmaxes.append((self.logits.scale_log2, scores.copy()))
            return super().update(scores)

    q, k = (random_array((1, n, 1, 16), np.float16, n, amplitude=3.0) for n in (20, 33))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "OnlineSoftmax", Spy)
        online.attention(q, k, k, softmax_scale=-0.3, softcap=softcap, alibi_slopes=slopes)
    ((scale, got),) = softmaxes
    log2_e = math.log2(math.e)
    scores = -q[0, :, 0].astype(np.float32) @ k[0, :, 0].astype(np.float32).T
    with np.errstate(over="ignore"):
        e = np.exp2(scores * np.float32(2 * log2_e * 0.3 / softcap))
    expected, factor = np.float32(1) / (np.float32(-1) - e), np.float32(2 * softcap * log2_e)
    if slopes is not None:
        distance = np.abs(np.arange(33) - (np.arange(20)[:, None] + 13)).astype(np.float32)
        expected = fma_rn(-(slopes[0] * np.float32(log2_e)), distance, expected * factor)
    assert scale == (factor if slopes is None else 1)
    # The twin's fma is rounded to float64 first: beside a capped score that has vanished, ties go the wrong way.
    np.testing.assert_array_max_ulp(got[0], expected, 1)
    assert (got[0] != expected).mean() < 0.05
    assert got.dtype == np.float32


def test_slopes_alone_scale_first():
    got = []

    class Spy(OnlineSoftmax):
        def update(self, scores):
            got.append(scores.copy())
            return super().update(scores)

    q, k = (random_array((1, n, 1, 16), np.float16, n) for n in (20, 33))
    slopes = np.float32([0.3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "OnlineSoftmax", Spy)
        online.attention(q, k, k, softmax_scale=0.3, alibi_slopes=slopes)
    scores = q[0, :, 0].astype(np.float32) @ k[0, :, 0].astype(np.float32).T
    distance = np.abs(np.arange(33) - (np.arange(20)[:, None] + 13)).astype(np.float32)
    log2_e = math.log2(math.e)
    expected = fma_rn(-(slopes[0] * np.float32(log2_e)), distance, scores * np.float32(0.3 * log2_e))
    np.testing.assert_array_equal(got[0][0], expected)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("slopes", [None, np.float32([0.5, 0.1])])
def test_options_and_a_negative_scale(softcap, slopes):
    """The sign is in Q; a slope does not turn round with it."""
    q, k, v = inputs((1, 70, 2, 32), (1, 90, 2, 32), np.float16)
    options = {"softcap": softcap, "alibi_slopes": slopes, "sink": np.float32([0, 1])}
    got = check(q, k, v, softmax_scale=-0.3, tile_m=32, tile_n=16, **options)
    other = online.attention(-q, k, v, softmax_scale=0.3, tile_m=32, tile_n=16, **options)
    for a, b in zip(got, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("seqlen_k", [0, 21])
def test_rows_without_keys_have_the_sink_as_their_lse(seqlen_k, speculative):
    q, k, v = inputs((2, 40, 3, 16), (2, seqlen_k, 1, 16), np.float16)
    v[...] = np.nan
    sink = np.float32([0.5, -np.inf, -20])
    out, lse = online.attention(q, k, v, causal=True, sink=sink, tile_m=16, tile_n=16, speculative=speculative)
    blind = 40 - seqlen_k
    assert (out[:, :blind] == 0).all()
    np.testing.assert_allclose(lse[:, ::2, :blind], np.broadcast_to([[0.5], [-20]], (2, 2, blind)), rtol=2e-7)
    assert np.isneginf(lse[:, 1, :blind]).all()
    assert np.isnan(out[:, blind:]).all()


@pytest.mark.parametrize("speculative", [False, True])
def test_a_huge_sink_overflows_nothing(speculative):
    q, k, v = inputs((1, 40, 4, 16), (1, 60, 1, 16), np.float16)
    sink = np.float32([1e4, 1e38, -1e4, -3e38])
    with np.errstate(over="ignore"):
        out, lse = online.attention(q, k, v, sink=sink, speculative=speculative)
    assert (out[:, :, :2] == 0).all()
    np.testing.assert_allclose(lse[0, :2], [[1e4] * 40, [1e38] * 40], rtol=1e-6)
    without, lse_without = online.attention(q, k, v, speculative=speculative)
    np.testing.assert_array_equal(out[:, :, 2:], without[:, :, 2:])
    np.testing.assert_array_equal(lse[:, 2:], lse_without[:, 2:])


@pytest.mark.parametrize("make", [OnlineSoftmax, lambda *a: SpeculativeSoftmax(*a, np.float16)])
@pytest.mark.parametrize("scale_log2", [1.0, 0.18033688])
def test_a_softmax_is_closed_with_a_sink(make, scale_log2):
    softmax = make((5,), scale_log2)
    scores = random_array((5, 64), np.float32, 1, amplitude=20.0)
    scores[2] = -np.inf
    scores[3, 7] = np.nan
    scores[4] = np.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        for begin in range(0, 64, 16):
            softmax.update(scores[:, begin : begin + 16])
        plain, plain_lse = softmax.finish()
        for sink in (-np.inf, -80.0, -1.0, 3.0, 30.0, 700.0):
            inverse, lse = softmax.finish(np.full((5, 1), sink, np.float32))
            expected = np.logaddexp(plain_lse.astype(np.float64), sink)
            np.testing.assert_allclose(lse, expected, rtol=5e-7)
            # The same O, of keys alone: it is the share of the keys that changes.
            share = np.exp(plain_lse[:2].astype(np.float64) - expected[:2])
            np.testing.assert_allclose(inverse[:2, 0], plain[:2, 0] * share, rtol=1e-4, atol=1e-38)
            assert inverse[2] == 0
            np.testing.assert_array_equal(np.isnan(lse), np.arange(5) >= 3)
            np.testing.assert_array_equal(np.isnan(inverse[:, 0]), np.arange(5) >= 3)
            if np.isneginf(sink):
                np.testing.assert_array_equal(inverse, plain)
                np.testing.assert_array_equal(lse, plain_lse)


@pytest.mark.parametrize("scale_log2", [1.0, 0.25, 3.7, 1e-30])
def test_softmax_does_not_depend_on_how_scores_arrive(scale_log2):
    scores = random_array((5, 64), np.float32, 1, amplitude=9.0)
    scores[2] = -np.inf
    scores[3, :40] = -np.inf  # whole blocks without a key, on either side of one that has some
    scores[4, 20:] = -np.inf
    with np.errstate(divide="ignore"):
        expected = np.log2(np.exp2(scores.astype(np.float64) * scale_log2).sum(axis=-1)) * math.log(2)
        for width in (1, 8, 20, 64):
            softmax = OnlineSoftmax((5,), scale_log2)
            O = np.zeros((5, 1), np.float32)
            for begin in reversed(range(0, 64, width)):
                P, shrink = softmax.update(scores[:, begin : begin + width])
                assert ((shrink >= 0) & (shrink <= 1)).all()
                O = O * shrink + P.sum(axis=-1, keepdims=True)
            inverse, lse = softmax.finish()
            np.testing.assert_allclose(lse, expected, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(O * inverse, [[1], [1], [0], [1], [1]], rtol=1e-6)
            np.testing.assert_array_equal(inverse[2], [0])
            np.testing.assert_array_equal(softmax.maximum[:, 0], scores.max(axis=-1))


def test_shrink_is_exactly_1_when_the_maximum_stays():
    # An fma in the exponent of shrink leaves the rounding error of maximum * scale_log2 there.
    random = np.random.default_rng(7)
    rows = 64
    by_fma = 0
    for scale_log2 in np.float32(np.exp2(random.uniform(-30, 4, 200))):
        top = np.float32(random.normal(size=(rows, 1)) * np.exp2(random.uniform(-4, 8, (rows, 1))))
        below = np.minimum(top, top - np.abs(np.float32(random.normal(size=(rows, 16)))))
        softmax = OnlineSoftmax((rows,), scale_log2)
        softmax.update(top)
        for scores in (below, np.concatenate([below, top], axis=1), np.full_like(below, -np.inf)):
            _, shrink = softmax.update(scores)
            np.testing.assert_array_equal(shrink, np.ones((rows, 1), np.float32))
            np.testing.assert_array_equal(softmax.maximum, top)
        exact = top.astype(np.float64) * np.float64(scale_log2)
        by_fma += np.count_nonzero(np.exp2(np.float32(exact - softmax.logits.kept(top))) != 1)
    assert by_fma > 1000  # the fault would show


def test_lse_does_not_drift():
    # 1,000 blocks whose keys are too far below the maximum to count.
    random = np.random.default_rng(8)
    scale_log2 = np.float32(0.18033688)
    top = np.float32(random.normal(size=(256, 1)) * 100)
    softmax = OnlineSoftmax((256,), scale_log2)
    softmax.update(top)
    first = softmax.sum.copy()
    _, lse = softmax.finish()
    for _ in range(1000):
        _, shrink = softmax.update(top - np.float32(600))
        assert (shrink == 1).all()
    np.testing.assert_array_equal(softmax.sum, first)
    np.testing.assert_array_equal(softmax.finish()[1], lse)


def test_the_exponent_is_rounded_once():
    # Near the maximum score * scale_log2 - reference cancels: a product that is rounded first would give 0 here.
    scale_log2 = np.float32(1 + 2**-12)
    top = np.float32(1 + 2**-12)  # the product is 1 + 2**-11 + 2**-24, a tie; the reference is 1 + 2**-11
    softmax = OnlineSoftmax((1,), scale_log2)
    softmax.update(np.float32([[top]]))
    assert softmax.logits.kept(softmax.maximum) == np.float32(1 + 2**-11)
    P, _ = softmax.update(np.float32([[np.nextafter(top, np.float32(0))]]))
    exponent = np.float64(np.nextafter(top, np.float32(0))) * np.float64(scale_log2) - (1 + 2**-11)
    assert -(2**-22) < exponent < 0
    np.testing.assert_array_equal(P, [[np.exp2(np.float32(exponent))]])
    assert P.dtype == np.float32


def test_scores_are_negated_not_the_scale():
    # The kernel computes -Q K' for a negative scale: the same bits as for queries of the other sign.
    q, k, v = inputs((1, 70, 2, 32), (1, 90, 2, 32), np.float16)
    for causal in (False, True):
        out, lse = online.attention(q, k, v, softmax_scale=-0.3, causal=causal, tile_m=32, tile_n=16)
        other, other_lse = online.attention(-q, k, v, softmax_scale=0.3, causal=causal, tile_m=32, tile_n=16)
        np.testing.assert_array_equal(out, other)
        np.testing.assert_array_equal(lse, other_lse)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-45, -1e-300])
def test_the_smallest_scale(scale, monkeypatch):
    seen = []

    class Spy(OnlineSoftmax):
        def __init__(self, shape, scale_log2, *options):
            seen.append(scale_log2)
            super().__init__(shape, scale_log2, *options)

    monkeypatch.setattr(online, "OnlineSoftmax", Spy)
    x = np.ones((1, 3, 1, 8), np.float16)
    online.attention(x, x, x, softmax_scale=scale)
    assert seen == [np.finfo(np.float32).tiny]
    assert seen[0].dtype == np.float32


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_poisoned_row_stays_poisoned(special):
    softmax = OnlineSoftmax((2,), 0.5)
    scores = np.float32([[0, 1, 2, 3], [0, special, 1, 2]])
    with np.errstate(invalid="ignore"):
        for _ in range(2):
            softmax.update(scores)
            scores = np.zeros((2, 4), np.float32)
        inverse, lse = softmax.finish()
    np.testing.assert_array_equal(np.isnan(inverse[:, 0]), [False, True])
    np.testing.assert_array_equal(np.isnan(lse), [False, True])
    # A NaN is no maximum, as for the GPU's fmaxf.
    assert softmax.maximum[1, 0] == (2 if np.isnan(special) else np.inf)


def test_blocks_are_visited_from_the_last_to_the_first(monkeypatch):
    seen = []
    update = OnlineSoftmax.update

    def spy(self, scores):
        seen.append(float(scores[0, 0, 0]))
        return update(self, scores)

    monkeypatch.setattr(OnlineSoftmax, "update", spy)
    q, k = np.zeros((1, 1, 1, 8), np.float16), np.zeros((1, 40, 1, 8), np.float16)
    q[..., 0], k[0, :, 0, 0] = 1, np.arange(40)
    online.attention(q, k, k, softmax_scale=0.1, tile_n=16)
    assert seen == [32, 16, 0]  # raw: the scale comes later


def test_p_is_rounded_to_the_input_type():
    assert float(online.round_to(np.float32([1 + 2**-9]), ml_dtypes.bfloat16)[0]) == 1.0
    assert float(online.round_to(np.float32([1 + 3 * 2**-9]), ml_dtypes.bfloat16)[0]) == 1 + 2**-7
    assert float(online.round_to(np.float32([1 + 2**-9]), np.float16)[0]) == 1 + 2**-9
    # Key 0 has weight 1, key 1 has weight w; the output shows whether w was rounded to bfloat16 before the product.
    q, k, v = (np.zeros((1, n, 1, 8), ml_dtypes.bfloat16) for n in (1, 2, 2))
    q[..., 0], k[0, 1, 0, 0], v[0, 1] = 1, -1, 256
    w = np.exp2(-np.float32(math.log(2) / 3 * math.log2(math.e)))
    rounded = np.float32(w.astype(ml_dtypes.bfloat16))
    out, _ = online.attention(q, k, v, softmax_scale=math.log(2) / 3)
    rounded_out, exact_out = (np.float32(256 * x / (1 + w)).astype(ml_dtypes.bfloat16) for x in (rounded, w))
    assert rounded_out != exact_out
    assert out[0, 0, 0, 0] == rounded_out


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OnlineSoftmax((2,), 0.0), r"scale_log2 is 0.0"),
        (lambda: OnlineSoftmax((2,), math.nan), r"scale_log2 is nan"),
        (lambda: OnlineSoftmax((2,), 1.0).update(np.zeros((1, 3), np.float32)), r"scores have shape \(1, 3\)"),
        (lambda: OnlineSoftmax((2,), 1.0).update(np.zeros((2, 0), np.float32)), r"scores have shape \(2, 0\)"),
        (lambda: online.attention(*[np.zeros((1, 2, 1, 8), np.float16)] * 3, tile_m=0), r"tile_m is 0"),
        (lambda: online.attention(*[np.zeros((1, 2, 1, 8), np.float16)] * 3, tile_n=-1), r"tile_n is -1"),
        (lambda: online.attention(*[np.zeros((1, 0, 1, 8), np.float16)] * 3, softcap=0.0), r"softcap is 0.0"),
        (
            lambda: online.attention(*[np.zeros((1, 0, 1, 8), np.float16)] * 3, window_size=(-2, 0)),
            r"window_size is \(-2, 0\)",
        ),
        (
            lambda: online.attention(*[np.zeros((1, 0, 1, 8), np.float16)] * 3, sink=np.zeros(2)),
            r"sink has shape \(2,\)",
        ),
        (
            lambda: online.attention(*[np.zeros((1, 2, 1, 8), np.float16)] * 3, bias=np.zeros((3, 2))),
            r"bias has shape \(3, 2\); it must broadcast to \(1, 1, 2, 2\)",
        ),
        (
            lambda: online.attention(*[np.zeros((1, 0, 1, 8), np.float16)] * 3, alibi_slopes=np.zeros(2)),
            r"alibi_slopes has shape \(2,\); it must be \(1,\) or \(1, 1\)",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_threshold_keeps_the_maxima_of_a_warp():
    """While none has grown by more than 8; then all of its rows move, and no other warp."""
    softmax = OnlineSoftmax((32,), 1.0, threshold=8)
    total = np.zeros(32)
    for score, maximum in ((1.0, 1.0), (5.0, 1.0), (9.0, 1.0), (9.5, 9.5), (3.0, 9.5), (17.5, 9.5)):
        scores = np.ones((32, 8), np.float32)
        scores[3, 1] = score
        scores[[4, 20]] = 2.0
        P, shrink = softmax.update(scores)
        total += np.exp2(scores.astype(np.float64)).sum(axis=-1)
        assert softmax.maximum[3] == maximum
        assert softmax.maximum[4] == 2  # its own, whenever the warp moves
        assert np.all(softmax.maximum[16:, 0] == np.where(np.arange(16, 32) == 20, 2, 1))
        assert P[3, 1] == 2 ** (score - maximum)
        assert shrink[3] == {9.5: 2.0**-8.5}.get(score, 1) or softmax.sum[3] == P[3].sum()
    inverse, lse = softmax.finish()
    np.testing.assert_allclose(lse, np.log(total), rtol=1e-6)
    np.testing.assert_allclose(1 / inverse[:, 0], total * np.exp2(-softmax.maximum[:, 0]), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_scores_with_a_threshold(kind, dtype):
    q, k, v = inputs((1, 40, 2, 64), (1, 640, 2, 64), dtype)
    q, k = harden(kind, q, k, block=64)
    with np.errstate(invalid="ignore"):
        reference, reference_lse = dense.attention(q, k, v)
        plain, _ = dense.same_precision(q, k, v)
        out, lse = online.attention(q, k, v, tile_n=64, rescale_threshold=8)
    assert_close(out, reference, plain)
    assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k))


def test_part_of_the_exponentials_comes_from_the_polynomial():
    softmax = SpeculativeSoftmax((16,), 1.0, np.float16, 3)
    softmax.update(np.zeros((16, 64), np.float32))
    scores = np.full((16, 64), -0.5, np.float32)
    scores[0, 16] = scores[1, 17] = -np.inf
    scores[2, 18] = -300
    P, _ = softmax.update(scores)
    on_fma = np.isin(np.arange(64) // 8, (2, 5, 7))
    scores[0, 16] = scores[1, 17] = scores[2, 18] = -200
    np.testing.assert_array_equal(P[:, on_fma], exp2_polynomial(scores[:, on_fma]))
    np.testing.assert_array_equal(P[:, ~on_fma], np.exp2(scores[:, ~on_fma]))
    assert P[0, 16] == P[1, 17] == P[2, 18] == 0


@pytest.mark.parametrize("odd", [np.nan, np.inf, 500.0])
def test_what_the_polynomial_cannot_take_is_out_of_range(odd):
    softmax = SpeculativeSoftmax((16,), 1.0, np.float16, 8)
    scores = np.zeros((16, 64), np.float32)
    softmax.update(scores)
    scores[5, 20] = odd
    with np.errstate(invalid="ignore"):
        P, _ = softmax.update(scores)
    assert softmax.corrections == 2
    np.testing.assert_array_equal(P[5, 20], 1 if odd == 500 else np.nan)


# --- The retained maximum ---


def speculate(blocks, dtype, scale_log2=1.0):
    """The softmax after some blocks of scores, what it gave for each, and the exact one."""
    speculative = SpeculativeSoftmax(blocks[0].shape[:-1], scale_log2, dtype)
    exact = OnlineSoftmax(blocks[0].shape[:-1], scale_log2)
    steps = [speculative.update(block) for block in blocks]
    for block in blocks:
        exact.update(block)
    return speculative, steps, exact


@pytest.fixture
def softmaxes(monkeypatch):
    """The speculative softmaxes that `online.attention` makes."""
    made = []

    class Kept(SpeculativeSoftmax):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(online, "SpeculativeSoftmax", Kept)
    return made


def block(columns, rows=16, keys=32):
    """Scores of one block: -inf, except in some columns."""
    scores = np.full((rows, keys), -np.inf, np.float32)
    for column, score in columns.items():
        scores[:, column] = score
    return scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        # Relative to log2(limit). One key:
        ({3: -0.01}, True),
        ({3: 0.0}, False),  # the limit itself is not below it
        ({3: 0.01}, False),
        # Two keys of one sum, each half of it:
        ({3: -1.01, 11: -1.01}, True),
        ({3: -0.99, 11: -0.99}, False),
        ({6: -0.99, 30: -0.99}, False),
        # Two keys of two sums: other parities of one thread, other threads.
        ({2: -0.99, 3: -0.99}, True),
        ({1: -0.99, 3: -0.99}, True),
        ({3: -0.99, 7: -0.99}, True),
        ({7: -0.99, 8: -0.99}, True),
        (dict.fromkeys(range(8), -0.01), True),
        # Four keys in each of the eight sums:
        (dict.fromkeys(range(32), -2.01), True),
        (dict.fromkeys(range(32), -1.99), False),
    ],
)
def test_a_block_is_in_range_if_each_of_its_sums_is_below_the_limit(columns, kept, dtype):
    log2_limit = {np.float16: 15, ml_dtypes.bfloat16: 60}[dtype]
    blocks = [np.zeros((16, 1), np.float32), block({column: log2_limit + x for column, x in columns.items()})]
    softmax, steps, exact = speculate(blocks, dtype)
    top = np.float32(log2_limit + max(columns.values()))
    P, shrink = steps[1]
    assert softmax.limit == 2.0**log2_limit
    assert softmax.corrections == (1 if kept else 2)
    assert np.all(softmax.reference == (0 if kept else top))
    assert np.all(shrink == (1 if kept else np.exp2(-top)))
    assert np.isfinite(P.astype(dtype).astype(np.float32)).all()
    np.testing.assert_allclose(P.max(), np.exp2(top) if kept else 1)
    inverse, lse = softmax.finish()
    np.testing.assert_allclose(lse, exact.finish()[1], rtol=3e-7)
    # The sum of the first block was brought into the new frame.
    np.testing.assert_allclose(1 / inverse, P.sum(axis=-1, keepdims=True) + (1 if kept else np.exp2(-top)), rtol=1e-6)


def test_sums_are_taken_in_float32_in_the_order_of_columns():
    """Just below the limit: what is small is lost if it comes last, and counts if it comes first."""
    first = np.zeros((16, 1), np.float32)
    large, small = np.nextafter(np.float32(15), np.float32(0)), -11.0  # 2**-11 is a quarter of an ulp
    columns = range(0, 512, 8)
    for where, corrections in ((0, 1), (504, 2)):
        scores = block({**dict.fromkeys(columns, small), where: large}, keys=512)
        assert speculate([first, scores], np.float16)[0].corrections == corrections


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("below", [0.1, None])
def test_what_counts_is_the_sum_of_a_block_and_not_of_the_row(below, dtype):
    """A row may be so long that its sum passes the limit: its reference need not move for that."""
    limit = SpeculativeSoftmax.LIMITS[np.dtype(dtype).name]
    if below is None:  # all scores alike
        blocks = [np.zeros((16, 8 * 1024), np.float32)] * 40
    else:
        blocks = [np.zeros((16, 8), np.float32), *[np.full((16, 8), np.log2(limit) - below, np.float32)] * 40]
    softmax, _, exact = speculate(blocks, dtype)
    assert softmax.corrections == 1
    assert np.all(softmax.sum > 8 * (limit if below is not None else 2.0**15))
    np.testing.assert_allclose(softmax.finish()[1], exact.finish()[1], rtol=3e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_after_a_growth_by_the_limit_the_next_block_is_not_tried(dtype):
    log2_limit = np.log2(SpeculativeSoftmax.LIMITS[np.dtype(dtype).name])
    softmax = SpeculativeSoftmax((32,), 1.0, dtype)
    blocks = [  # growth of row 2, of the first warp; what is then expected; corrections, untried ones
        (0, True, 1, 0),
        (log2_limit - 0.5, True, 1, 0),  # in range
        (0.5 - log2_limit, True, 1, 0),
        (log2_limit, False, 2, 0),  # out of range
        (log2_limit + 9, False, 3, 1),
        (log2_limit - 0.5, True, 4, 2),  # would have been in range
        (0, True, 4, 2),
    ]
    score = 0.0
    for growth, try_next, corrections, untried in blocks:
        score += growth
        scores = np.zeros((32, 8), np.float32)
        scores[2] = score
        P, _ = softmax.update(scores)
        assert (softmax.corrections - 1, softmax.untried) == (corrections, untried)
        np.testing.assert_array_equal(softmax.try_next[:, 0], (np.arange(32) >= 16) | try_next)
    assert np.all(P[2] == 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("below", [0, 1, 3.75, 4])
def test_steps_that_leave_the_range_by_a_sum_are_tried_once(dtype, below):
    """16 columns of a sum, each a 16th of the limit or more, in every block: only the first one is computed twice."""
    growth = np.log2(SpeculativeSoftmax.LIMITS[np.dtype(dtype).name]) - below
    softmax, _, exact = speculate([np.full((16, 128), n * growth, np.float32) for n in range(6)], dtype)
    assert (softmax.corrections, softmax.untried) == (6, 4)
    np.testing.assert_allclose(softmax.finish()[1], exact.finish()[1], rtol=3e-7)


def test_sixteen_rows_decide_together():
    blocks = [np.zeros((40, 2), np.float32), np.zeros((40, 2), np.float32)]
    blocks[1][20] = 100
    blocks[1][21] = 5  # in range, but of the same warp
    blocks[1][22] = -5
    blocks[1][[15, 32]] = 5  # of the warps before and after
    softmax, ((P, _), (P_next, shrink)), exact = speculate(blocks, np.float16)
    assert softmax.corrections == 3 + 1
    moved = {20: 100, 21: 5}
    np.testing.assert_array_equal(softmax.reference[:, 0], [moved.get(row, 0) for row in range(40)])
    np.testing.assert_array_equal(shrink[:, 0], [2.0 ** -moved.get(row, 0) for row in range(40)])
    assert np.all(P == 1)
    np.testing.assert_array_equal(P_next[:, 0], [{15: 32, 32: 32, 22: 2.0**-5}.get(row, 1) for row in range(40)])
    np.testing.assert_allclose(softmax.finish()[1], exact.finish()[1], rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_score_that_is_no_number_is_not_in_range(special, dtype):
    """Its warp corrects in every block, and so the other rows of the warp always follow their maximum."""
    blocks = [np.full((32, 9), n, np.float32) for n in range(4)]
    for scores in blocks[1:]:
        scores[3, 8] = special
    with np.errstate(invalid="ignore"):
        softmax, steps, _ = speculate(blocks, dtype)
        inverse, lse = softmax.finish()
    assert softmax.corrections == 2 + 3
    assert np.all(np.delete(softmax.reference[:16], 3) == 3)
    assert np.all(softmax.reference[16:] == 0)
    for P, _ in steps[1:]:
        assert np.isnan(P[3, 8])
    np.testing.assert_array_equal(np.isnan(inverse[:, 0]), np.arange(32) == 3)
    np.testing.assert_array_equal(np.isnan(lse), np.arange(32) == 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_a_key_is_not_in_range(dtype):
    """Rows that see their first key later than others of their warp, or none."""
    blocks = [np.zeros((16, 4), np.float32) for _ in range(3)]
    blocks[0][2] = blocks[1][2] = blocks[0][3] = -np.inf
    for scores in blocks:
        scores[4] = -np.inf
    with np.errstate(divide="ignore"):
        softmax, steps, exact = speculate(blocks, dtype)
        (inverse, lse), (_, expected) = softmax.finish(), exact.finish()
    assert softmax.corrections == 3  # row 4
    assert inverse[4] == 0
    np.testing.assert_allclose(lse, expected, rtol=1e-6)
    assert np.isneginf(lse[4])
    assert all(np.isfinite(P).all() for P, _ in steps)


@pytest.mark.parametrize("scale_log2", [1.0, 0.18033688, 3.7, 1e-30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_speculative_softmax_is_a_softmax(dtype, scale_log2):
    """Sum and output stay in one frame, whenever it moves."""
    random = np.random.default_rng(3)
    blocks = [np.float32(random.normal(size=(40, 24)) * 20 * (1 + n)) for n in range(8)]
    softmax, steps, exact = speculate(blocks, dtype, scale_log2)
    O = np.zeros((40, 1), np.float32)
    for P, shrink in steps:
        assert ((shrink >= 0) & (shrink <= 1)).all()
        O = O * shrink + P.sum(axis=-1, keepdims=True)
    inverse, lse = softmax.finish()
    np.testing.assert_allclose(O * inverse, np.ones((40, 1)), rtol=1e-6)
    # An exponent of up to 64 is rounded to 2**-18.
    np.testing.assert_allclose(lse, exact.finish()[1], rtol=3e-7, atol=2.0**-18)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_scores(kind, dtype):
    """Maxima that never grow, always grow, or are no numbers: right, whatever the number of corrections."""
    q, k, v = inputs((1, 40, 2, 64), (1, 640, 2, 64), dtype)
    with np.errstate(invalid="ignore"):
        check(*harden(kind, q, k, block=64), v, tile_n=64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_scores_are_what_they_say(dtype, softmaxes):
    """Corrections of 3 warps of each of two heads in 10 blocks, beside those in the first one."""
    q, k, v = inputs((1, 40, 2, 64), (1, 640, 2, 64), dtype)
    found = {}
    for kind in KINDS:
        softmaxes.clear()
        with np.errstate(invalid="ignore"):
            online.attention(*harden(kind, q, k, block=64), v, tile_n=64, speculative=True)
        found[kind] = sum(softmax.corrections for softmax in softmaxes) - 2 * 3
    for kind in "growing", "jumps", "huge":
        assert found.pop(kind) > 0
    assert found == {
        "constant": 0,
        "negative": 0,
        "slow": 0,
        "steps": 2 * 3 * 9,
        "NaN in q": 9,  # one warp, always
        "inf in q": 9,
        "NaN in k": 3,  # one head, in the block that has it: it is no maximum
        "inf in k": 3 * 6,  # it is one; the warps do not try another block after an infinite growth
        "-inf in k": 3 * 6,
    }


@pytest.mark.parametrize("exponent", [-60, -84, -100, -110])
def test_small_values_of_bfloat16(exponent):
    """P of the largest weight is 1 or more: as much is left of V as in the exact softmax."""
    q, k, v = inputs((1, 40, 1, 64), (1, 640, 1, 64), ml_dtypes.bfloat16)
    out, _ = check(q, k, (v.astype(np.float32) * 2.0**exponent).astype(v.dtype))
    assert out.any()


@pytest.mark.parametrize(("beyond", "each"), [(55.75, 128), (59.75, 8)])
def test_large_values_of_bfloat16(beyond, each, softmaxes):
    """2**17 keys of 2**47 are no overflow, however far above the reference they lie: 2**17 * 2**47 * 2**60 < 2**128.

    Each sum of a block of 128 keys is just below its limit: 16 keys at 2**55.75, or one at 2**59.75.
    """
    keys, tile_n = 2**17, 128
    q, k, v = (np.zeros((1, n, 1, 8), ml_dtypes.bfloat16) for n in (16, keys, keys))
    q[..., 0] = 1
    k[..., 0] = -4096
    blocks = k.reshape(-1, tile_n, 8)
    blocks[:-1, :each, 0] = beyond
    blocks[-1, :, 0] = 0  # visited first
    v[...] = 2.0**47
    v[..., 1] *= -1
    out, lse = online.attention(q, k, v, softmax_scale=math.log(2), tile_n=tile_n, speculative=True)
    assert [softmax.corrections for softmax in softmaxes] == [1]
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, :1], out.shape))
    np.testing.assert_allclose(lse, math.log(2) * (beyond + math.log2(each * (keys // tile_n - 1))), rtol=1e-6)


@pytest.mark.parametrize("beyond", [7.5, 12.5, 16.5, 18.5, 23.5])
@pytest.mark.parametrize("old", [0.0, 10.5])
def test_small_weights_of_float16_are_as_exact_as_without_speculation(old, beyond):
    """P of the largest key at hand is 1 when it becomes the reference, and later keys may only be larger."""
    keys = 500
    q, k, v = (np.zeros((1, n, 1, 16), np.float16) for n in (16, keys, keys))
    q[..., 0] = 1
    k[:, :-1, :, 0] = -beyond * np.log(2)
    k[:, 0, :, 0] = old * np.log(2)  # the last one visited, within range
    v[:, 1:-1] = 1
    reference, reference_lse = dense.attention(q, k, v, softmax_scale=1.0)
    total = np.exp(reference_lse.max())
    for speculative in (False, True):
        out, lse = online.attention(q, k, v, softmax_scale=1.0, speculative=speculative)
        error = np.abs(out.astype(np.float64) - reference).max()
        smallest = 1 if speculative else np.exp2(old)  # what a P of 1 stands for
        assert error <= (keys - 2) * 2.0**-25 * smallest / total + 2.0**-11 * reference.max() + 2.0**-25
        np.testing.assert_allclose(lse, reference_lse, rtol=0, atol=2e-6)


def test_a_softmax_of_float32_cannot_speculate():
    with pytest.raises(ValueError, match=r"^softmax: dtype is float32; it must be one of bfloat16, float16$"):
        SpeculativeSoftmax((1,), 1.0, np.float32)
