"""Rotary position embedding, held to complex numbers."""

import ml_dtypes
import numpy as np
import pytest

from cupyfa.oracles.rotary import Rotary
from cupyfa.testing import random_array, ulp


def by_complex_numbers(x, positions, cos, sin, interleaved):
    """Turn one number of one head after the other, in float64."""
    out, half = x.astype(np.float64), cos.shape[1]
    for i, position in enumerate(positions):
        for j in range(half):
            first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
            turn = complex(cos[position, j], sin[position, j])
            for head in range(x.shape[1]):
                turned = complex(x[i, head, first], x[i, head, second]) * turn
                out[i, head, first], out[i, head, second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [1, 4, 16, 20])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rotary_multiplies_by_a_complex_number(interleaved, half, dtype):
    x = random_array((5, 3, 40), dtype, 0)
    angles = random_array((9, half), np.float32, 1, amplitude=3)
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    positions = np.array([8, 0, 3, 3, 1])
    turned = Rotary(cos, sin, interleaved).turn(x, positions)
    expected = by_complex_numbers(x, positions, cos, sin, interleaved)
    assert turned.dtype == dtype
    # Half an ulp of the type, and what float32 loses where the two products cancel.
    error = np.abs(turned.astype(np.float64) - expected)
    assert np.all(error <= 0.5 * ulp(expected, dtype) * (1 + 1e-6) + 2.0**-21)
    np.testing.assert_array_equal(turned[..., 2 * half :], x[..., 2 * half :])


def test_a_turn_of_nothing_changes_nothing():
    x = random_array((2, 1, 8), np.float16, 0)
    one, zero = np.ones((1, 4), np.float16), np.zeros((1, 4), np.float16)
    turned = Rotary(one, zero).turn(x, np.zeros(2, int))
    np.testing.assert_array_equal(turned, x)
    assert not np.shares_memory(turned, x)


def test_wrong_tables_are_refused():
    x, table = np.ones((1, 1, 8), np.float16), np.ones((3, 4), np.float16)
    with pytest.raises(ValueError, match="index 3 is outside"):
        Rotary(table, table).turn(x, np.array([3]))
    with pytest.raises(ValueError, match=r"cos has shape \(3, 5\)"):
        Rotary(np.ones((3, 5)), np.ones((3, 5))).turn(x, np.array([0]))
    with pytest.raises(ValueError, match=r"sin \(3, 3\)"):
        Rotary(table, table[:, :3]).turn(x, np.array([0]))
