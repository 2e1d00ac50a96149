"""Who computes which exponential: the fragment predicate and the pinned rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.exp2.fragments import TUNING, Emulation, mixed_exp2
from cupyfa.oracles.exp2.polynomial import exp2_hardware, exp2_polynomial

ROWS = [
    ("SM100 2-CTA full d=128", (10, 4, 1), 24, 18.75),
    ("SM100 1-CTA causal d=128", (16, 4, 1), 16, 12.5),
    ("SM100 2-CTA full d=192", (16, 4, 0), 24, 18.75),
    ("SM100 1-CTA causal d=192", (32, 4, 1), 8, 6.25),
    ("SM100 2-CTA d=256", (14, 6, 0), 36, 28.125),
    ("SM103", (0, 4, 0), 0, 0.0),
]


@pytest.mark.parametrize(("row", "numbers", "count", "percent"), ROWS, ids=[row[0] for row in ROWS])
def test_rows_of_the_table(row, numbers, count, percent):
    emulation = TUNING[row]
    assert (emulation.freq, emulation.res, emulation.start) == numbers
    assert emulation.count(128) == count
    assert 100 * emulation.count(128) / 128 == percent


def test_table_is_complete():
    assert list(TUNING) == [row[0] for row in ROWS]


def test_pinned_rows_leave_the_papers_range():
    """The paper speaks of about 10 to 25 %; three pinned rows lie outside."""
    outside = [name for name, e in TUNING.items() if not 0.10 <= e.count(128) / 128 <= 0.25]
    assert outside == ["SM100 1-CTA causal d=192", "SM100 2-CTA d=256", "SM103"]


EVEN = st.integers(0, 20).map(lambda n: 2 * n)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(EVEN, EVEN, st.integers(0, 5), st.integers(1, 8))
def test_predicate(freq, res, start, fragments):
    if freq and res > freq:
        res %= freq + 2
    emulated = Emulation(freq, res, start).emulated(32 * fragments)
    for j in range(fragments):
        for k in range(0, 32, 2):
            expected = freq > 0 and k % freq >= freq - res and start <= j < fragments - 1
            assert emulated[32 * j + k] == emulated[32 * j + k + 1] == expected


def test_percentage_follows_the_row_length_too():
    e = TUNING["SM100 2-CTA full d=128"]
    assert [e.count(keys) for keys in (32, 64, 96, 128, 256)] == [0, 0, 12, 24, 72]


def test_last_fragment_is_never_emulated():
    assert not Emulation(2, 2, 0).emulated(128)[96:].any()
    assert Emulation(2, 2, 0).count(128) == 96


def test_mixed_exp2_takes_each_entry_from_its_unit():
    x = np.random.default_rng(0).uniform(-20, 0, (5, 128)).astype(np.float32)
    for emulation in TUNING.values():
        got = mixed_exp2(x, emulation)
        emulated = emulation.emulated(128)
        np.testing.assert_array_equal(got[:, emulated], exp2_polynomial(x)[:, emulated])
        np.testing.assert_array_equal(got[:, ~emulated], exp2_hardware(x)[:, ~emulated])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((-2, 0, 0), "negative"), ((10, 3, 0), "even"), ((4, 6, 0), "res <= freq"), ((7, 2, 0), "even")],
)
def test_numbers_that_make_no_predicate(numbers, message):
    with pytest.raises(ValueError, match=message):
        Emulation(*numbers)


@pytest.mark.parametrize("keys", [0, 16, 100])
def test_rows_are_whole_fragments(keys):
    with pytest.raises(ValueError, match="no multiple of a fragment"):
        Emulation(16, 4, 0).emulated(keys)
    with pytest.raises(ValueError, match="give rows"):
        mixed_exp2(0.5, Emulation(16, 4, 0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Emulation(16, 4, -1), r"negative"),
        (lambda: Emulation(16, 4, 0).count(33), r"33 entries is no multiple"),
        (lambda: mixed_exp2(np.zeros((128, 3)), Emulation(16, 4, 0)), r"3 entries is no multiple"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
