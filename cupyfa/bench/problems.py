"""The problems of a benchmark, their operation counts and their arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from cupyfa.oracles.mask import Window, block_range, window_bounds
from cupyfa.testing import random_array

__all__ = ["Cell", "Inputs", "make_inputs", "poisoned", "share_inputs"]

_NAN_BITS = 0x7FC1  # a NaN in bfloat16 and in float16
_WHOLE = (None, None)  # no window


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem of a benchmark.

    Attributes
    ----------
    head_dim, seqlen, batch, heads : int
        The shape; query and key lengths and head counts are equal.
    causal : bool
        Whether the mask is causal.
    dtype : str
        ``"bfloat16"`` or ``"float16"``.
    heads_kv : int or None
        Key/value heads; None: as many as query heads.
    window_size : tuple of int or None
        How many keys left and right of its own a query sees; None for no bound.
    softcap : float or None
        What scores are capped at; None for no cap.
    sink, alibi : bool
        Whether heads have a further logit, or slopes.
    bias : str
        The axes that an additive bias has, of "bhqk"; it is the same along the others, and empty for none.
    bias_dtype : {"float32", "same"}
        Type of the bias; "same" is that of q.
    head_dim_v : int or None
        head_dim of v; None: that of q and k.
    """

    #: Matrix products with the columns of q and k, and with those of v.
    PRODUCTS: ClassVar[tuple[int, int]] = (1, 1)

    head_dim: int
    seqlen: int
    batch: int
    heads: int
    causal: bool
    dtype: str = "bfloat16"
    heads_kv: int | None = None
    window_size: Window = _WHOLE
    softcap: float | None = None
    sink: bool = False
    alibi: bool = False
    bias: str = ""
    bias_dtype: str = "float32"
    head_dim_v: int | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seqlen, heads, head_dim)."""
        return self.batch, self.seqlen, self.heads, self.head_dim

    @property
    def shape_kv(self) -> tuple[int, int, int, int]:
        """The shape of k."""
        return self.batch, self.seqlen, self.heads_kv or self.heads, self.head_dim

    @property
    def shape_v(self) -> tuple[int, int, int, int]:
        """The shape of v."""
        return *self.shape_kv[:3], self.head_dim_v or self.head_dim

    @property
    def shape_out(self) -> tuple[int, int, int, int]:
        """The shape of the output."""
        return *self.shape[:3], self.head_dim_v or self.head_dim

    @property
    def head_dims(self) -> str:
        """The head_dim, and that of v behind it if it is another one."""
        return f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")

    @property
    def bounds(self) -> Window:
        """How far a query sees to the left and to the right, causal or not; None for no bound."""
        return window_bounds(self.causal, self.window_size)

    @property
    def mask(self) -> str:
        """``full``, ``causal`` or the sides of the window."""
        left, right = self.bounds
        if left is None and not right:
            return "full" if right is None else "causal"
        return ", ".join("all" if side is None else str(side) for side in (left, right))

    @property
    def modifiers(self) -> str:
        """What changes the scores, or nothing."""
        named = {f"softcap {self.softcap or 0:g}": self.softcap is not None, "sink": self.sink, "ALiBi": self.alibi}
        named[f"bias {self.bias} {self.bias_dtype}"] = bool(self.bias)
        return ", ".join(name for name, there in named.items() if there)

    @property
    def needs(self) -> frozenset[str]:
        """What a contestant has to support beside the causal mask: window, softcap, sink, alibi, bias or head_dim_v."""
        needed = {
            "window": self.window_size != _WHOLE,
            "softcap": self.softcap is not None,
            "sink": self.sink,
            "alibi": self.alibi,
            "bias": bool(self.bias),
            "head_dim_v": self.head_dim_v is not None,
        }
        return frozenset(name for name, there in needed.items() if there)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``attention`` that are not arrays."""
        options: dict[str, Any] = {"causal": self.causal}
        if self.window_size != _WHOLE:
            options["window_size"] = self.window_size
        if self.softcap is not None:
            options["softcap"] = self.softcap
        return options

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, seqlen, seqlen), each 1 if the bias lacks the axis."""
        sizes = {"b": self.batch, "h": self.heads, "q": self.seqlen, "k": self.seqlen}
        batch, heads, rows, keys = (size if axis in self.bias else 1 for axis, size in sizes.items())
        return batch, heads, rows, keys

    @property
    def bias_bytes(self) -> int:
        """The least that has to be read of the bias: the elements of pairs that see each other, or all."""
        if not self.bias:
            return 0
        batch, heads, rows, keys = self.bias_shape
        pairs = self.visible_pairs if {"q", "k"} <= set(self.bias) else rows * keys
        return batch * heads * pairs * (4 if self.bias_dtype == "float32" else 2)

    @property
    def warmup_call(self) -> dict[str, Any]:
        """The call as :func:`cupyfa.warmup` takes it."""
        return {
            "q": self.shape,
            "k": self.shape_kv,
            "v": self.shape_v,
            "dtype": _dtype(self),
            "sink": self.sink,
            "alibi_slopes": self.alibi,
            **({"bias": self.bias_shape, "bias_dtype": _dtype_of_bias(self)} if self.bias else {}),
            **self.options,
        }

    @property
    def dense_flops(self) -> int:
        """Operations without a mask: 2 * B * H * Sq * Sk * (d + dv)."""
        return self.flops_per_pair * self.batch * self.heads * self.seqlen * self.seqlen

    @property
    def flops_per_pair(self) -> int:
        """Operations that count for a query and a key that it sees, in one head."""
        return 2 * (self.head_dim + self.shape_v[3])

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one head."""
        left, right = self.bounds
        row = np.arange(self.seqlen)
        begin = np.zeros_like(row) if left is None else np.maximum(0, row - left)
        end = np.full_like(row, self.seqlen) if right is None else np.minimum(self.seqlen, row + right + 1)
        return int((end - begin).sum())

    @property
    def useful_flops(self) -> int:
        """Operations that count: the dense ones, halved where the mask is causal; in a window those of visible keys."""
        if self.window_size != _WHOLE:
            return self.flops_per_pair * self.batch * self.heads * self.visible_pairs
        return self.dense_flops // 2 if self.causal else self.dense_flops

    def scheduled_flops(self, tile_m: int, tile_n: int, tile_d: int, tile_dv: int | None = None) -> int:
        """Return the operations of a kernel that computes whole tiles.

        Parameters
        ----------
        tile_m, tile_n, tile_d, tile_dv : int
            Query rows, keys, head_dim and that of v of a tile; by default they are equal.

        Returns
        -------
        int
            Tiles that the mask leaves, times their operations.
        """
        steps = 0
        for begin in range(0, self.seqlen, tile_m):
            lengths = (self.seqlen, self.seqlen)
            blocks = block_range(begin, begin + tile_m, *lengths, tile_n, self.causal, self.window_size)
            steps += blocks.end - blocks.first
        columns = self.PRODUCTS[0] * tile_d + self.PRODUCTS[1] * (tile_dv or tile_d)
        return 2 * self.batch * self.heads * steps * tile_m * tile_n * columns

    def __str__(self) -> str:
        """Return the problem on one line."""
        heads = f"H{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv else "")
        mask = self.mask if self.mask in ("full", "causal") else f"window ({self.mask})"
        parts = [self.dtype, f"d{self.head_dims}", mask, f"S{self.seqlen}", f"B{self.batch}", heads, self.modifiers]
        return " ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays that all contestants share.

    Attributes
    ----------
    cell : Cell
        The problem.
    q, k, v : array
        (batch, seqlen, heads, head_dim), nearly N(0, 1).
    out : array
        Where cupyfa writes; full of NaN at first.
    sink, alibi_slopes : array or None
        (heads,), float32, where the problem has them.
    bias : array or None
        (batch, heads, seqlen, seqlen), with 1 for an axis that it lacks.
    """

    cell: Cell
    q: Any
    k: Any
    v: Any
    out: Any
    sink: Any = None
    alibi_slopes: Any = None
    bias: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``attention``, without those that are not set."""
        arrays = {"sink": self.sink, "alibi_slopes": self.alibi_slopes, "bias": self.bias}
        return self.cell.options | {name: array for name, array in arrays.items() if array is not None}


def _dtype(cell: Cell) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if cell.dtype == "bfloat16" else np.float16)


def _dtype_of_bias(cell: Cell) -> np.dtype[Any]:
    return np.dtype(np.float32) if cell.bias_dtype == "float32" else _dtype(cell)


def poisoned(shape: tuple[int, ...], dtype: Any, xp: Any) -> Any:
    """Make an array of NaN.

    Parameters
    ----------
    shape : tuple of int
        Its shape.
    dtype : numpy.dtype
        bfloat16 or float16.
    xp : module
        ``cupy`` or ``numpy``.

    Returns
    -------
    array
        Of the module.
    """
    array = xp.empty(shape, dtype)
    array.view(np.uint16)[...] = _NAN_BITS
    return array


def make_inputs(cell: Cell, xp: Any) -> Inputs:
    """Make the arrays of a problem.

    Parameters
    ----------
    cell : Cell
        The problem.
    xp : module
        ``cupy`` or ``numpy``.

    Returns
    -------
    Inputs
        Random q, k, v and a poisoned out; a random sink and bias; the customary slopes, 2^(-8/heads), 2^(-16/heads) ...
    """
    return share_inputs([cell], xp)[0]


def share_inputs(cells: Sequence[Cell], xp: Any) -> list[Inputs]:
    """Make the arrays of problems that differ in their masks and modifiers of scores.

    Parameters
    ----------
    cells : sequence of Cell
        At least one problem; all of one shape and dtype.
    xp : module
        ``cupy`` or ``numpy``.

    Returns
    -------
    list of Inputs
        In the same order, with the same q, k and v; the rest as by :func:`make_inputs`, each its own.
    """
    shapes = (cells[0].shape, cells[0].shape_kv, cells[0].shape_v)
    q, k, v = (random_array(shape, _dtype(cells[0]), seed, xp=xp) for seed, shape in enumerate(shapes, start=1))
    inputs = []
    for cell in cells:
        out = poisoned(cell.shape_out, q.dtype, xp)
        sink = random_array((cell.heads,), np.float32, 4, xp=xp) if cell.sink else None
        slopes = None
        if cell.alibi:
            slopes = xp.asarray(np.exp2(-8 * np.arange(1, cell.heads + 1) / cell.heads).astype(np.float32))
        bias = random_array(cell.bias_shape, _dtype_of_bias(cell), 5, xp=xp) if cell.bias else None
        inputs.append(Inputs(cell, q, k, v, out, sink, slopes, bias))
    return inputs
