"""The arguments of attention over a cache: its arrays in one order, and every check on what is no array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from cupyfa.options import Options, WindowSize, check_max_seqlen, check_options

__all__ = ["CacheArrays", "CacheOptions", "check_cache_length", "check_cache_options"]

T = TypeVar("T")
U = TypeVar("U")

_MAX_SPLITS = 256
_SPLIT_BLOCK = 64  # keys: splits begin and end between blocks


class CacheArrays(NamedTuple, Generic[T]):
    """All array arguments of a call, or something about each: its operand, its geometry, its address.

    Attributes
    ----------
    q, k_cache, v_cache, out, lse, k, v, sink, alibi_slopes, rotary_cos, rotary_sin
        None for an array that was not passed.
    cache_seqlens
        None: a number holds for all sequences.
    page_table, cache_batch_idx, cu_seqlens_q
        Likewise None.
    """

    q: T
    k_cache: T
    v_cache: T
    out: T | None = None
    lse: T | None = None
    k: T | None = None
    v: T | None = None
    sink: T | None = None
    alibi_slopes: T | None = None
    rotary_cos: T | None = None
    rotary_sin: T | None = None
    cache_seqlens: T | None = None
    page_table: T | None = None
    cache_batch_idx: T | None = None
    cu_seqlens_q: T | None = None

    def map(self, function: Callable[[str, T], U]) -> CacheArrays[U]:
        """Return ``function(name, x)`` for each of them, None where there is none."""
        named = zip(self._fields, self, strict=True)
        return cast("CacheArrays[U]", CacheArrays(*(None if x is None else function(name, x) for name, x in named)))

    def given(self) -> dict[str, T]:
        """Return those that are there, by name."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}


class CacheOptions(NamedTuple):
    """Checked options of attention over a cache; equal options are equal keys.

    Attributes
    ----------
    attention : Options
        Those of every kind of attention.
    max_seqlen_q : int or None
        The most rows of a packed sequence.
    rotary_interleaved : bool
        Whether pairs are neighbours.
    num_splits, split_size : int or None
        How keys are cut; None: not given.
    """

    attention: Options = Options()
    max_seqlen_q: int | None = None
    rotary_interleaved: bool = False
    num_splits: int | None = None
    split_size: int | None = None

    @property
    def rows_turn(self) -> bool:
        """Whether the rotary position advances from row to row; else all rows have that of the first new key."""
        return self.attention.left is not None or self.attention.right is not None


def check_cache_options(
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: WindowSize = (None, None),
    softcap: Any = None,
    *,
    max_seqlen_q: Any = None,
    rotary_interleaved: Any = False,
    num_splits: Any = None,
    split_size: Any = None,
) -> CacheOptions:
    """Check the options that are not arrays.

    Parameters
    ----------
    softmax_scale, causal, window_size, softcap
        As in :func:`cupyfa.attention`.
    max_seqlen_q, rotary_interleaved, num_splits, split_size
        As in :func:`cupyfa.attention_with_kvcache`.

    Returns
    -------
    CacheOptions
        The same, in one form.

    Raises
    ------
    TypeError, ValueError
        Naming the option.
    """
    options = check_options(softmax_scale, causal, window_size, softcap)
    max_seqlen_q = check_max_seqlen("max_seqlen_q", max_seqlen_q)
    if not isinstance(rotary_interleaved, (bool, np.bool_)):
        raise TypeError(f"attention: rotary_interleaved is {rotary_interleaved!r}; it must be True or False")
    splits, size = _integer("num_splits", num_splits), _integer("split_size", split_size)
    if splits is not None and not 1 <= splits <= _MAX_SPLITS:
        raise ValueError(f"attention: num_splits is {splits}; it must be from 1 to {_MAX_SPLITS}, or None")
    if size is not None and (size < 1 or size % _SPLIT_BLOCK):
        raise ValueError(f"attention: split_size is {size}; it must be a positive multiple of {_SPLIT_BLOCK}, or None")
    if splits is not None and size is not None:
        raise ValueError(
            f"attention: num_splits is {splits} and split_size is {size}; at most one of them can be given, because "
            "either says how keys are split"
        )
    return CacheOptions(options, max_seqlen_q, bool(rotary_interleaved), splits, size)


def check_cache_length(cache_seqlens: Any) -> int | None:
    """Tell a number of keys that holds for all sequences from an array of them.

    Parameters
    ----------
    cache_seqlens
        As in :func:`cupyfa.attention_with_kvcache`.

    Returns
    -------
    int or None
        None for what is no number: the checks of arrays will see it.

    Raises
    ------
    TypeError
        It is neither.
    """
    if isinstance(cache_seqlens, (int, np.integer)) and not isinstance(cache_seqlens, bool):
        return int(cache_seqlens)
    if cache_seqlens is None or isinstance(cache_seqlens, (bool, float)):
        raise TypeError(
            f"attention: cache_seqlens is {cache_seqlens!r}; it must be an array of int32 with an entry for each "
            "sequence, or an int for all of them"
        )
    return None


def _integer(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"attention: {name} is {value!r}; it must be an integer or None")
    return int(value)
