"""A bias as the kernels of gradients take it: a tensor map, a copy where TMA cannot, and the axes of its gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from cupyfa._backward import BiasGradientPacking
from cupyfa._launch import TensorMapGeometry
from cupyfa.backward_problem import BackwardProblem
from cupyfa.copies import Copy
from cupyfa.operand import TMA_ALIGNMENT, Operand, strides_or_zeros
from cupyfa.spec import Bias

__all__ = ["BiasCopy", "bias_copy", "bias_gradient", "bias_gradient_ctas", "bias_map", "bias_strides"]

_SPAN = 128  # bytes of a row that TMA writes at a time, with a swizzle of that width
_SPACING = 256  # bytes; copies begin at multiples of it


class BiasCopy(Copy):
    """Memory that the kernels read in place of a bias: contiguous rows, each at a multiple of 16 bytes.

    Attributes
    ----------
    operand : Operand
        What the kernels take, with the axes (batch, heads_q, seqlen_q, seqlen_k); it repeats where the bias does.
    shape : tuple of int
        Of the memory, with these axes; 1 where the bias repeats, and rows filled up.
    begin : int
        Where it begins in the workspace, in bytes.
    """

    def read(self, matrix: Any, memory: Any) -> None:
        """Copy the user's bias.

        Parameters
        ----------
        matrix : array
            With two to four axes, which it may repeat.
        memory : array
            uint8, `size` bytes of the same library.
        """
        bits = np.dtype(f"u{self.operand.dtype.itemsize}")
        first = tuple(slice(size) for size in self.shape)
        taken = matrix.view(bits)[(None,) * (4 - matrix.ndim)][first]
        memory.view(bits).reshape(self.shape)[..., : taken.shape[3]] = taken


def bias_copy(problem: BackwardProblem, begin: int) -> BiasCopy | None:
    """Return the copy that a bias needs: it has rows and columns, and an address or strides that TMA does not take.

    Parameters
    ----------
    problem : BackwardProblem
        The problem.
    begin : int
        How much of the workspace is in use already.

    Returns
    -------
    BiasCopy or None
        None: the kernels take the bias as it is.
    """
    bias = problem.forward.bias
    if bias is None or problem.bias_kind is not Bias.TILE or problem.forward.bias_access is Bias.TILE:
        return None
    own = [stride != 0 for stride in bias.strides]
    shape = [size if is_own else 1 for size, is_own in zip(bias.shape, own, strict=True)]
    in_vector = TMA_ALIGNMENT // bias.dtype.itemsize
    shape[3] = -(-shape[3] // in_vector) * in_vector
    dense = Operand.contiguous("bias", tuple(shape), bias.dtype, bias.device)
    strides = tuple(stride if is_own else 0 for stride, is_own in zip(dense.strides, own, strict=True))
    return BiasCopy(dataclasses.replace(bias, strides=strides), tuple(shape), -(-begin // _SPACING) * _SPACING)


def bias_map(bias: Operand, rows: int) -> TensorMapGeometry:
    """Return the tensor map of a bias with rows and columns.

    Parameters
    ----------
    bias : Operand
        That TMA takes, with the axes (batch, heads_q, seqlen_q, seqlen_k).
    rows : int
        Of a tile.

    Returns
    -------
    TensorMapGeometry
        With the dimensions of ``BwdParams``: one index along an axis on which the bias repeats.
    """
    batch, heads, seqlen_q, seqlen_k = (
        size if stride else 1 for size, stride in zip(bias.shape, bias.strides, strict=True)
    )
    # The stride of an axis with one index is never used, but the driver checks it.
    of_batch, of_head, of_row, _ = (stride or TMA_ALIGNMENT for stride in bias.strides)
    return TensorMapGeometry(
        bias.dtype.name,
        (seqlen_k, seqlen_q, heads, batch),
        (of_row, of_head, of_batch),
        (_SPAN // bias.dtype.itemsize, rows),
    )


def bias_strides(bias: Operand | None) -> tuple[int, ...]:
    """Return the strides of a bias or of its gradient in elements, in the order of ``Strides``.

    Parameters
    ----------
    bias : Operand or None
        With the axes (batch, heads_q, seqlen_q, seqlen_k).

    Returns
    -------
    tuple of int
        From one batch, row, head and key to the next; zeros for None.
    """
    batch, head, row, key = strides_or_zeros(bias, 4)
    return batch, row, head, key


def bias_gradient(dbias: Operand, batch: int) -> BiasGradientPacking:
    """Return what the kernel of the gradient has to know of it.

    Parameters
    ----------
    dbias : Operand
        With four axes, which have one index where the bias repeats.
    batch : int
        Of the problem.

    Returns
    -------
    BiasGradientPacking
        Needs only addresses.
    """
    batches, heads, rows, keys = dbias.shape
    return BiasGradientPacking(
        strides=bias_strides(dbias), batches=batches, heads=heads, rows=rows, keys=keys, batch=batch
    )


def bias_gradient_ctas(dbias: Operand, tile_m: int, tile_n: int) -> int:
    """Return how many CTAs compute the gradient: one for each tile of it.

    Parameters
    ----------
    dbias : Operand
        As for `bias_gradient`.
    tile_m, tile_n : int
        Rows and keys of a tile.

    Returns
    -------
    int
        All of them.
    """
    batches, heads, rows, keys = dbias.shape
    return math.prod((batches, heads, -(-rows // tile_m), -(-keys // tile_n)))
