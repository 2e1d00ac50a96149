"""Checks of the arrays of attention over a cache: which of them go together, and how their shapes fit."""

from __future__ import annotations

import numpy as np

from cupyfa.cache_options import CacheArrays, CacheOptions
from cupyfa.checks import check_axes, check_head_dim, check_heads, check_strides
from cupyfa.operand import TMA_ALIGNMENT, Operand, overlaps_itself, suits_tma

__all__ = [
    "check_all_axes",
    "check_appended_caches",
    "check_companions",
    "check_int32",
    "check_matrices",
    "check_memory",
]

_CACHES = ("k_cache", "v_cache")
_LENGTHS = ("cache_seqlens", "page_table", "cache_batch_idx", "cu_seqlens_q")


def check_companions(operands: CacheArrays[Operand], options: CacheOptions) -> None:
    """Check which arguments are there: some need others, or exclude them.

    Parameters
    ----------
    operands : CacheArrays of Operand
        As the user passed them.
    options : CacheOptions
        Checked.

    Raises
    ------
    ValueError
        Naming the one that is missing, or too much.
    """
    given = operands.given()
    for one, other in (("k", "v"), ("v", "k"), ("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        if one in given and other not in given:
            raise ValueError(f"attention: {one} was passed without {other}; they go together")
    if "rotary_cos" in given and "k" not in given:
        raise ValueError(
            "attention: rotary_cos was passed without k; positions turn where keys are appended, those in the cache "
            "are turned already"
        )
    if "page_table" in given and "cache_batch_idx" in given:
        raise ValueError(
            "attention: cache_batch_idx was passed with page_table; either says where a sequence is: leave one out"
        )
    if ("cu_seqlens_q" in given) != (options.max_seqlen_q is not None):
        is_packed = "cu_seqlens_q" in given
        raise ValueError(
            "attention: cu_seqlens_q was passed without max_seqlen_q; it must be the most rows that a sequence has, "
            "because the lengths are not read on the host"
            if is_packed
            else f"attention: max_seqlen_q is {options.max_seqlen_q} without cu_seqlens_q; it is for packed queries"
        )


def check_all_axes(operands: CacheArrays[Operand]) -> None:
    """Check how many axes each array has, but for those of heads and outputs.

    Parameters
    ----------
    operands : CacheArrays of Operand
        As the user passed them.

    Raises
    ------
    ValueError
        Naming the array.
    """
    cache = "(num_pages, page_size, heads, head_dim)"
    if operands.page_table is None:
        cache = "(rows, capacity, heads, head_dim)"
    axes = {
        "q": "(batch, seqlen, heads, head_dim)" if operands.cu_seqlens_q is None else "(total, heads, head_dim)",
        "k_cache": cache,
        "v_cache": cache,
        "k": "(batch, seqlen, heads, head_dim)",
        "v": "(batch, seqlen, heads, head_dim)",
        "rotary_cos": "(positions, rotary_dim / 2)",
        "rotary_sin": "(positions, rotary_dim / 2)",
        "cache_seqlens": "(batch)",
        "page_table": "(batch, max_pages)",
        "cache_batch_idx": "(batch)",
        "cu_seqlens_q": "(batch + 1)",
    }
    for name, operand in operands.given().items():
        if name in axes:
            check_axes(operand, axes[name])


def check_int32(operands: CacheArrays[Operand]) -> int:
    """Check lengths, pages and rows, as far as the host can know them.

    Parameters
    ----------
    operands : CacheArrays of Operand
        As the user passed them.

    Returns
    -------
    int
        The number of sequences.

    Raises
    ------
    TypeError, ValueError
        Naming the array.
    """
    q, offsets = operands.q, operands.cu_seqlens_q
    for operand in (getattr(operands, name) for name in _LENGTHS):
        if operand is None:
            continue
        if operand.dtype != np.int32:
            raise TypeError(f"attention: {operand.name} has dtype {operand.dtype}; it must be int32")
        if not _is_contiguous(operand):
            along = "contiguous" if len(operand.shape) == 1 else "contiguous along its last axis"
            raise ValueError(f"attention: {operand.name} has strides {operand.strides} bytes; it must be {along}")
    if offsets is not None and offsets.shape[0] == 0:
        raise ValueError("attention: cu_seqlens_q has 0 entries; it must have one more than there are sequences")
    batch = q.shape[0] if offsets is None else offsets.shape[0] - 1
    for name in ("cache_seqlens", "page_table", "cache_batch_idx"):
        operand = getattr(operands, name)
        if operand is not None and operand.shape[0] != batch:
            raise ValueError(
                f"attention: {name} has {operand.shape[0]} {'rows' if name == 'page_table' else 'entries'}; it must "
                f"have one for each of the {batch} sequences"
            )
    return batch


def _is_contiguous(operand: Operand) -> bool:
    """Whether numbers along the last axis are neighbours, if there are any."""
    return operand.shape[-1] == 1 or 0 in operand.shape or operand.strides[-1] == operand.dtype.itemsize


def check_matrices(operands: CacheArrays[Operand], batch: int) -> None:
    """Check the shapes of caches, new keys and tables, against each other and against q.

    Parameters
    ----------
    operands : CacheArrays of Operand
        As the user passed them.
    batch : int
        How many sequences there are.

    Raises
    ------
    ValueError, UnsupportedError
        Naming the array.
    """
    q, k_cache, v_cache = operands[:3]
    head_dim = q.shape[-1]
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"attention: k_cache has head_dim {k_cache.shape[3]} but q has {head_dim}; they must be equal")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"attention: v_cache has shape {v_cache.shape} but k_cache has {k_cache.shape}; only the last axis may "
            "differ"
        )
    check_heads(q, k_cache, q.shape[-2], k_cache.shape[2])
    for operand in (q, v_cache):
        check_head_dim(operand)
    if operands.page_table is not None and k_cache.shape[1] == 0:
        raise ValueError(f"attention: k_cache has shape {k_cache.shape}, pages of 0 keys; a page must have at least 1")
    if operands.page_table is None and operands.cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"attention: k_cache has {k_cache.shape[0]} rows for {batch} sequences; they must be equal, unless "
            "cache_batch_idx or page_table says where each sequence is"
        )
    k, v = operands.k, operands.v
    if k is not None and v is not None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            expected = (batch, k.shape[1], *cache.shape[2:])
            if new.shape != expected:
                raise ValueError(
                    f"attention: {new.name} has shape {new.shape}; it must have (batch, seqlen_new, heads_kv, "
                    f"head_dim), {expected}, as {cache.name}{' and k have' if new is v else ' has'}"
                )
    cos, sin = operands.rotary_cos, operands.rotary_sin
    if cos is not None and sin is not None:
        if sin.shape != cos.shape:
            raise ValueError(
                f"attention: rotary_sin has shape {sin.shape} but rotary_cos has {cos.shape}; they must be equal"
            )
        if not 2 <= 2 * cos.shape[1] <= head_dim:
            raise ValueError(
                f"attention: rotary_cos has shape {cos.shape}, for a rotary_dim of {2 * cos.shape[1]}; it must be from "
                f"2 to head_dim, {head_dim}"
            )
        for table in (cos, sin):
            if not _is_contiguous(table):
                raise ValueError(
                    f"attention: {table.name} has strides {table.strides} bytes; it must be contiguous along its last "
                    "axis"
                )


def check_memory(operands: CacheArrays[Operand]) -> None:
    """Check the strides of arrays on the GPU: caches are read in vectors, others element by element.

    Parameters
    ----------
    operands : CacheArrays of Operand
        As the user passed them.

    Raises
    ------
    ValueError
        Naming the array and the axis.
    """
    first = "row" if operands.page_table is None else "page"
    axes = (first, "position", "head", "head_dim")
    for name, operand in operands.given().items():
        if name not in _CACHES:
            check_strides(operand)
            continue
        if 0 in operand.shape:
            continue
        for axis, size, stride in zip(axes, operand.shape, operand.strides, strict=True):
            if size <= 1:
                continue
            what = f"attention: {name} has a stride of {stride} bytes from {axis} to {axis}; it must be"
            if axis == "head_dim" and stride != operand.dtype.itemsize:
                raise ValueError(f"{what} {operand.dtype.itemsize}: contiguous (a cache is never copied)")
            if axis != "head_dim" and not suits_tma(stride):
                raise ValueError(f"{what} a multiple of {TMA_ALIGNMENT} from 0 to 2^40 (a cache is never copied)")


def check_appended_caches(operands: CacheArrays[Operand]) -> None:
    """Check that each element of a cache that is appended to has memory of its own.

    Parameters
    ----------
    operands : CacheArrays of Operand
        As the user passed them.

    Raises
    ------
    ValueError
        Naming the array.
    """
    for cache in (operands.k_cache, operands.v_cache):
        if overlaps_itself(cache):
            raise ValueError(
                f"attention: {cache.name} has strides {cache.strides} bytes for shape {cache.shape}; keys are appended "
                "to it, so its elements must not overlap each other"
            )
