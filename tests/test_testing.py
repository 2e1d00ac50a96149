"""The tools of the other tests: each of their bounds has to be able to fail."""

import hashlib
import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cupyfa.oracles import dense, online
from cupyfa.oracles.mask import visible
from cupyfa.testing import (
    CASES,
    Case,
    as_bshd,
    assert_close,
    assert_lse_close,
    cases,
    guarded_empty,
    inputs,
    random_array,
    score_magnitude,
    ulp,
)

BF16 = ml_dtypes.bfloat16
MASK64 = (1 << 64) - 1


# ----------------------------------------------------------------------------------------------------------------------
# random_array


def splitmix64(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def test_random_array_is_splitmix64():
    # The generator's published first outputs for seed 1234567 check the hash that checks the array.
    states = [(1234567 + n * 0x9E3779B97F4A7C15) & MASK64 for n in (1, 2, 3)]
    assert [splitmix64(x) for x in states] == [6457827717110365317, 3203168211198807973, 9817491932198370423]

    offset = splitmix64(42)
    for n, value in enumerate(random_array((50,), np.float32, 42)):
        x = splitmix64(((n + 1) * 0x9E3779B97F4A7C15 + offset) & MASK64)
        total = sum((x >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
        assert value == np.float32(total - 131070) * np.float32(1 / math.sqrt((65536**2 - 1) / 3))


def test_random_array_golden():
    assert random_array((6,), np.float32, 7).view(np.uint32).tolist() == [
        0x3E2B2CE2, 0x3FA66C1E, 0xBF933B28, 0xBE223E94, 0xBECC924A, 0xBFFB4D90,
    ]  # fmt: skip
    assert random_array((6,), BF16, 7).view(np.uint16).tolist() == [0x3E2B, 0x3FA6, 0xBF93, 0xBE22, 0xBECD, 0xBFFB]
    half = random_array((6,), np.float16, 7, amplitude=8)
    assert half.view(np.uint16).tolist() == [0x3D59, 0x4933, 0xC89A, 0xBD12, 0xC265, 0xCBDA]
    digest = hashlib.sha256(random_array((3, 1000, 7), np.float32, -1).tobytes()).hexdigest()
    assert digest == "34650599a6d2c4888ac2a38c2a248247081deaf06fa94ef1668adf70f230588d"


def test_random_array_is_nearly_normal():
    x = random_array((1_000_000,), np.float32, 3).astype(np.float64)
    assert abs(x.mean()) < 4e-3
    assert abs(x.std() - 1) < 3e-3
    assert abs((x**4).mean() - 2.7) < 0.03  # four uniform pieces: 3 - 6 / (5 * 4)
    assert 3.2 < np.abs(x).max() < 3.4642
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4e-3


def test_random_arrays_of_different_seeds_are_unrelated():
    arrays = [random_array((20_000,), np.float32, seed) for seed in (0, 1, 2, 3, 1 << 40, -5)]
    correlation = np.corrcoef(arrays) - np.eye(len(arrays))
    assert np.abs(correlation).max() < 0.03
    assert not np.isin(arrays[0][:2000], arrays[1]).all(), "one stream is not a shift of the other"


def test_random_array_does_not_depend_on_the_chunk(monkeypatch):
    whole = random_array((3, 7, 11), BF16, 5)
    monkeypatch.setattr(inputs, "_CHUNK", 10)
    np.testing.assert_array_equal(random_array((3, 7, 11), BF16, 5).view(np.uint16), whole.view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
def test_random_array_has_the_same_bits_on_the_gpu(dtype):
    cupy = pytest.importorskip("cupy")
    here = random_array((100_003,), dtype, 11, amplitude=2.5)
    there = random_array((100_003,), dtype, 11, amplitude=2.5, xp=cupy)
    np.testing.assert_array_equal(there.get().view(np.uint8), here.view(np.uint8))


# ----------------------------------------------------------------------------------------------------------------------
# Guarded


def test_a_floor_is_allowed_beside_the_rule():
    reference = np.float64([[1.0, 0.0], [3.0, 4.0]])
    actual = reference.astype(np.float32)
    actual[0, 1] = 1e-5
    floor = np.float64([[0, 2e-5], [0, 0]])
    assert_close(actual, reference, reference, floor=floor)
    assert_close(actual, reference, reference, floor=2e-5)
    for missing in (0.0, floor[:, ::-1], floor / 4):
        with pytest.raises(AssertionError, match=r"^out\[0, 1\]: got 1e-05|^out\[0, 1\]: got 9\.99"):
            assert_close(actual, reference, reference, floor=missing)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3,), (2, 3, 5), (0, 4), (1, 257)])
def test_guarded_array_is_aligned_and_poisoned(shape, dtype):
    guarded = guarded_empty(shape, dtype)
    assert guarded.array.shape == shape
    assert guarded.array.dtype == np.dtype(dtype)
    assert (guarded.buffer.ctypes.data + guarded.begin) % 256 == 0
    assert guarded.array.size == 0 or guarded.array.ctypes.data % 256 == 0
    assert np.isnan(guarded.array.astype(np.float64)).all()
    assert guarded.begin >= 4096
    assert guarded.buffer.size - guarded.end >= 4096
    guarded.check()
    guarded.array[...] = 1
    guarded.check()


def test_guard_holds_the_pattern():
    guarded = guarded_empty((4,), np.float32, poison=0.5)
    assert (guarded.array == 0.5).all()
    assert (guarded.buffer[: guarded.begin].view("<u4") == 0x7FC1DEAD).all()


@pytest.mark.parametrize(("shape", "dtype"), [((3,), BF16), ((5,), np.int8), ((0,), np.float32), ((4,), np.float64)])
def test_every_changed_guard_byte_is_found(shape, dtype):
    guarded = guarded_empty(shape, dtype, poison=1, guard_bytes=16)
    for position in range(guarded.buffer.size):
        before = guarded.buffer[position]
        guarded.buffer[position] ^= 0x10
        if guarded.begin <= position < guarded.end:
            guarded.check()
        else:
            inside = position < guarded.begin
            side, distance = ("before", guarded.begin - position) if inside else ("after", position - guarded.end + 1)
            with pytest.raises(AssertionError, match=f"around lse .* 1 bytes {side} it, .* {distance} bytes from"):
                guarded.check("lse")
        guarded.buffer[position] = before
    guarded.check()


def test_both_sides_are_reported():
    guarded = guarded_empty((4, 4), np.float32)
    guarded.buffer[guarded.begin - 12 : guarded.begin - 4] = 0
    guarded.buffer[guarded.end + 2 : guarded.end + 5] = 0
    with pytest.raises(
        AssertionError, match=r"8 bytes before it, .* 5 bytes from its edge; 3 bytes after it, .* 3 bytes"
    ):
        guarded.check()


# ----------------------------------------------------------------------------------------------------------------------
# assert_close


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_ulp_is_numpy_spacing(dtype):
    x = np.concatenate([random_array((1000,), dtype, 0), dtype([1, 2, 0.5, 0, 1e-7, 6e-8]), 2.0 ** np.arange(-14, 15)])
    np.testing.assert_array_equal(ulp(x, dtype), np.spacing(np.abs(x).astype(dtype)).astype(np.float64))


def test_ulp_of_bfloat16():
    np.testing.assert_array_equal(ulp([1, 1.99, -2, 256, 0], BF16), [2**-7, 2**-7, 2**-6, 2, 2**-133])


def halves(*values):
    return np.array(values, dtype=np.float16)[None, :]


def test_global_bound_is_exact():
    step = 2**-10  # of float16 at 1
    reference = np.ones((1, 4))
    yardstick = halves(1, 1 + 8 * step, 1, 1)
    # 1.25 * 8 + 1 = 11 steps; row rule: 2 * 8 + 1 = 17 steps
    assert_close(halves(1, 1, 1 + 11 * step, 1), reference, yardstick)
    with pytest.raises(AssertionError, match=r"out\[0, 2\].*1\.25 \* max"):
        assert_close(halves(1, 1, 1 + 12 * step, 1), reference, yardstick)
    assert_close(halves(1, 1, 1 + 17 * step, 1), reference, yardstick, factor=2.0)
    with pytest.raises(AssertionError, match="allowed is"):
        assert_close(halves(1, 1, 1 + 2 * step, 1), reference, halves(1, 1, 1, 1))  # exact yardstick: 1 ulp only
    with pytest.raises(AssertionError, match=r"out\[0, 0\]"):
        assert_close(halves(1 - 12 * step, 1, 1, 1), reference, yardstick)


def test_row_bound_is_exact():
    step = 2**-10
    reference = np.array([[1024.0, 1024.0], [1.0, 1.0]])
    yardstick = np.array([[1032, 1024], [1 + 3 * step, 1]], dtype=np.float16)  # the first row's error would allow 11
    inside = np.array([[1024, 1024], [1, 1 + 7 * step]], dtype=np.float16)  # 2 * 3 + 1
    outside = np.array([[1024, 1024], [1, 1 + 8 * step]], dtype=np.float16)
    assert_close(inside, reference, yardstick)
    with pytest.raises(AssertionError, match=r"out\[1, 1\].*the row's max"):
        assert_close(outside, reference, yardstick)
    assert_close(outside, reference, yardstick, row_factor=None)


def test_message_names_everything():
    case = CASES[0]
    with pytest.raises(AssertionError) as error:
        assert_close(
            halves(1, 2.5), np.array([[1.0, 2.0]]), halves(1, 2), what="dq", context={"case": case.id, "seed": 9}
        )
    text = str(error.value)
    for part in (
        "dq[0, 1]",
        "got 2.5",
        "reference 2",
        "differ by 0.5",
        "allowed is 0.001953",
        case.id,
        "'seed': 9",
        "1 of 2",
    ):
        assert part in text


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_pattern_of_special_values_is_exact(special):
    reference = np.array([[1.0, special, 3.0]])
    good = halves(1, special, 3)
    assert_close(good, reference, good)
    for bad in (halves(1, 2, 3), halves(special, special, 3), halves(1, 65504, 3)):
        with pytest.raises(AssertionError, match="pattern differs"):
            assert_close(bad, reference, good)
    other = np.inf if special != np.inf else -np.inf
    with pytest.raises(AssertionError, match="pattern differs"):
        assert_close(halves(1, other, 3), reference, good)


def test_overflow_of_the_output_type_is_expected_as_infinity():
    reference = np.array([[1e6, 1.0]])
    assert_close(halves(np.inf, 1), reference, halves(np.inf, 1))
    with pytest.raises(AssertionError, match=r"\+inf pattern differs"):
        assert_close(halves(65504, 1), reference, halves(np.inf, 1))


def test_infinite_yardstick_does_not_open_the_bound():
    with pytest.raises(AssertionError, match="allowed is"):
        assert_close(halves(1, 3), np.array([[1.0, 1.0]]), halves(np.inf, np.nan))


def test_shapes_must_match():
    with pytest.raises(AssertionError, match="shape"):
        assert_close(halves(1, 1), np.ones((2, 1)), halves(1, 1))


def test_empty_arrays_pass():
    empty = np.empty((0, 4), np.float16)
    assert_close(empty, np.empty((0, 4)), empty)


# What a kernel might get wrong, planted into the NumPy recurrence: (name, options of the problem, fault).
FAULTS = {
    "last key dropped": lambda q, k, v, o: online.attention(q, k[:, :-1], v[:, :-1], **o),
    "one block of 16 keys dropped": lambda q, k, v, o: online.attention(
        q, np.delete(k, slice(512, 528), axis=1), np.delete(v, slice(512, 528), axis=1), **o
    ),
    "key heads taken modulo": lambda q, k, v, o: online.attention(q, k[:, :, ::-1], v[:, :, ::-1], **o),
    "scale off by 1/256": lambda q, k, v, o: online.attention(q, k, v, softmax_scale=257 / 2048, **o),
    "values shifted by one key": lambda q, k, v, o: online.attention(q, k, np.roll(v, 1, axis=1), **o),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_planted_faults_are_found(fault, dtype):
    q, k, v = (random_array((1, n, 2, 64), dtype, seed) for seed, n in enumerate((64, 1024, 1024)))
    reference, reference_lse = dense.attention(q, k, v)
    yardstick, _ = dense.same_precision(q, k, v)
    out, lse = online.attention(q, k, v)
    assert_close(out, reference, yardstick)
    assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k))
    out, lse = FAULTS[fault](q, k, v, {})
    with pytest.raises(AssertionError):
        assert_close(out, reference, yardstick)
    if "values" not in fault:
        with pytest.raises(AssertionError):
            assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k))


# What a kernel might compute instead of the options of the test below.
BIAS = random_array((100, 300), np.float32, 4)
FAULTY_OPTIONS = {
    "window too short on the left": {"window_size": (59, 20)},
    "window too long on the left": {"window_size": (61, 20)},
    "window too short on the right": {"window_size": (60, 19)},
    "window too long on the right": {"window_size": (60, 21)},
    "sides of the window swapped": {"window_size": (20, 60)},
    "no softcap": {"softcap": None},
    "softcap in base 2": {"softcap": 5.0 * math.log2(math.e)},
    "no sink": {"sink": None},
    "sink of the next head": {"sink": np.roll(np.float32([1.0, 2.5]), 1)},
    "sink in base 2": {"sink": np.float32([1.0, 2.5]) * np.float32(math.log(2))},
    "no slopes": {"alibi_slopes": None},
    "slopes of the next head": {"alibi_slopes": np.float32([0.05, 0.1])},
    "slopes in base 2": {"alibi_slopes": np.float32([0.1, 0.05]) * np.float32(math.log(2))},
    "no bias": {"bias": None},
    "bias of the next row": {"bias": np.roll(BIAS, 1, axis=0)},
    "bias of the next key": {"bias": np.roll(BIAS, 1, axis=1)},
    "bias in base 2": {"bias": BIAS * np.float32(math.log(2))},
}


@pytest.mark.parametrize("fault", FAULTY_OPTIONS)
@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_planted_faults_of_options_are_found(fault, dtype):
    options = {
        "window_size": (60, 20),
        "softcap": 5.0,
        "sink": np.float32([1.0, 2.5]),
        "alibi_slopes": np.float32([0.1, 0.05]),
        "bias": BIAS,
    }
    q, k, v = (random_array((1, n, 2, 64), dtype, seed, amplitude=1.5) for seed, n in enumerate((100, 300, 300)))
    reference, reference_lse = dense.attention(q, k, v, **options)
    yardstick, _ = dense.same_precision(q, k, v, **options)
    magnitude = score_magnitude(q, k, softcap=5.0)
    out, lse = online.attention(q, k, v, **options)
    assert_close(out, reference, yardstick)
    assert_lse_close(lse, reference_lse, score_magnitude=magnitude)
    out, lse = online.attention(q, k, v, **options | FAULTY_OPTIONS[fault])
    with pytest.raises(AssertionError):
        assert_close(out, reference, yardstick)
    with pytest.raises(AssertionError):
        assert_lse_close(lse, reference_lse, score_magnitude=magnitude)


def test_row_rule_finds_what_the_global_rule_misses():
    # Long causal problem: the first row is of order 1, the last ones are of order 0.02. A row sum that counts a few
    # keys too many there, as one without the mask of a ragged block does, stays below the first row's rounding error.
    q, k, v = (random_array((1, 2048, 1, 64), BF16, seed) for seed in range(3))
    reference, _ = dense.attention(q, k, v, causal=True)
    yardstick, _ = dense.same_precision(q, k, v, causal=True)
    out, _ = online.attention(q, k, v, causal=True)
    out[:, 1920:] = (out[:, 1920:].astype(np.float32) * 0.97).astype(BF16)
    assert_close(out, reference, yardstick, row_factor=None)
    with pytest.raises(AssertionError, match="the row's max"):
        assert_close(out, reference, yardstick)


# ----------------------------------------------------------------------------------------------------------------------
# assert_lse_close


def test_lse_bound_is_exact():
    reference = np.array([[[8.0, 0.5, -100.0]]])
    for index, bound in ((0, 32e-6), (1, 4e-6), (2, 400e-6)):
        for sign in (-1, 1):
            actual = reference.astype(np.float32)
            actual[0, 0, index] += sign * bound * 0.95
            assert_lse_close(actual, reference)
            actual[0, 0, index] = reference[0, 0, index] + sign * bound * 1.1
            with pytest.raises(AssertionError, match=rf"lse\[0, 0, {index}\].*allowed is {bound:.4g}"):
                assert_lse_close(actual, reference)
            assert_lse_close(actual, reference, score_magnitude=0.2 * bound * 2**21)
            with pytest.raises(AssertionError, match="allowed is"):
                assert_lse_close(actual, reference, score_magnitude=0.05 * bound * 2**21)


@pytest.mark.parametrize("wrong", [0.0, np.inf, np.nan, -3.4e38])
def test_lse_of_an_empty_row_must_be_minus_infinity(wrong):
    reference = np.array([[[-np.inf, 1.0]]])
    assert_lse_close(np.float32(reference), reference)
    with pytest.raises(AssertionError, match=r"pattern differs.*\n.*context: seed 3"):
        assert_lse_close(np.float32([[[wrong, 1.0]]]), reference, context="seed 3")
    with pytest.raises(AssertionError, match="-inf pattern differs"):
        assert_lse_close(np.float32([[[-np.inf, -np.inf]]]), reference)


def test_lse_type_and_shape():
    with pytest.raises(AssertionError, match="must be float32"):
        assert_lse_close(np.zeros((1, 1, 2)), np.zeros((1, 1, 2)))
    with pytest.raises(AssertionError, match="shape"):
        assert_lse_close(np.zeros((1, 2, 1), np.float32), np.zeros((1, 1, 2)))


def test_an_unbounded_magnitude_is_no_excuse():
    with pytest.raises(AssertionError, match="allowed is"):
        assert_lse_close(np.float32([[[2.0]]]), np.array([[[1.0]]]), score_magnitude=np.nan)


@pytest.mark.parametrize("scale", [None, 0.0, -0.5, 2.0])
def test_score_magnitude_bounds_the_scores(scale):
    q, k = random_array((2, 9, 6, 16), BF16, 0), random_array((2, 13, 3, 16), BF16, 1)
    magnitude = score_magnitude(q, k, scale)
    factor = 0.25 if scale is None else scale
    scores = np.einsum("bihd,bjhd->bhij", q.astype(float), np.repeat(k, 2, axis=2).astype(float)) * factor
    assert magnitude.shape == (2, 6, 9)
    assert (np.abs(scores).max(axis=-1) <= magnitude + 1e-12).all()
    assert (magnitude <= 20 * abs(factor) * 16).all()
    bad = k.copy()
    bad[0, 0, 0, 0], bad[1, 0, 0, 0] = np.nan, np.inf
    assert np.isfinite(score_magnitude(q, bad, scale)).all()


def test_score_magnitude_without_keys():
    q = np.ones((2, 3, 4, 8), np.float16)
    np.testing.assert_array_equal(score_magnitude(q, q[:, :0, :2]), np.zeros((2, 4, 3)))
    np.testing.assert_array_equal(score_magnitude(q, q[:, :0, :2], softcap=3.0), np.zeros((2, 4, 3)))


def test_score_magnitude_has_room_for_the_arithmetic_of_a_softcap():
    """One key in each row: the lse is its score, with the errors of the GPU's exp2 and reciprocal at their worst."""
    cap, units = 50.0, 2.0**-23
    scores = np.linspace(-150, 150, 20_001)
    exact = cap * np.tanh(scores / cap)
    worst = np.zeros_like(scores)
    for sign in (-1, 1):
        e = np.exp(2 * scores / cap) * (1 + sign * 2 * units)
        quotient = 2 * cap / ((e + 1) * (1 + sign * units / 2)) * (1 - sign * units)
        worst = np.maximum(worst, np.abs(cap - quotient - exact) + units / 2 * np.abs(exact))
    q = np.ones((1, 1, 1, 16), np.float32)
    magnitude = score_magnitude(q, 0 * q, softcap=cap)
    assert magnitude.item() == cap
    assert (worst < 2.0**-21 * cap).all()
    bound = 4e-6 * np.maximum(1, np.abs(exact))
    assert (worst > bound).any()  # what the rule would be without it
    assert (worst < bound + 2.0**-21 * cap).all()


# ----------------------------------------------------------------------------------------------------------------------
# Cases


def count(condition):
    return sum(1 for case in CASES if condition(case))


def test_table_is_large_and_has_no_duplicates():
    assert len(CASES) >= 150
    assert len({case.id for case in CASES}) == len(CASES)
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 257), (239, 1), (113, 203), (1023, 1024)])
def test_anchor_shapes_come_in_every_mode(lengths):
    modes = {(c.dtype, c.causal) for c in CASES if (c.seqlen_q, c.seqlen_k) == lengths}
    assert modes == {(dtype, causal) for dtype in ("float16", "bfloat16") for causal in (False, True)}


@pytest.mark.parametrize(
    ("condition", "at_least"),
    [
        (lambda c: (c.seqlen_q, c.seqlen_k) == (4224, 4224), 2),
        (lambda c: c.seqlen_k == 0 and c.batch and c.seqlen_q, 2),
        (lambda c: c.seqlen_q == 0, 2),
        (lambda c: c.batch == 0, 2),
        (lambda c: (c.seqlen_q, c.seqlen_k, c.causal) == (5, 2, True), 2),
        (lambda c: c.causal and c.seqlen_q > c.seqlen_k > 0, 10),
        (lambda c: c.causal and c.seqlen_q < c.seqlen_k, 30),
        (lambda c: c.causal and c.seqlen_q - c.seqlen_k >= 192, 3),  # whole tiles that see nothing
        (lambda c: c.softmax_scale == 0, 4),
        (lambda c: c.softmax_scale is not None and c.softmax_scale < 0, 8),
        (lambda c: c.amplitude == 8.0, 10),
        (lambda c: c.layout == "BHSD", 6),
        (lambda c: c.batch > 65_535, 1),
        (lambda c: c.heads_q > 65_535, 1),
        (lambda c: c.batch * c.heads_q * -(-c.seqlen_q // 192) > 3 * 132, 8),  # several tiles per multiprocessor
        (lambda c: c.seqlen_q <= 64 and 0 < c.seqlen_k <= 64, 4),  # one block in all
        (lambda c: c.seqlen_k > 4096, 3),
        (lambda c: c.window_size != (None, None), 40),
        (lambda c: c.window_size == (0, 0), 3),
        (lambda c: c.window_size[0] is None and c.window_size[1] is not None, 6),
        (lambda c: c.window_size[0] is not None and c.window_size[1] is None and not c.causal, 6),
        (lambda c: c.window_size[0] is not None and c.causal, 12),
        (lambda c: min(x or 0 for x in c.window_size) > max(c.seqlen_q, c.seqlen_k), 1),
        (lambda c: c.window_size != (None, None) and not unseen(c).any() and c.seqlen_q > 0, 30),
        (lambda c: c.window_size != (None, None) and c.seqlen_k and unseen(c).any(), 8),
        (lambda c: c.window_size != (None, None) and c.seqlen_k and unseen(c)[:192].all(), 2),
        (lambda c: c.window_size != (None, None) and c.batch * c.heads_q * -(-c.seqlen_q // 128) > 3 * 132, 2),
        (lambda c: c.softcap is not None and c.amplitude == 30.0, 4),
        (lambda c: c.softcap is not None and c.softmax_scale is not None and c.softmax_scale < 0, 2),
        (lambda c: c.softcap is not None and c.softmax_scale == 0, 2),
        (lambda c: c.sink and c.amplitude == 8.0, 4),
        (lambda c: c.sink and c.heads_q > c.heads_kv, 8),
        (lambda c: c.sink and c.causal and c.seqlen_q > c.seqlen_k, 2),
        (lambda c: c.sink and c.seqlen_k == 0, 2),
        (lambda c: c.alibi and c.causal and c.seqlen_q > c.seqlen_k, 2),
        (lambda c: c.alibi and not c.causal and c.seqlen_q > c.seqlen_k, 2),
        (lambda c: c.alibi and not c.causal and c.seqlen_q < c.seqlen_k, 2),
        (lambda c: c.alibi and c.options["alibi_slopes"].ndim == 2, 4),
        (lambda c: c.alibi and c.options["alibi_slopes"].ndim == 1, 4),
        (lambda c: c.alibi and c.options["alibi_slopes"].max() > 0.9, 1),
        (lambda c: c.window_size != (None, None) and c.softcap and c.sink and c.alibi, 10),
        (lambda c: c.sink and c.alibi and c.layout == "BHSD", 2),
        *((lambda c, axes=axes: c.bias == axes, 2) for axes in ("bhqk", "hqk", "bqk", "qk", "bk", "k", "bhq")),
        (lambda c: c.bias and c.bias_dtype == "same" and c.dtype == "float16", 4),
        (lambda c: c.bias and c.bias_dtype == "same" and c.dtype == "bfloat16", 4),
        (lambda c: c.bias and c.bias_dtype == "float32", 20),
        (lambda c: c.bias and c.seqlen_k % 8, 8),  # rows that are no multiples of 16 bytes
        (lambda c: c.bias and c.causal and c.seqlen_q > c.seqlen_k, 1),
        (lambda c: c.bias and c.batch * c.heads_q * -(-c.seqlen_q // 128) > 2 * 132, 2),
        (lambda c: c.bias and c.window_size != (None, None) and c.softcap and c.sink and c.alibi, 6),
    ],
)
def test_table_has(condition, at_least):
    assert count(condition) >= at_least


def unseen(case):
    """Which rows see no key."""
    return ~visible(case.seqlen_q, case.seqlen_k, case.causal, window_size=case.window_size).any(axis=1)


def test_every_pair_of_options_is_in_the_table():
    fields = {"window_size": (None, None), "softcap": None, "sink": False, "alibi": False, "bias": ""}
    used = {tuple(name for name, unset in fields.items() if getattr(c, name) != unset) for c in CASES}
    assert used >= set(itertools.combinations(fields, 2)) | {tuple(fields)} | {(name,) for name in fields}


@pytest.mark.parametrize("option", ["window", "softcap", "sink", "alibi", "bias", "mixed"])
def test_options_come_in_every_tile_and_both_types(option):
    found = [c for c in CASES if c.group == option]
    assert {c.head_dim_v or c.head_dim for c in found} >= {64, 128, 192, 256}
    assert (192, 128) in {(c.head_dim, c.head_dim_v) for c in found}
    assert {c.dtype for c in found} == {"float16", "bfloat16"}
    assert {c.causal for c in found} == {False, True}


@pytest.mark.parametrize(("head_dim", "tile_n"), [(64, 128), (96, 192), (128, 128), (192, 80), (192, 96), (256, 64)])
def test_windows_begin_and_end_at_the_edges_of_blocks(head_dim, tile_n):
    begins, ends = set(), set()
    for c in CASES:
        if c.head_dim == head_dim and None not in c.window_size:
            first = c.seqlen_k - c.seqlen_q - c.window_size[0]
            end = c.seqlen_k - c.seqlen_q + c.window_size[1] + 1
            begins |= {first % tile_n} if first > 0 else set()
            ends |= {end % tile_n}
    assert begins >= {tile_n - 1, 0, 1}
    assert ends >= {0, 1, 2}  # the last key is one before the edge, the first one behind it, and the next one


def test_table_has_every_head_dim_in_both_types():
    assert {(c.head_dim, c.dtype) for c in CASES} >= {(d, t) for d in range(8, 257, 8) for t in ("float16", "bfloat16")}


def test_table_has_the_head_ratios_of_bug_reports():
    assert {(c.heads_q, c.heads_kv) for c in CASES} >= {(96, 8), (14, 2), (9, 3), (6, 1), (21, 7), (8, 1), (5, 5)}


def test_main_head_dims_come_in_every_mode():
    for head_dim in (64, 128, 256):
        assert len({(c.dtype, c.causal) for c in CASES if c.head_dim == head_dim}) == 4


def test_cases_are_valid_and_cheap():
    for case in CASES:
        assert case.head_dim % 8 == 0
        assert 8 <= case.head_dim <= 256
        assert case.heads_q % case.heads_kv == 0
    work = sum(4 * c.batch * c.heads_q * c.seqlen_q * c.seqlen_k * c.head_dim for c in CASES)
    assert work < 1.65e11, "a float64 oracle takes about ten seconds for this, on two cores"


def test_every_group_says_why_it_is_there():
    for group in {case.group for case in CASES}:
        text = getattr(cases, f"_{group}").__doc__
        assert "hows " in text or "show a" in text or "fails here" in text


def test_amplitude_forces_one_hot_rows():
    case = next(c for c in CASES if c.amplitude == 8.0 and c.seqlen_k > 300)
    q, k, v = (as_bshd(x, case.layout) for x in case.make_inputs())
    _, lse = dense.attention(q, k, v, **case.options)
    assert np.nanmax(lse[np.isfinite(lse)]) > 150


def test_inputs_follow_the_layout():
    case = Case("layout", 2, 5, 7, 4, 2, 8, "float16")
    q, k, v = case.make_inputs(seed=1)
    assert (q.shape, k.shape, v.shape) == ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    assert q.dtype == k.dtype == v.dtype == np.float16
    turned = replace(case, layout="BHSD").make_inputs(seed=1)
    assert turned[0].shape == (2, 4, 5, 8)
    assert as_bshd(turned[1], "BHSD").shape == (2, 7, 2, 8)
    assert np.shares_memory(as_bshd(turned[1], "BHSD"), turned[1])
    others = [*case.make_inputs(seed=2), *case.make_inputs(seed=1)[1:]]
    assert all(not np.array_equal(q.ravel()[:50], other.ravel()[:50]) for other in others)
    np.testing.assert_array_equal(case.make_inputs(seed=1)[0], q)
    loud = replace(case, amplitude=8.0).make_inputs(seed=1)
    np.testing.assert_array_equal(loud[2], v)
    assert loud[0].astype(float).std() / q.astype(float).std() == pytest.approx(8, rel=1e-2)


def test_options_hold_what_is_set():
    plain = Case("options", 1, 5, 7, 4, 2, 8)
    assert plain.options == {"softmax_scale": None, "causal": False}
    assert replace(plain, window_size=(3, None)).options == plain.options | {"window_size": (3, None)}
    assert replace(plain, softcap=2.0).options == plain.options | {"softcap": 2.0}
    for heads in (1, 2, 4, 9):
        options = replace(plain, heads_q=heads, heads_kv=1, sink=True, alibi=True).options
        sink, slopes = options["sink"], options["alibi_slopes"]
        assert sink.shape == slopes.shape == (heads,)
        assert sink.dtype == slopes.dtype == np.float32
        assert (np.isneginf(sink) == (np.arange(heads) == 3)).all()
        assert (sink == 6).any() == (heads > 1)
        np.testing.assert_allclose(slopes, [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], rtol=1e-7)
        if heads > 1:
            assert len(set(sink)) > 1
    slopes = replace(plain, batch=2, alibi=True).options["alibi_slopes"]
    assert slopes.shape == (2, 4)
    np.testing.assert_array_equal(slopes[1], slopes[0, [1, 2, 3, 0]])
    assert replace(plain, batch=0, alibi=True).options["alibi_slopes"].shape == (4,)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("bhqk", (2, 4, 20, 30)),
        ("hqk", (4, 20, 30)),
        ("bqk", (2, 1, 20, 30)),
        ("qk", (20, 30)),
        ("bk", (2, 1, 1, 30)),
        ("k", (1, 30)),
        ("bhq", (2, 4, 20, 1)),
    ],
)
def test_a_case_has_a_bias_of_some_axes(axes, shape):
    case = Case("bias", 2, 20, 30, 4, 2, 8, bias=axes)
    bias = case.options["bias"]
    assert (bias.shape, bias.dtype) == (shape, np.float32)
    assert replace(case, bias_dtype="same").options["bias"].dtype == BF16
    assert np.isneginf(bias).any()
    if "q" in axes:
        assert np.isneginf(bias[..., 7, :]).all()
        assert (bias[..., 8, :] == np.finfo(np.float32).min).all()
        assert not (replace(case, sink=True).options["bias"] == np.finfo(np.float32).min).any()
        assert np.isfinite(bias[..., 9, :]).any()
    assert case.id == f"bias-b2-q20-k30-h4x2-d8-bf16-bias_{axes}_float32"


def test_options_go_where_the_kernel_is():
    class Elsewhere:
        @staticmethod
        def asarray(x):
            return ("there", x.tobytes())

    case = Case("options", 1, 5, 7, 4, 2, 8, window_size=(3, 1), softcap=2.0, sink=True, alibi=True, bias="qk")
    there = case.options_on(Elsewhere)
    for name, value in case.options.items():
        assert there[name] == (("there", value.tobytes()) if name in ("sink", "alibi_slopes", "bias") else value)


def test_id_tells_everything_that_differs():
    case = Case("all", 1, 2, 3, 4, 2, 64, window_size=(128, 0), softcap=30.0, sink=True, alibi=True)
    assert case.id == "all-b1-q2-k3-h4x2-d64-bf16-w128,0-cap30-sink-alibi"
    assert replace(case, window_size=(None, 5)).id == "all-b1-q2-k3-h4x2-d64-bf16-winf,5-cap30-sink-alibi"
    case = Case("scale", 1, 2, 3, 4, 2, 64, "float16", True, -0.5, "BHSD", 8.0)
    assert case.id == "scale-b1-q2-k3-h4x2-d64-fp16-causal-scale-0.5-amp8-BHSD"
    assert case.options == {"softmax_scale": -0.5, "causal": True}
