"""An array as the checks see it: its geometry."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "LAYOUTS",
    "LENGTHS",
    "TMA_ALIGNMENT",
    "TMA_MAX_STRIDE",
    "Addresses",
    "Arrays",
    "Geometry",
    "Layout",
    "Operand",
    "host_addresses",
    "overlaps_itself",
    "row_strides",
    "rows_to_next",
    "share_memory",
    "strides_or_zeros",
    "suits_tma",
]

Layout = Literal["BSHD", "BHSD"]
LAYOUTS = ("BSHD", "BHSD")
#: The arrays with the lengths of packed sequences.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")

#: What the addresses and strides of a tensor map are multiples of, in bytes.
TMA_ALIGNMENT = 16
#: What the strides of a tensor map are below, in bytes.
TMA_MAX_STRIDE = 2**40

_MAX_PLANNED_ROWS = 2**30  # FwdParams: packed_rows

#: Shape, strides in bytes, dtype and CUDA device (None: NumPy) of an array: all of it but its address and data.
Geometry = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any], int | None]


T = TypeVar("T")
U = TypeVar("U")


class Arrays(NamedTuple, Generic[T]):
    """All array arguments of a call, or something about each: its operand, its geometry, its address.

    Attributes
    ----------
    q, k, v, out, lse, sink, alibi_slopes, bias
        None for an array that was not passed.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        Likewise: lengths of packed sequences.
    """

    q: T
    k: T
    v: T
    out: T | None = None
    lse: T | None = None
    sink: T | None = None
    alibi_slopes: T | None = None
    bias: T | None = None
    cu_seqlens_q: T | None = None
    cu_seqlens_k: T | None = None
    seqused_q: T | None = None
    seqused_k: T | None = None

    def map(self, function: Callable[[str, T], U]) -> Arrays[U]:
        """Return ``function(name, x)`` for each of them, None where there is none."""
        named = zip(self._fields, self, strict=True)
        return Arrays(*(None if x is None else function(name, x) for name, x in named))  # type: ignore[arg-type]

    def given(self) -> dict[str, T]:
        """Return those that are there, by name."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}


class Addresses(NamedTuple):
    """Addresses of the arrays of a call, as `Arrays` orders them; each call makes one.

    Attributes
    ----------
    q, k, v, out, lse, sink, alibi_slopes, bias
        0 for an empty array, and for one that was not passed.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        Likewise.
    """

    q: int
    k: int
    v: int
    out: int
    lse: int = 0
    sink: int = 0
    alibi_slopes: int = 0
    bias: int = 0
    cu_seqlens_q: int = 0
    cu_seqlens_k: int = 0
    seqused_q: int = 0
    seqused_k: int = 0


def host_addresses(arrays: Arrays[Any]) -> Addresses:
    """Return where NumPy arrays are.

    Parameters
    ----------
    arrays : Arrays
        Of a call, with its outputs.

    Returns
    -------
    Addresses
        On the host.
    """
    return Addresses(*(0 if x is None or 0 in x.shape else x.__array_interface__["data"][0] for x in arrays))


@dataclasses.dataclass(frozen=True)
class Operand:
    """A named array as the checks see it: its geometry, neither its address nor its data.

    Attributes
    ----------
    name : str
        The argument's name, for messages.
    shape, strides : tuple of int
        Strides in bytes.
    dtype : numpy.dtype
        Element type.
    device : int or None
        CUDA device, None for an array of NumPy.
    aligned : bool
        Whether it begins at a multiple of 16 bytes; only where a kernel may depend on that.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int | None
    aligned: bool = True

    @classmethod
    def contiguous(cls, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, device: int | None) -> Operand:
        """Return the operand of an array that will be allocated."""
        dtype = np.dtype(dtype)
        strides = tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return cls(name, shape, strides, dtype, device)

    def in_bshd(self, layout: Layout) -> Operand:
        """Return the operand with the axes (batch, seqlen, heads, head_dim)."""
        if layout == "BSHD":
            return self
        order = (0, 2, 1, 3)
        return dataclasses.replace(
            self, shape=tuple(self.shape[i] for i in order), strides=tuple(self.strides[i] for i in order)
        )

    def broadcast_to(self, shape: tuple[int, ...]) -> Operand:
        """Return the operand with more axes in front, along which it repeats."""
        strides = (0,) * (len(shape) - len(self.shape)) + self.strides
        return dataclasses.replace(self, shape=shape, strides=strides)

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        return tuple(stride // self.dtype.itemsize for stride in self.strides)

    @property
    def tma_strides(self) -> tuple[int, ...]:
        """Strides for a tensor map: that of an axis with one index is never used, but the driver checks it."""
        return tuple(
            stride if size > 1 else TMA_ALIGNMENT for stride, size in zip(self.strides, self.shape, strict=True)
        )

    @property
    def has_vectors(self) -> bool:
        """Whether rows, along the last axis, are vectors of 16 bytes, if the first one begins at a multiple of that."""
        *outer, size = self.shape
        *strides, step = self.strides
        whole = step == self.dtype.itemsize and size * step % TMA_ALIGNMENT == 0
        return whole and all(stride % TMA_ALIGNMENT == 0 for stride, n in zip(strides, outer, strict=True) if n > 1)

    @functools.cached_property
    def span(self) -> tuple[int, int]:
        """Bytes from the first element to the first and behind the last byte of the array; (0, 0) if it is empty."""
        if 0 in self.shape:
            return 0, 0
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + self.dtype.itemsize


def strides_or_zeros(operand: Operand | None, axes: int) -> tuple[int, ...]:
    """Return strides in elements: 0 along the axes of an array that there is not.

    Parameters
    ----------
    operand : Operand or None
        An array.
    axes : int
        How many it has, or would have.

    Returns
    -------
    tuple of int
        As many.
    """
    return (0,) * axes if operand is None else operand.element_strides


def row_strides(of_rows: Operand | None) -> tuple[int, ...]:
    """Return the strides of numbers of rows in the order of a matrix, in elements.

    Parameters
    ----------
    of_rows : Operand or None
        (batch, heads, seqlen): lse, or its gradient.

    Returns
    -------
    tuple of int
        From one batch, row, head and column to the next: 0 along columns, and everywhere if there is no array.
    """
    batch, head, row = strides_or_zeros(of_rows, 3)
    return batch, row, head, 0


def suits_tma(stride: int, limit: int = TMA_MAX_STRIDE) -> bool:
    """Return whether a tensor map can have a stride.

    Parameters
    ----------
    stride : int
        In bytes.
    limit : int, optional
        What it must be below.

    Returns
    -------
    bool
        False for a negative one, too.
    """
    return stride % TMA_ALIGNMENT == 0 and 0 <= stride < limit


def overlaps_itself(operand: Operand) -> bool:
    """Whether two indices may name one element.

    Parameters
    ----------
    operand : Operand
        Any array.

    Returns
    -------
    bool
        False if each longer stride steps over the shorter ones.
    """
    if 0 in operand.shape:
        return False
    covered = operand.dtype.itemsize
    for stride, size in sorted((abs(s), n) for s, n in zip(operand.strides, operand.shape, strict=True) if n > 1):
        if stride < covered:
            return True
        covered += stride * (size - 1)
    return False


def rows_to_next(operand: Operand) -> int | None:
    """Return how many rows behind a sequence the next one of the batch begins.

    Parameters
    ----------
    operand : Operand
        A matrix in BSHD order.

    Returns
    -------
    int or None
        None if it is no number of rows, or so many that a plan cannot count to the last one.

    Examples
    --------
    >>> rows_to_next(Operand.contiguous("k", (2, 5, 3, 8), np.float16, 0))
    5
    >>> rows_to_next(Operand.contiguous("k", (2, 3, 5, 8), np.float16, 0).in_bshd("BHSD"))
    15
    """
    batch, seqlen = operand.shape[:2]
    to_batch, to_row = operand.strides[:2]
    if batch <= 1 or seqlen <= 1:
        return 1 if batch > 1 else 0
    if to_row <= 0 or to_batch < 0 or to_batch % to_row:
        return None
    step = to_batch // to_row
    return step if (batch - 1) * step + seqlen <= _MAX_PLANNED_ROWS else None


def share_memory(a: Operand, address_a: int, b: Operand, address_b: int) -> bool:
    """Whether two strided arrays have a byte in common; interleaved slices of one buffer have none.

    Parameters
    ----------
    a : Operand
        An array.
    address_a : int
        Of its first element.
    b : Operand
        The other array.
    address_b : int
        Of its first element.

    Returns
    -------
    bool
        NumPy solves it exactly from the addresses; nothing is read.
    """
    low_a, high_a = a.span
    low_b, high_b = b.span
    if address_a + low_a >= address_b + high_b or address_b + low_b >= address_a + high_a:
        return False  # the usual case
    return _share_memory(_Memory.of(a, 0), _Memory.of(b, address_b - address_a))


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Where an array's elements are, relative to another's: nothing may be read there, it may be on the GPU."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    offset: int

    @classmethod
    def of(cls, operand: Operand, offset: int) -> _Memory:
        return cls(operand.shape, operand.strides, operand.dtype.itemsize, offset)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        address = 2**50 + self.offset  # any origin that keeps both addresses positive
        typestr = f"|V{self.itemsize}"
        return {"version": 3, "shape": self.shape, "strides": self.strides, "typestr": typestr, "data": (address, True)}


@functools.lru_cache(maxsize=256)
def _share_memory(a: _Memory, b: _Memory) -> bool:
    """Solve it exactly, once: slices of one buffer come again and again. What is too hard to solve counts as shared."""
    max_work: Any = 100_000  # older stubs of NumPy know -1 and 0 only
    try:
        return np.shares_memory(np.asarray(a), np.asarray(b), max_work=max_work)
    except np.exceptions.TooHardError:
        return True
