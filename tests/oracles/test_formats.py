"""The formats against ml_dtypes and NumPy: every code, every tie, a million random values."""

import ml_dtypes
import numpy as np
import pytest

from cupyfa.oracles.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FORMATS, Format, format_of

INDEPENDENT = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def reference_codes(fmt, x, saturate):
    """What ml_dtypes makes of float32 or float64 values; it never saturates, so they are clipped before."""
    if saturate:
        x = np.clip(x, -fmt.max, fmt.max)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x).astype(INDEPENDENT[fmt.name]).view(fmt.code_dtype)


def assert_same_codes(fmt, codes, expected):
    """Equal bit for bit; NaN only has to be NaN, since payload and sign are not part of the contract."""
    nan = np.isnan(fmt.decode(expected))
    np.testing.assert_array_equal(np.isnan(fmt.decode(codes)), nan)
    np.testing.assert_array_equal(codes[~nan], expected[~nan])


@ALL
def test_every_code(fmt):
    codes = np.arange(2**fmt.bits, dtype=fmt.code_dtype)
    book = fmt.codebook()
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = codes.view(INDEPENDENT[fmt.name]).astype(np.float64)
    np.testing.assert_array_equal(book, expected)
    np.testing.assert_array_equal(np.signbit(book), codes >= 2 ** (fmt.bits - 1))
    assert_same_codes(fmt, fmt.encode(book, saturate=False), codes)
    finite = np.isfinite(book)
    np.testing.assert_array_equal(fmt.encode(book[finite]), codes[finite])


def test_ranges_of_the_specification():
    assert (E4M3FN.max, E4M3FN.min_subnormal) == (448.0, 0.001953125)
    assert E4M3FN.min_subnormal == 2**-9
    assert (E5M2.max, E5M2.min_subnormal) == (57344.0, 2**-16)
    assert FLOAT16.max == 65504.0
    assert BFLOAT16.max == float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


@ALL
def test_derived_constants(fmt):
    info = (ml_dtypes.finfo if fmt is not FLOAT16 else np.finfo)(INDEPENDENT[fmt.name])
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.epsilon == float(info.eps)
    assert np.isnan(fmt.codebook()[fmt.nan_code])


def test_nan_and_infinity_of_the_8_bit_formats():
    e4m3, e5m2 = E4M3FN.codebook(), E5M2.codebook()
    assert np.flatnonzero(np.isnan(e4m3)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(e4m3).any()
    assert np.flatnonzero(np.isnan(e5m2)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert np.flatnonzero(np.isinf(e5m2)).tolist() == [0x7C, 0xFC]
    for fmt in (E4M3FN, E5M2):
        assert np.isnan(fmt.round([np.nan, -np.nan])).all()
        np.testing.assert_array_equal(fmt.round([np.inf, -np.inf, 1e30]), [fmt.max, -fmt.max, fmt.max])
    assert E4M3FN.encode([np.nan]).tolist() == [0x7F]
    assert E4M3FN.encode([np.inf], saturate=False).tolist() == [0x7F]
    assert E5M2.encode([np.inf, 1e9], saturate=False).tolist() == [0x7C, 0x7C]


def ties(fmt):
    """The midpoints of neighbouring finite values, both signs, and the one beyond the largest; exact in float64."""
    book = fmt.codebook()[: fmt.max_code + 1]
    beyond = fmt.max + (book[-1] - book[-2]) / 2
    middle = np.append((book[:-1] + book[1:]) / 2, beyond)
    return np.concatenate([middle, -middle])


@ALL
@pytest.mark.parametrize("saturate", [True, False])
def test_all_ties_and_their_neighbours(fmt, saturate):
    middle = ties(fmt)
    middle32 = middle.astype(np.float32)
    np.testing.assert_array_equal(middle32.astype(np.float64), middle)  # a tie stays a tie: one bit more than bfloat16
    for x in (middle32, np.nextafter(middle32, np.float32(np.inf)), np.nextafter(middle32, np.float32(-np.inf))):
        assert_same_codes(fmt, fmt.encode(x, saturate=saturate), reference_codes(fmt, x, saturate))


@ALL
def test_ties_go_to_the_even_code(fmt):
    middle = ties(fmt)
    codes = fmt.encode(middle, saturate=False)
    inner = np.isfinite(fmt.decode(codes))
    assert (codes[inner] % 2 == 0).all()
    half = len(middle) // 2
    last = codes[half - 1]  # between the largest value and what follows it
    assert last == (fmt.max_code if fmt.max_code % 2 == 0 else fmt.max_code + 1)


@ALL
@pytest.mark.parametrize("saturate", [True, False])
def test_a_million_random_values(fmt, saturate):
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)  # any float32, NaN and infinity too
    near = np.ldexp(rng.standard_normal(500_000), rng.integers(-30, 20, 500_000)).astype(np.float32)
    x = np.concatenate([bits, near])
    assert_same_codes(fmt, fmt.encode(x, saturate=saturate), reference_codes(fmt, x, saturate))


def test_float64_is_rounded_once():
    # By way of float32 this value becomes the tie 1 + 2**-8 and then, to even, 1.
    x = 1 + 2.0**-8 + 2.0**-40
    assert float(np.float32(x)) == 1 + 2.0**-8
    assert BFLOAT16.round([x])[0] == 1 + 2.0**-7
    assert float(np.float32(x).astype(ml_dtypes.bfloat16)) == 1.0


@ALL
def test_rounding_is_monotone_and_within_half_a_step(fmt):
    x = np.sort(np.random.default_rng(1).uniform(-fmt.max, fmt.max, 20_000))
    r = fmt.round(x)
    assert (np.diff(r) >= 0).all()
    assert (np.abs(r - x) <= np.maximum(np.abs(x) * fmt.epsilon, fmt.min_subnormal) / 2).all()


@ALL
def test_shapes_and_signed_zero(fmt):
    assert fmt.encode(np.zeros((2, 0, 3))).shape == (2, 0, 3)
    assert fmt.encode(1.0).shape == ()
    assert fmt.decode(np.zeros((3, 2), np.uint8)).shape == (3, 2)
    assert fmt.encode([-0.0]).tolist() == [2 ** (fmt.bits - 1)]
    assert np.signbit(fmt.round([-fmt.min_subnormal / 4]))[0]


@pytest.mark.parametrize(
    ("codes", "message"),
    [([1.0], "must be integers"), ([-1], "outside"), ([256], "outside"), ([True], "must be integers")],
)
def test_codes_that_are_none(codes, message):
    with pytest.raises(ValueError, match=f"float8_e4m3fn: .*{message}"):
        E4M3FN.decode(codes)


def test_unknown_format():
    assert format_of("float8_e5m2") is E5M2
    with pytest.raises(ValueError, match="'e3m4' is none of float8_e4m3fn"):
        format_of("e3m4")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Format("e4m4", 4, 4, True, False), r"8 or 16 with the sign"),
        (lambda: Format("e7m0", 7, 0, True, False), r"at least 2 and 1"),
        (lambda: Format("e1m6", 1, 6, True, False), r"at least 2 and 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
