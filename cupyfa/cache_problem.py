"""From arrays to a problem of attention over a cache: its geometry. The values of lengths are the device's."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyfa.cache_checks import (
    check_all_axes,
    check_appended_caches,
    check_companions,
    check_int32,
    check_matrices,
    check_memory,
)
from cupyfa.cache_options import CacheArrays, CacheOptions
from cupyfa.checks import (
    are_apart,
    check_current_device,
    check_devices,
    check_dtypes,
    check_of_heads,
    check_output,
    check_seqlen,
    check_unshared,
    visible_bounds,
)
from cupyfa.operand import TMA_ALIGNMENT, Operand
from cupyfa.spec import DType

__all__ = ["CacheProblem", "check_cache_addresses", "check_cache_overlap", "check_cache_workspace", "with_outputs"]

_CACHES = ("k_cache", "v_cache")


@dataclasses.dataclass(frozen=True)
class CacheProblem:
    """A problem of attention over a cache; equal problems need equal kernels and parameters, except for addresses.

    The values of lengths, pages and rows are not in it, and neither is a number of keys that holds for all sequences.

    Attributes
    ----------
    dtype : DType
        Of all matrices.
    batch : int
        How many sequences there are.
    seqlen_q : int
        Query rows of each; packed, the most of one.
    total_q : int or None
        Rows of a packed q.
    heads_q, heads_kv, head_dim, head_dim_v : int
        Sizes.
    cache_rows : int
        Rows of the cache, or its pages.
    page_size, max_pages : int or None
        Keys of a page, and pages of a sequence; None: each sequence has a row.
    capacity : int
        The most keys that a sequence can have in the cache.
    seqlen_new : int
        Keys that are appended to each.
    rotary_dim : int
        How many numbers of a head turn; 0: none.
    rotary_positions : int
        How many the tables have.
    rotary_interleaved : bool
        Whether pairs are neighbours.
    rows_turn : bool
        Whether the rotary position advances from row to row.
    left, right : int or None
        Row ``i`` sees the keys from ``i + d - left`` to ``i + d + right``, with ``d`` the keys of its sequence, the new
        ones included, less its rows; None where all rows see all keys on that side.
    softmax_scale : float
        Factor of the scores.
    softcap : float or None
        Bound of the scaled scores.
    num_splits, split_size : int or None
        What the user asked for.
    q, out : Operand
        With the axes (batch, seqlen, heads, head_dim); packed, a batch of 1.
    k_cache, v_cache : Operand
        (cache_rows, capacity or page_size, heads_kv, head_dim).
    lse : Operand or None
        (batch, heads_q, seqlen_q); packed, a batch of 1.
    k, v : Operand or None
        (batch, seqlen_new, heads_kv, head_dim).
    sink : Operand or None
        (heads_q,).
    alibi_slopes : Operand or None
        (batch, heads_q); one for all sequences has a stride of 0.
    rotary_cos, rotary_sin : Operand or None
        (rotary_positions, rotary_dim / 2).
    cache_seqlens : Operand or None
        (batch,); None: a number that each call brings.
    page_table : Operand or None
        (batch, max_pages).
    cache_batch_idx : Operand or None
        (batch,).
    cu_seqlens_q : Operand or None
        (batch + 1,).
    """

    dtype: DType
    batch: int
    seqlen_q: int
    total_q: int | None
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    cache_rows: int
    page_size: int | None
    max_pages: int | None
    capacity: int
    seqlen_new: int
    rotary_dim: int
    rotary_positions: int
    rotary_interleaved: bool
    rows_turn: bool
    left: int | None
    right: int | None
    softmax_scale: float
    softcap: float | None
    num_splits: int | None
    split_size: int | None
    q: Operand
    k_cache: Operand
    v_cache: Operand
    out: Operand
    lse: Operand | None
    k: Operand | None
    v: Operand | None
    sink: Operand | None
    alibi_slopes: Operand | None
    rotary_cos: Operand | None
    rotary_sin: Operand | None
    cache_seqlens: Operand | None
    page_table: Operand | None
    cache_batch_idx: Operand | None
    cu_seqlens_q: Operand | None

    @classmethod
    def of(
        cls, operands: CacheArrays[Operand], options: CacheOptions, *, want_lse: bool, current_device: int | None
    ) -> CacheProblem:
        """Check arguments and return the problem that they pose.

        Parameters
        ----------
        operands : CacheArrays of Operand
            As the user passed them. An output that is None is not asked for, or will be allocated contiguous.
        options : CacheOptions
            As :func:`cupyfa.cache_options.check_cache_options` returns them.
        want_lse : bool
            Allocate ``lse`` if the user passed none.
        current_device : int or None
            The current CUDA device, None for NumPy.

        Returns
        -------
        CacheProblem
            The packed ones of its operands have a batch of 1.

        Raises
        ------
        TypeError
            An argument has the wrong dtype.
        ValueError
            An argument is missing, or has the wrong shape, memory layout or device.
        UnsupportedError
            The arguments are meaningful, but no kernel fits them.
        """
        check_companions(operands, options)
        q, k_cache, v_cache = operands[:3]
        same = ("k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")
        given = operands.given()
        dtype = check_dtypes(q, *(given[name] for name in same if name in given))
        check_all_axes(operands)
        batch = check_int32(operands)
        check_matrices(operands, batch)
        heads_q, head_dim, head_dim_v = q.shape[-2], q.shape[-1], v_cache.shape[-1]
        total_q = None if operands.cu_seqlens_q is None else q.shape[0]
        seqlen_q = q.shape[1] if total_q is None else min(options.max_seqlen_q or 0, total_q)
        check_seqlen(q, seqlen_q if total_q is None else total_q)
        page_size = max_pages = None
        capacity = k_cache.shape[1]
        if operands.page_table is not None:
            page_size, max_pages = capacity, operands.page_table.shape[1]
            capacity = page_size * max_pages
        check_seqlen(k_cache, capacity)
        out_shape = (*q.shape[:-1], head_dim_v)
        out = operands.out or Operand.contiguous("out", out_shape, q.dtype, q.device)
        check_output(out, out_shape, q.dtype)
        lse_shape = (batch, heads_q, seqlen_q) if total_q is None else (heads_q, total_q)
        lse = operands.lse
        if lse is None and want_lse:
            lse = Operand.contiguous("lse", lse_shape, np.float32, q.device)
        if lse is not None:
            check_output(lse, lse_shape, np.dtype(np.float32))
        slopes = operands.alibi_slopes
        if operands.sink is not None:
            check_of_heads(operands.sink, {"(heads_q,)": (heads_q,)})
        if slopes is not None:
            check_of_heads(slopes, {"(heads_q,)": (heads_q,), "(batch, heads_q)": (batch, heads_q)})
            slopes = slopes.broadcast_to((batch, heads_q))
        checked = operands._replace(out=out, lse=lse, alibi_slopes=slopes)
        check_devices(q, checked.given())
        if q.device is not None:
            check_current_device(q, current_device)
            check_memory(checked)
        if operands.k is not None:
            check_appended_caches(checked)
        if total_q is not None:
            q, out = (x.broadcast_to((1, *x.shape)) for x in (q, out))
            lse = None if lse is None else lse.broadcast_to((1, *lse.shape))
        left, right = visible_bounds(options.attention, seqlen_q, capacity)
        scale, tables = options.attention.softmax_scale, operands.rotary_cos
        return cls(
            dtype=dtype,
            batch=batch,
            seqlen_q=seqlen_q,
            total_q=total_q,
            heads_q=heads_q,
            heads_kv=k_cache.shape[2],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            cache_rows=k_cache.shape[0],
            page_size=page_size,
            max_pages=max_pages,
            capacity=capacity,
            seqlen_new=0 if operands.k is None else operands.k.shape[1],
            rotary_dim=0 if tables is None else 2 * tables.shape[1],
            rotary_positions=0 if tables is None else tables.shape[0],
            rotary_interleaved=options.rotary_interleaved,
            rows_turn=options.rows_turn,
            left=left,
            right=right,
            softmax_scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
            softcap=options.attention.softcap,
            num_splits=options.num_splits,
            split_size=options.split_size,
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            out=out,
            lse=lse,
            k=operands.k,
            v=operands.v,
            sink=operands.sink,
            alibi_slopes=slopes,
            rotary_cos=operands.rotary_cos,
            rotary_sin=operands.rotary_sin,
            cache_seqlens=operands.cache_seqlens,
            page_table=operands.page_table,
            cache_batch_idx=operands.cache_batch_idx,
            cu_seqlens_q=operands.cu_seqlens_q,
        )

    @property
    def causal(self) -> bool:
        """Whether keys end at a diagonal."""
        return self.right is not None

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of lse, as the user sees it."""
        return (self.batch, self.heads_q, self.seqlen_q) if self.total_q is None else (self.heads_q, self.total_q)

    @property
    def has_no_output(self) -> bool:
        """Whether out is empty; keys may have to be appended all the same."""
        return 0 in self.out.shape

    @property
    def has_no_room(self) -> bool:
        """Whether no sequence can have a key: there is nothing to launch."""
        return self.batch == 0 or self.capacity == 0 or self.cache_rows == 0

    @property
    def fills_outputs(self) -> bool:
        """Whether outputs are filled beforehand: without keys, and for rows of a packed q that belong to nobody."""
        keyless = self.capacity == 0 or self.cache_rows == 0
        return not self.has_no_output and (keyless or self.total_q is not None)

    @functools.cached_property
    def operands(self) -> CacheArrays[Operand]:
        """All operands, in the order of `CacheArrays`."""
        return CacheArrays(*(getattr(self, name) for name in CacheArrays._fields))

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Bytes from the first element of each array to its ends, in that order; (0, 0) for one that is not there."""
        return tuple((0, 0) if operand is None else operand.span for operand in self.operands)

    @functools.cached_property
    def alignments(self) -> tuple[int, ...]:
        """What the address of each array on the GPU is a multiple of, in that order."""
        of_caches = dict.fromkeys(_CACHES, TMA_ALIGNMENT)
        return tuple(
            of_caches.get(name, 1 if operand is None else operand.dtype.itemsize)
            for name, operand in self.operands._asdict().items()
        )


def with_outputs(
    empty: Callable[..., Any], arrays: CacheArrays[Any], problem: CacheProblem, want_lse: bool
) -> CacheArrays[Any]:
    """Return the arrays with the outputs that the user did not pass.

    Parameters
    ----------
    empty : Callable
        ``empty(shape, dtype)`` makes an array.
    arrays : CacheArrays
        As the user passed them.
    problem : CacheProblem
        Theirs.
    want_lse : bool
        Make ``lse`` if there is none.

    Returns
    -------
    CacheArrays
        With `out`.
    """
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = empty((*arrays.q.shape[:-1], problem.head_dim_v), arrays.q.dtype)
    if lse is None and want_lse:
        lse = empty(problem.lse_shape, np.float32)
    return arrays._replace(out=out, lse=lse)


def check_cache_addresses(problem: CacheProblem, addresses: CacheArrays[int]) -> None:
    """Check where arrays on the GPU begin.

    Parameters
    ----------
    problem : CacheProblem
        The checked problem.
    addresses : CacheArrays of int
        Of all arrays, None for one that was not passed.

    Raises
    ------
    ValueError
        Naming the array, its address and what that must be a multiple of.
    """
    for name, address, alignment in zip(addresses._fields, addresses, problem.alignments, strict=True):
        if address and address % alignment:
            remedy = "a cache is never copied" if name in _CACHES else "a copy is aligned"
            raise ValueError(
                f"attention: {name} begins at address {address:#x}; it must be a multiple of {alignment} bytes "
                f"({remedy})"
            )


def check_cache_overlap(problem: CacheProblem, addresses: CacheArrays[int]) -> None:
    """Check that nothing that is written shares memory with another array.

    Parameters
    ----------
    problem : CacheProblem
        The checked problem.
    addresses : CacheArrays of int
        Of all arrays, outputs included; None or 0 for one that has none.

    Raises
    ------
    ValueError
        Naming both arrays.
    """
    if are_apart(addresses, problem.spans):
        return  # the usual case
    placed = [(x, a) for name, x in problem.operands.given().items() if (a := getattr(addresses, name))]
    written = {"out", "lse", *_CACHES} if problem.seqlen_new else {"out", "lse"}
    for n, (operand, address) in enumerate(placed):
        if operand.name in written:
            # Two that are written are compared once.
            others = (x for i, x in enumerate(placed) if i < n or (i > n and x[0].name not in written))
            check_unshared(operand, address, tuple(others))


def check_cache_workspace(problem: CacheProblem, addresses: CacheArrays[int], begin: int, size: int) -> None:
    """Check that no array has a byte between its ends in the workspace.

    Parameters
    ----------
    problem : CacheProblem
        The checked problem.
    addresses : CacheArrays of int
        Of all arrays, outputs included; None or 0 for one that has none.
    begin, size : int
        The part of the workspace that is used.

    Raises
    ------
    ValueError
        Naming the array.
    """
    for name, address, (low, high) in zip(addresses._fields, addresses, problem.spans, strict=True):
        if address and address + low < begin + size and begin < address + high:
            raise ValueError(f"attention: workspace overlaps {name}; they must be separate")
