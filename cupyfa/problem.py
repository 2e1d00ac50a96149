"""From arrays to a problem: every check on what the user passed, before anything is compiled or launched."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from cupyfa.checks import (
    check_axes,
    check_current_device,
    check_devices,
    check_dtypes,
    check_head_dim,
    check_heads,
    check_of_heads,
    check_output,
    check_seqlen,
    check_strides,
    check_unshared,
    visible_bounds,
)
from cupyfa.operand import LENGTHS, TMA_ALIGNMENT, Addresses, Arrays, Operand, suits_tma
from cupyfa.options import Options
from cupyfa.packed import Packed, Used, check_packed, check_used
from cupyfa.spec import Bias, DType

__all__ = ["Problem", "check_alignment", "check_overlap", "check_workspace"]

_MATRICES = ("q", "k", "v", "out")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A forward attention problem; equal problems need equal kernels and equal parameters, except for addresses.

    Attributes
    ----------
    dtype : DType
        Of all matrices.
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v : int
        Sizes. With packed sequences, the batch is their number, and the lengths are those of the arrays.
    left, right : int or None
        Row ``i`` sees the keys from ``i + seqlen_k - seqlen_q - left`` to ``i + seqlen_k - seqlen_q + right``; None
        where all rows see all keys on that side.
    softmax_scale : float
        Factor of the scores.
    softcap : float or None
        Bound of the scaled scores.
    q, k, v, out : Operand
        With the axes (batch, seqlen, heads, head_dim); packed, a batch of 1.
    lse : Operand or None
        (batch, heads_q, seqlen_q); packed, a batch of 1.
    sink : Operand or None
        (heads_q,).
    alibi_slopes : Operand or None
        (batch, heads_q); one for all batches has a stride of 0.
    bias : Operand or None
        (batch, heads_q, seqlen_q, seqlen_k), with a stride of 0 along axes on which it is the same for all. Packed, it
        may have other numbers of rows and keys: from the beginning of each sequence on.
    packed : Packed or None
        None: sequences are equally long, and have an axis of their own.
    used : Used or None
        How much of them is used, if they are not packed; None: all.
    """

    dtype: DType
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    left: int | None
    right: int | None
    softmax_scale: float
    softcap: float | None
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    lse: Operand | None
    sink: Operand | None
    alibi_slopes: Operand | None
    bias: Operand | None
    packed: Packed | None = None
    used: Used | None = None

    @classmethod
    def from_operands(
        cls, operands: Arrays[Operand], options: Options, *, want_lse: bool, current_device: int | None
    ) -> Problem:
        """Check arguments and return the problem that they pose.

        Parameters
        ----------
        operands : Arrays of Operand
            As the user passed them, in the layout of the options. An output that is None is not asked for, or will be
            allocated contiguous.
        options : Options
            As :func:`cupyfa.options.check_options` returns them.
        want_lse : bool
            Allocate ``lse`` if the user passed none.
        current_device : int or None
            The current CUDA device, None for NumPy.

        Returns
        -------
        Problem
            All operands in BSHD order.

        Raises
        ------
        TypeError
            An argument has the wrong type or dtype.
        ValueError
            An argument has the wrong shape, memory layout or device, or a value out of range.
        UnsupportedError
            The arguments are meaningful, but no kernel fits them.
        """
        q, k, v, out, lse, sink, slopes, bias, *_ = operands
        packed = check_packed(operands, options)
        dtype = check_dtypes(q, k, v)
        for operand in (q, k, v):
            check_axes(operand, _LAYOUT_AXES["packed" if packed else options.layout])
        out_shape = (*q.shape[:-1], v.shape[-1])
        out = Operand.contiguous("out", out_shape, q.dtype, q.device) if out is None else out
        check_output(out, out_shape, q.dtype)
        if packed:
            _check_shapes(*(x.broadcast_to((1, *x.shape)) for x in (q, k, v)))
            seqlen_q, heads_q, head_dim = q.shape
            batch = packed.cu_seqlens_q.shape[0] - 1
            lse_shape: tuple[int, ...] = (heads_q, seqlen_q)
        else:
            q, k, v, out = (x.in_bshd(options.layout) for x in (q, k, v, out))
            _check_shapes(q, k, v)
            batch, seqlen_q, heads_q, head_dim = q.shape
            lse_shape = (batch, heads_q, seqlen_q)
        used = None if packed else check_used(operands, batch)
        if lse is None and want_lse:
            lse = Operand.contiguous("lse", lse_shape, np.float32, q.device)
        if lse is not None:
            check_output(lse, lse_shape, np.dtype(np.float32))
        if sink is not None:
            check_of_heads(sink, {"(heads_q,)": (heads_q,)})
        if slopes is not None:
            check_of_heads(slopes, {"(heads_q,)": (heads_q,), "(batch, heads_q)": (batch, heads_q)})
            slopes = slopes.broadcast_to((batch, heads_q))
        if bias is not None:
            bias = _check_bias(bias, (batch, heads_q, seqlen_q, k.shape[-3]), q.dtype, packed)
        checked = operands._replace(out=out, lse=lse, alibi_slopes=slopes, bias=bias, q=q, k=k, v=v)
        check_devices(q, checked.given())
        if q.device is not None:
            check_current_device(q, current_device)
            for name, operand in checked.given().items():
                if name not in _MATRICES:
                    check_strides(operand)
        if packed:
            q, k, v, out = (x.broadcast_to((1, *x.shape)) for x in (q, k, v, out))
            lse = None if lse is None else lse.broadcast_to((1, *lse.shape))
        left, right = visible_bounds(options, seqlen_q, k.shape[1])
        return cls(
            dtype=dtype,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[1],
            heads_q=heads_q,
            heads_kv=k.shape[2],
            head_dim=head_dim,
            head_dim_v=v.shape[3],
            left=left,
            right=right,
            softmax_scale=1.0 / math.sqrt(head_dim) if options.softmax_scale is None else options.softmax_scale,
            softcap=options.softcap,
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            sink=sink,
            alibi_slopes=slopes,
            bias=bias,
            packed=packed,
            used=used,
        )

    @property
    def causal(self) -> bool:
        """Whether keys end at a diagonal."""
        return self.right is not None

    @property
    def planned(self) -> bool:
        """Whether only the device knows the lengths of the sequences, so that it has to plan their tiles."""
        return self.packed is not None or self.used is not None

    @property
    def rows(self) -> tuple[int, int]:
        """All rows of queries, and all of keys, whatever is used of them."""
        sequences = 1 if self.packed is not None else self.batch
        return sequences * self.seqlen_q, sequences * self.seqlen_k

    @property
    def window(self) -> float:
        """The most keys that a row sees by its window; infinite if a side is unbounded."""
        return math.inf if self.left is None or self.right is None else self.left + self.right + 1

    @property
    def bias_access(self) -> Bias:
        """How a kernel gets at the bias: TMA has rules for strides and for where an array begins."""
        if self.bias is None:
            return Bias.NONE
        *outer, row, key = self.bias.strides
        adjacent = key == self.bias.dtype.itemsize or self.bias.shape[3] == 1
        if not (self.bias.aligned and adjacent and all(suits_tma(stride) for stride in (*outer, row))):
            return Bias.GATHER
        return Bias.TILE if row else Bias.ROW

    @property
    def max_seqlen_q(self) -> int:
        """The most rows that a sequence is expected to have."""
        expected = None if self.packed is None else self.packed.max_seqlen_q
        return self.seqlen_q if expected is None else min(expected, self.seqlen_q)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of lse, as the user sees it."""
        shape = (self.batch, self.heads_q, self.seqlen_q)
        return shape if self.packed is None else shape[1:]

    @functools.cached_property
    def inputs(self) -> tuple[tuple[Operand, int], ...]:
        """The arrays that are read, each with its place among the addresses."""
        places = [name for name in Addresses._fields if name not in ("out", "lse")]
        operands = (
            (getattr((self.packed or self.used) if name in LENGTHS else self, name, None), name) for name in places
        )
        return tuple((x, Addresses._fields.index(name)) for x, name in operands if x is not None)

    @property
    def is_empty(self) -> bool:
        """Whether there is no output, or no key."""
        return 0 in (self.batch, self.seqlen_q, self.heads_q, self.seqlen_k)


def check_alignment(problem: Problem, addresses: Addresses) -> tuple[str, ...]:
    """Check where the arrays begin.

    Parameters
    ----------
    problem : Problem
        The checked problem.
    addresses : Addresses
        Of all arrays.

    Returns
    -------
    tuple of str
        The matrices that TMA cannot take from there: almost always none.

    Raises
    ------
    ValueError
        An array that threads read or write where it is does not begin at a multiple of the size of its numbers.
    """
    q, k, v, out, lse, sink, slopes, bias, cu_q, cu_k, used_q, used_k = addresses
    of_bias = 4 if problem.bias is None else problem.bias.dtype.itemsize
    if (lse | sink | slopes | cu_q | cu_k | used_q | used_k) % 4 or bias % of_bias:
        for name, address in zip(addresses._fields, addresses, strict=True):
            alignment = of_bias if name == "bias" else 4
            if name not in _MATRICES and address % alignment:
                raise ValueError(
                    f"attention: {name} begins at address {address:#x}; it must be a multiple of {alignment} bytes "
                    f"({'a new array' if name == 'lse' else 'a copy'} is aligned)"
                )
    if (q | k | v | out) % TMA_ALIGNMENT:
        return tuple(name for name in _MATRICES if getattr(addresses, name) % TMA_ALIGNMENT)
    return ()


def check_overlap(problem: Problem, addresses: Addresses) -> None:
    """Check that no output shares memory with another array.

    Parameters
    ----------
    problem : Problem
        The checked problem.
    addresses : Addresses
        Of all arrays.

    Raises
    ------
    ValueError
        Naming both arrays.
    """
    inputs = [(operand, addresses[place]) for operand, place in problem.inputs]
    out, lse = addresses.out, addresses.lse
    check_unshared(problem.out, out, inputs)
    if problem.lse is not None and lse:
        check_unshared(problem.lse, lse, [*inputs, (problem.out, out)])


def check_workspace(problem: Problem, addresses: Addresses, begin: int, size: int, plan: tuple[int, int]) -> None:
    """Check that the memory for intermediate results is nobody else's.

    Parameters
    ----------
    problem : Problem
        The checked problem.
    addresses : Addresses
        Of all arrays.
    begin, size : int
        Address and bytes of what the call will write there.
    plan : tuple of int
        Address and bytes of a plan that was made before; (0, 0) if there is none.

    Raises
    ------
    ValueError
        Naming the other array.
    """
    others = [(operand, addresses[place]) for operand, place in problem.inputs]
    others += [(_bytes("plan", plan[1]), plan[0]), (problem.out, addresses.out)]
    if problem.lse is not None and addresses.lse:
        others.append((problem.lse, addresses.lse))
    check_unshared(_bytes("workspace", size), begin, others)


@functools.lru_cache(maxsize=256)
def _bytes(name: str, size: int) -> Operand:
    return Operand.contiguous(name, (size,), np.uint8, None)


_LAYOUT_AXES = {
    "BSHD": "(batch, seqlen, heads, head_dim)",
    "BHSD": "(batch, heads, seqlen, head_dim)",
    "packed": "(total, heads, head_dim)",
}


def _check_shapes(q: Operand, k: Operand, v: Operand) -> None:
    batch, _, heads_q, head_dim = q.shape
    for operand in (k, v):
        if operand.shape[0] != batch:
            raise ValueError(
                f"attention: {operand.name} has batch {operand.shape[0]} but q has {batch}; they must be equal"
            )
    if k.shape[3] != head_dim:
        raise ValueError(f"attention: k has head_dim {k.shape[3]} but q has {head_dim}; they must be equal")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"attention: v has seqlen {v.shape[1]} but k has {k.shape[1]}; they must be equal")
    heads_kv = k.shape[2]
    if v.shape[2] != heads_kv:
        raise ValueError(f"attention: v has {v.shape[2]} heads but k has {heads_kv}; they must be equal")
    check_heads(q, k, heads_q, heads_kv)
    for operand in (q, v):
        check_head_dim(operand)
    for operand in (q, k):
        check_seqlen(operand, operand.shape[1])


def _check_bias(bias: Operand, shape: tuple[int, ...], dtype: np.dtype[Any], packed: Packed | None) -> Operand:
    """Check the bias, and return it with all axes: it repeats along those that it lacks, or has one index of.

    With packed sequences, `shape` has the rows and keys of the arrays: no sequence has more.
    """
    if bias.dtype not in (np.dtype(np.float32), dtype):
        raise TypeError(f"attention: bias has dtype {bias.dtype}; it must be float32, or {dtype} as q")
    least: tuple[int, ...] = shape
    most: tuple[float, ...] = shape
    meaning = "(batch, heads_q, seqlen_q, seqlen_k),"
    if packed is not None:
        longest = (packed.max_seqlen_q or 1, packed.max_seqlen_k or 1)  # 1: nobody said
        least, most = (*shape[:2], *map(min, longest, shape[2:])), (*shape[:2], math.inf, math.inf)
        meaning = "(batch, heads_q, max_seqlen_q, max_seqlen_k), or more rows and keys,"
    rank = len(bias.shape)
    own = zip(reversed(bias.shape), reversed(least), reversed(most), strict=False)
    if not 2 <= rank <= 4 or not all(size == 1 or low <= size <= high for size, low, high in own):
        raise ValueError(
            f"attention: bias has shape {bias.shape}; it must have 2 to 4 axes and broadcast to {meaning} {least}"
        )
    sizes, strides = ((0,) * (4 - rank) + x for x in (bias.shape, bias.strides))
    strides = tuple(stride if size > 1 else 0 for stride, size in zip(strides, sizes, strict=True))
    # Rows and keys that no sequence can have are not looked at.
    shape = tuple(min(size, full) if stride else full for size, stride, full in zip(sizes, strides, shape, strict=True))
    return dataclasses.replace(bias, shape=shape, strides=strides)
