"""The retained reference: exact for every threshold, bounded in range, and wrong in the ways the section lists."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles import dense
from cupyfa.oracles.exp2.fragments import TUNING, mixed_exp2
from cupyfa.oracles.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FORMATS
from cupyfa.oracles.retained import POLICIES, Policy, RangeExceeded, RetainedSoftmax, attend
from cupyfa.oracles.retained_bounds import exact_row, staircase
from cupyfa.oracles.softmax import OnlineSoftmax

SETTINGS = settings(deadline=None, derandomize=True, max_examples=120)
LOGITS = st.lists(st.integers(-60, 60), min_size=1, max_size=24)
TAUS = st.sampled_from([0, 1, 2, 4, 8, 8.5, 30, 1000])


def dense_row(b, v):
    """Attention of base-2 logits by SciPy: (out, lse)."""
    z = np.asarray(b) * math.log(2)
    return scipy.special.softmax(z, axis=-1) @ v, scipy.special.logsumexp(z, axis=-1)


def random_rows(rows=32, keys=256, spread=10.0, seed=0, dims=8):
    rng = np.random.default_rng(seed)
    return spread * rng.standard_normal((rows, keys)), rng.standard_normal((keys, dims))


# --- exactness -------------------------------------------------------------------------------------------------------


@SETTINGS
@given(LOGITS, TAUS, st.integers(-4, 8), st.integers(1, 9))
def test_equals_dense_for_every_threshold_in_exact_arithmetic(logits, tau, omega, block):
    values = [Fraction(3 * n - 7, n + 1) for n in range(len(logits))]
    weights = [Fraction(2) ** b for b in logits]
    row = exact_row(logits, values, block=block, tau=tau, omega=omega)
    assert row.out == sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert row.sum_exp2 == sum(weights)
    assert row.maximum - tau <= row.reference <= row.maximum
    assert row.largest_P <= 2 ** (tau + omega)


@SETTINGS
@given(LOGITS, TAUS, st.integers(-4, 8), st.integers(1, 9))
def test_float64_recurrence_has_the_state_of_the_exact_one(logits, tau, omega, block):
    values = list(range(len(logits)))
    row = exact_row(logits, values, block=block, tau=tau, omega=omega)
    out, _, softmax = attend(
        np.array([logits], float), np.array(values, float)[:, None], Policy(tau, omega), block=block
    )
    assert (softmax.reference.item(), softmax.maximum.item()) == (row.reference, row.maximum)
    assert softmax.sum.item() == pytest.approx(float(row.D), rel=1e-14)
    assert out.item() == pytest.approx(float(row.out), rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("vote_rows", [1, 16])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0, 2000.0])
@pytest.mark.parametrize(
    "policy", [Policy(0, 0), Policy(2, 0), Policy(8, 0), Policy(4, 4), Policy(4, 8), Policy(50, -3)]
)
def test_float64_equals_dense(policy, spread, vote_rows):
    b, v = random_rows(spread=spread)
    expected, expected_lse = dense_row(b, v)
    for block in (1, 7, 64, 256, 300):
        out, lse, softmax = attend(b, v, policy, block=block, vote_rows=vote_rows)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-11)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-12)
        lag = softmax.maximum - softmax.reference
        assert (lag >= 0).all()
        assert (lag <= policy.tau).all()


def test_float64_equals_the_dense_oracle_in_score_units():
    """Raw scores with a softmax scale: the threshold is in base-2 units, the reference in units of the scores."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, n, 1, 32)) * 3 for n in (24, 80, 80))
    out, lse = dense.attention(q, k, v)
    scores = q[0, :, 0] @ k[0, :, 0].T
    scale_log2 = 32**-0.5 * math.log2(math.e)
    got, got_lse, softmax = attend(scores, v[0, :, 0], Policy(8, 0), block=16, scale_log2=scale_log2)
    np.testing.assert_allclose(got, out[0, :, 0], atol=1e-13)
    np.testing.assert_allclose(got_lse, lse[0, 0], atol=1e-13)
    lag = softmax.maximum - softmax.reference
    assert lag.max() > 8  # in units of the scores; a threshold applied to those would have moved the frame
    assert (lag * scale_log2 <= 8).all()


def test_retained_reference_is_not_the_maximum():
    """The specification's example: after three blocks the maximum is 2 and the reference still 0."""
    softmax = RetainedSoftmax((1,), Policy(8, 0))
    for block in ([0.0, -1.0], [1.0, 0.5], [2.0, -3.0]):
        _, gamma = softmax.update(np.array([block]))
    assert (softmax.maximum.item(), softmax.reference.item(), gamma.item()) == (2, 0, 1)
    b = np.array([0.0, -1, 1, 0.5, 2, -3])
    inverse, lse = softmax.finish()
    assert inverse.item() == pytest.approx(1 / np.exp2(b).sum(), rel=1e-15)
    assert lse.item() == pytest.approx(dense_row(b, np.zeros(6))[1], rel=1e-15)


def test_threshold_zero_is_the_ordinary_online_softmax_bit_for_bit():
    rng = np.random.default_rng(5)
    scores = (9 * rng.standard_normal((7, 96))).astype(np.float32)
    scores[2, :40] = scores[3] = -np.inf
    scores[4, 50:] = -np.inf
    online, retained = OnlineSoftmax((7,), 0.3), RetainedSoftmax((7,), Policy(0, 0), scale_log2=0.3, dtype=np.float32)
    with np.errstate(divide="ignore"):
        for begin in range(0, 96, 16):
            (P, shrink), (Q, gamma) = (s.update(scores[:, begin : begin + 16]) for s in (online, retained))
            np.testing.assert_array_equal(P, Q)
            seen = ~np.isneginf(online.maximum)
            np.testing.assert_array_equal(shrink[seen], gamma[seen])
            np.testing.assert_array_equal(online.sum, retained.sum)
            np.testing.assert_array_equal(online.maximum, retained.reference)
        for x, y in zip(online.finish(), retained.finish(), strict=True):
            np.testing.assert_array_equal(x, y)
    assert Q.dtype == gamma.dtype == np.float32


# --- masks and special values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vote_rows", [1, 2])
def test_rows_without_keys(dtype, vote_rows):
    b = np.array([[-np.inf] * 6, [-np.inf] * 4 + [1.0, 3.0], [5.0] + [-np.inf] * 5, [0.0] * 6])
    out, lse, _ = attend(b, np.ones((6, 3)), Policy(8, 4), block=2, dtype=dtype, vote_rows=vote_rows)
    np.testing.assert_allclose(out, np.array([0, 1, 1, 1])[:, None] * np.ones(3), rtol=1e-6)
    np.testing.assert_allclose(lse, np.array([-np.inf, math.log(10), 5 * math.log(2), math.log(6)]), rtol=1e-6)


def test_gamma_before_the_first_key():
    softmax = RetainedSoftmax((2,), Policy(8, 0))
    masked = np.full((2, 3), -np.inf)
    _, gamma = softmax.update(masked)
    assert gamma.tolist() == [[1], [1]]  # the frame is kept
    _, gamma = softmax.update(np.array([[-np.inf, 2.0], [-np.inf, -np.inf]]))
    assert gamma.tolist() == [[0], [1]]  # what preceded the first key is nothing
    assert softmax.rescales.tolist() == [0, 0]
    assert softmax.reference.tolist() == [[2], [-np.inf]]


def test_reference_passes_over_a_nan():
    softmax = RetainedSoftmax((1,), Policy(8, 0))
    P, _ = softmax.update(np.array([[1.0, np.nan, 3.0]]))
    assert softmax.reference.item() == softmax.maximum.item() == 3
    np.testing.assert_array_equal(P, [[0.25, np.nan, 1]])
    assert np.isnan(softmax.sum).all()


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_poison_stays_in_its_row(special):
    b, v = random_rows(rows=16, keys=32)
    clean, clean_lse, _ = attend(b, v, Policy(8, 0), block=8, vote_rows=16)
    b[3, 20] = special
    out, lse, _ = attend(b, v, Policy(8, 0), block=8, vote_rows=16)
    assert np.isnan(out[3]).all()
    assert np.isnan(lse[3])
    rest = np.arange(16) != 3
    np.testing.assert_allclose(out[rest], clean[rest], atol=1e-12)
    np.testing.assert_allclose(lse[rest], clean_lse[rest], atol=1e-12)


# --- range -----------------------------------------------------------------------------------------------------------


def test_envelopes_of_the_table():
    table = {name: (p.tau, p.omega, p.largest, FORMATS[name].max) for name, p in POLICIES.items()}
    assert table == {
        "bfloat16": (8, 0, 256, BFLOAT16.max),
        "float16": (8, 0, 256, 65504),
        "float8_e4m3fn": (4, 4, 256, 448),
        "float8_e5m2": (4, 8, 4096, 57344),
    }
    assert POLICIES["float8_e4m3fn"].headroom(E4M3FN) == 1.75
    for name, policy in POLICIES.items():
        policy.check(FORMATS[name])


def test_later_choices_for_8_bit_have_the_same_envelope():
    assert Policy(0, 8).largest == POLICIES["float8_e4m3fn"].largest


@pytest.mark.parametrize(
    ("policy", "fmt"), [(Policy(8, 4), E4M3FN), (Policy(4, 5), E4M3FN), (Policy(8, 8), E5M2), (Policy(17, 0), FLOAT16)]
)
def test_envelope_that_does_not_fit(policy, fmt):
    with pytest.raises(RangeExceeded, match=f"exceeds .* of {fmt.name}"):
        policy.check(fmt)


@SETTINGS
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 4.0, 8.0]), st.sampled_from([0.0, 4.0, 8.0, -2.0]),
       st.sampled_from([1, 16]))  # fmt: skip
def test_p_never_exceeds_its_bound(seed, tau, omega, vote_rows):
    rng = np.random.default_rng(seed)
    b = np.cumsum(rng.uniform(-4, 5, (16, 64)), axis=1)  # drifts upwards: the frame keeps lagging
    follow, softmax = (
        RetainedSoftmax((16,), Policy(0, omega)),
        RetainedSoftmax((16,), Policy(tau, omega), vote_rows=vote_rows),
    )
    for begin in range(0, 64, 4):
        block = b[:, begin : begin + 4]
        P, gamma = softmax.update(block)
        always, _ = follow.update(block)
        assert P.max() <= 2 ** (tau + omega) * (1 + 1e-12)
        assert ((gamma > 0) | (begin == 0)).all()
        assert (gamma <= 1).all()
        # The price of lagging is at the top only: every P is at least as large as in the frame that follows.
        assert (P / always).min() >= 1 - 1e-12


@pytest.mark.parametrize("name", POLICIES)
def test_monotone_rows_reach_the_bound(name):
    policy, fmt = POLICIES[name], FORMATS[name]
    v = np.arange(40.0)[:, None]
    rescales = {}
    for step in (policy.tau, policy.tau * (1 + 2**-20), policy.tau / 8):
        b = staircase(20, 2, step)[None]
        softmax = RetainedSoftmax((1,), policy)
        largest = max(softmax.update(b[:, n : n + 2])[0].max() for n in range(0, 40, 2))
        rescales[step] = int(softmax.rescales[0])
        assert largest <= policy.largest
        if step <= policy.tau:
            assert largest == policy.largest
        out, lse, _ = attend(b, v, policy, block=2)
        expected, expected_lse = dense_row(b, v)
        np.testing.assert_allclose(out, expected, rtol=1e-13)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-13)
        rounded, _, _ = attend(b, v, policy, block=2, p_format=fmt)
        np.testing.assert_allclose(rounded, expected, rtol=fmt.epsilon / 2)
    assert list(rescales.values()) == [9, 19, 2]  # every second block; every block; every ninth


def test_fewer_rescales_with_a_larger_threshold():
    b, v = random_rows(rows=64, keys=512, spread=2.0)
    counts = [int(attend(b, v, Policy(tau, 0), block=16)[2].rescales.sum()) for tau in (0, 1, 2, 4, 8)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 100 > counts[-1] == 0


# --- voting ----------------------------------------------------------------------------------------------------------


def test_vote_moves_all_rows_of_a_warp_together():
    softmax = RetainedSoftmax((32,), Policy(8, 0), vote_rows=16)
    softmax.update(np.zeros((32, 1)))
    grown = np.full((32, 1), 3.0)
    grown[5] = 9.0
    grown[7] = -1.0
    P, gamma = softmax.update(grown)
    np.testing.assert_array_equal(
        softmax.reference[:16, 0], np.where(np.arange(16) == 5, 9, np.where(np.arange(16) == 7, 0, 3))
    )
    np.testing.assert_array_equal(softmax.reference[16:], 0)  # the other warp keeps its frame
    assert gamma[7] == 1
    assert P[7] == 0.5
    assert (gamma[16:] == 1).all()
    assert softmax.rescales.sum() == 15


def test_vote_needs_whole_warps():
    with pytest.raises(ValueError, match="24 rows are no multiple of the 16"):
        RetainedSoftmax((24,), Policy(8, 0), vote_rows=16)


# --- the failures of the section -------------------------------------------------------------------------------------


def recurrence(b, v, policy, block, fault=""):
    """One row in float64, straight from the formulas, with one fault on demand."""
    r, D, N = -np.inf, 0.0, np.zeros(v.shape[1])
    for n in range(0, len(b), block):
        x, w = b[n : n + block], v[n : n + block]
        c = max(r, x.max())
        new = c if c - r > policy.tau else r
        gamma = 2.0 ** (r - new) if np.isfinite(r) else 0.0
        P = 2.0 ** (x - (c if fault == "centred on the candidate" else new) + policy.omega)
        D = (1 if fault == "only N" else gamma) * D + P.sum()
        N = (1 if fault == "only D" else gamma) * N + P @ w
        r = new
    offset = 0 if fault == "offset left out" else policy.omega
    return N / D, (r + math.log2(D) - offset) * math.log(2)


@pytest.fixture(scope="module")
def rising():
    b = np.array([0.0, 1, 3, 5, 2, 7, 12, 11, 30, 28, 33, 31])
    return b, np.random.default_rng(1).standard_normal((12, 4))


@pytest.mark.parametrize("policy", [Policy(0, 0), Policy(8, 0), Policy(4, 4)])
def test_formulas_without_a_fault(rising, policy):
    out, lse = recurrence(*rising, policy, 2)
    expected, expected_lse = dense_row(*rising)
    np.testing.assert_allclose(out, expected, rtol=1e-14)
    assert lse == pytest.approx(expected_lse, rel=1e-14)
    got, got_lse, _ = attend(rising[0][None], rising[1], policy, block=2)
    np.testing.assert_allclose(got[0], out, rtol=1e-14)
    assert got_lse.item() == pytest.approx(lse, rel=1e-14)


def test_block_centred_on_the_candidate_drifts_only_when_an_update_is_skipped(rising):
    expected, _ = dense_row(*rising)
    always, _ = recurrence(*rising, Policy(0, 0), 2, "centred on the candidate")
    skipped, _ = recurrence(*rising, Policy(8, 0), 2, "centred on the candidate")
    np.testing.assert_allclose(always, expected, rtol=1e-14)
    assert np.abs(skipped - expected).max() > 0.1


@pytest.mark.parametrize("fault", ["only D", "only N"])
def test_converting_one_state_breaks_the_ratio(rising, fault):
    expected, expected_lse = dense_row(*rising)
    out, lse = recurrence(*rising, Policy(8, 0), 2, fault)
    assert np.abs(out - expected).max() > 0.5
    if fault == "only D":
        assert lse == pytest.approx(expected_lse, rel=1e-14)  # the denominator looks right


@pytest.mark.parametrize("omega", [4, 8])
def test_offset_left_out_of_the_lse_is_a_constant_bias(rising, omega):
    expected, expected_lse = dense_row(*rising)
    out, lse = recurrence(*rising, Policy(4, omega), 2, "offset left out")
    np.testing.assert_allclose(out, expected, rtol=1e-14)
    assert lse - expected_lse == pytest.approx(omega * math.log(2), rel=1e-12)


def test_threshold_and_offset_too_large_for_e4m3_saturate_p():
    b, v = staircase(12, 1, 4.0)[None], np.eye(12)
    good, bad = POLICIES["float8_e4m3fn"], POLICIES["float8_e5m2"]  # the latter belongs to the wider format
    expected, _ = dense_row(b, v)
    out, _, _ = attend(b, v, good, block=1, p_format=E4M3FN)
    np.testing.assert_allclose(out, expected, rtol=E4M3FN.epsilon / 2, atol=1e-6)
    saturated, _, _ = attend(b, v, bad, block=1, p_format=E4M3FN)
    assert np.abs(saturated - expected).max() > 0.5
    np.testing.assert_allclose(attend(b, v, bad, block=1)[0], expected, rtol=1e-13)  # real numbers do not mind
    with pytest.raises(RangeExceeded):
        bad.check(E4M3FN)


@pytest.mark.parametrize(("tau", "fmt"), [(17.0, FLOAT16), (200.0, BFLOAT16)])
def test_threshold_too_large_overflows_on_monotone_rows(tau, fmt):
    b, v = staircase(9, 4, tau / 8)[None], np.ones((36, 2))
    with np.errstate(invalid="ignore", over="ignore"):
        out, _, _ = attend(b, v, Policy(tau, 0), block=4, dtype=np.float32, p_format=fmt)
    assert not np.isfinite(out).all()
    with pytest.raises(RangeExceeded):
        Policy(tau, 0).check(fmt)


def test_mean_error_hides_the_rows_that_matter():
    """A saturated P in a few rows: the mean over all rows stays small, the maximum does not."""
    b, v = random_rows(rows=2000, keys=64, spread=0.5, dims=4)
    b[7], b[1203] = staircase(64, 1, 4.0), staircase(64, 1, 3.0)
    out, _, _ = attend(b, v, Policy(4, 8), block=1, p_format=E4M3FN)
    error = np.abs(out - dense_row(b, v)[0]).max(axis=1)
    assert error.mean() < 0.02
    assert np.median(error) < 0.02
    assert error.max() > 0.3


# --- with the polynomial ---------------------------------------------------------------------------------------------


def test_output_with_emulated_exponentials():
    """In bfloat16 P the polynomial does not show; with float32 P it does, in the lse first of all."""
    b, v = random_rows(rows=64, keys=512, spread=3.0)
    expected, expected_lse = dense_row(b, v)

    def run(exp2, p_format):
        out, lse, _ = attend(b, v, Policy(8, 0), block=128, dtype=np.float32, p_format=p_format, exp2=exp2)
        return np.abs(out - expected).max(), np.abs(lse - expected_lse).max()

    def emulated(x):
        return mixed_exp2(x, TUNING["SM100 2-CTA full d=128"]) if x.shape[-1] > 1 else np.exp2(x)

    plain, plain_lse = run(np.exp2, None)
    mixed, mixed_lse = run(emulated, None)
    assert mixed > 5 * plain
    assert mixed_lse > 5 * plain_lse
    assert mixed_lse < 8.8e-5
    assert run(emulated, BFLOAT16)[0] < 1.05 * run(np.exp2, BFLOAT16)[0]


# --- bad calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tau", "omega"), [(-1, 0), (math.inf, 0), (math.nan, 0), (0, math.inf), (0, math.nan)])
def test_policies_that_are_none(tau, omega):
    with pytest.raises(ValueError, match=r"policy: (tau|omega) is .* must be finite"):
        Policy(tau, omega)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scale_is_positive(scale):
    with pytest.raises(ValueError, match=r"scale_log2 is .* must be positive"):
        RetainedSoftmax((1,), Policy(0, 0), scale_log2=scale)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="scores have shape"):
        RetainedSoftmax((3,), Policy(0, 0)).update(np.zeros((4, 2)))
    with pytest.raises(ValueError, match="attend: scores"):
        attend(np.zeros((2, 3)), np.zeros((4, 1)), Policy(0, 0), block=1)
    with pytest.raises(ValueError, match="block is 0"):
        attend(np.zeros((2, 3)), np.zeros((3, 1)), Policy(0, 0), block=0)


def test_ml_dtypes_agrees_on_rounded_p():
    b, v = random_rows(rows=4, keys=64)
    rounded, _, _ = attend(b, v, Policy(8, 0), block=64, dtype=np.float32, p_format=BFLOAT16)
    m = b.astype(np.float32).max(axis=1, keepdims=True)
    P = np.exp2(b.astype(np.float32) - m)
    expected = (P.astype(ml_dtypes.bfloat16).astype(np.float32) @ v.astype(np.float32)) / P.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(rounded, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RetainedSoftmax((), Policy(0, 0)), r"shape is \(\)"),
        (lambda: RetainedSoftmax((-1,), Policy(0, 0)), r"shape is \(-1,\)"),
        (lambda: RetainedSoftmax((2,), Policy(0, 0)).update(np.zeros((2, 0))), r"scores have shape"),
        (lambda: Policy(2000, 0).check(E4M3FN), r"= inf exceeds 448"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
