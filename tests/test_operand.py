"""What kernels are told of an array's strides."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupyfa.operand import TMA_MAX_STRIDE, Operand, row_strides, strides_or_zeros, suits_tma

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_strides_are_counted_in_elements() -> None:
    assert Operand("q", (2, 3, 4, 8), (-192, 64, 16, 2), BFLOAT16, 0).element_strides == (-96, 32, 8, 1)
    assert strides_or_zeros(Operand("sink", (4,), (12,), np.dtype(np.float32), 0), 1) == (3,)
    assert strides_or_zeros(None, 2) == (0, 0)


def test_rows_have_the_order_of_a_matrix() -> None:
    assert row_strides(Operand("lse", (2, 4, 3), (48, 12, 4), np.dtype(np.float32), 0)) == (12, 1, 3, 0)
    assert row_strides(None) == (0, 0, 0, 0)


def test_an_axis_with_one_index_has_a_stride_that_tma_takes() -> None:
    assert Operand("k", (1, 3, 1, 8), (7, 64, -3, 2), BFLOAT16, 0).tma_strides == (16, 64, 16, 2)


@pytest.mark.parametrize(
    ("shape", "strides", "vectors"),
    [
        ((2, 3, 4, 8), (192, 64, 16, 2), True),
        ((2, 3, 4, 8), (192, -64, 0, 2), True),
        ((2, 3, 4, 8), (200, 64, 16, 2), False),
        ((2, 3, 4, 8), (192, 72, 16, 2), False),
        ((2, 3, 4, 8), (192, 64, 24, 2), False),
        ((2, 3, 4, 8), (384, 128, 32, 4), False),
        ((2, 3, 4, 12), (576, 192, 48, 2), False),  # the last vector of a row would be half of another
        ((1, 1, 1, 8), (7, 7, 7, 2), True),
    ],
)
def test_rows_are_vectors_where_each_begins_at_one(
    shape: tuple[int, ...], strides: tuple[int, ...], vectors: bool
) -> None:
    assert Operand("q", shape, strides, BFLOAT16, 0).has_vectors == vectors


def test_tma_takes_multiples_of_16_up_to_its_limit() -> None:
    taken = {0: True, 16: True, 8: False, -16: False, TMA_MAX_STRIDE - 16: True, TMA_MAX_STRIDE: False}
    assert {stride: suits_tma(stride) for stride in taken} == taken
    assert not suits_tma(64, limit=64)
