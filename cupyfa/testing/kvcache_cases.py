"""The table of caches that `attention_with_kvcache` is tested on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyfa.oracles.kvcache import Places, append
from cupyfa.oracles.rotary import Rotary
from cupyfa.testing.case import DTYPES
from cupyfa.testing.inputs import random_array

__all__ = ["CACHE_CASES", "CacheCase"]

_NAN = 0x7FFF  # in both 16-bit formats
_UNUSED = 2**30  # an entry of a page table that nobody may follow


@dataclass(frozen=True)
class CacheCase:
    """A cache with some sequences, queries, and what is appended.

    Attributes
    ----------
    name : str
        What it is for.
    lengths : tuple of int
        Keys of each sequence before the call.
    seqlen_q : int
        Query rows of each.
    lengths_q : tuple of int or None
        Query rows of each in a packed q, instead.
    rows_of_nobody : int
        Rows of a packed q behind those of the last sequence.
    seqlen_new : int
        Keys that are appended to each.
    page_size : int or None
        Keys of a page; None: each sequence has a row.
    spare : int
        Keys of a row that nobody has, or columns of the table, and rows or pages of the cache.
    batch_idx : bool
        Whether `cache_batch_idx` says where rows are.
    one_length : bool
        Whether `cache_seqlens` is a number; all lengths are the same.
    prefix : int
        Pages at the beginning that all sequences share.
    rotary_dim : int
        How many numbers of a head turn; 0: none.
    rotary_interleaved : bool
        Whether pairs are neighbours.
    heads_q, heads_kv, head_dim, dtype, causal, head_dim_v, window_size, softcap, sink, alibi, softmax_scale
        As for `Case`.
    num_splits, split_size : int or None
        Passed to the call.
    id : str
        A readable name, unique in the table.
    batch, capacity : int
        How many sequences there are, and the most keys that one can have.
    options : dict
        Keyword arguments that the function and the oracles take, with NumPy arrays, beside those of `make_arrays`.
    splits : dict
        Those that only the function takes.
    """

    name: str
    lengths: tuple[int, ...]
    seqlen_q: int = 1
    heads_q: int = 4
    heads_kv: int = 1
    head_dim: int = 64
    dtype: str = "bfloat16"
    causal: bool = False
    page_size: int | None = None
    seqlen_new: int = 0
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    lengths_q: tuple[int, ...] | None = None
    rows_of_nobody: int = 0
    spare: int = 1
    batch_idx: bool = False
    one_length: bool = False
    prefix: int = 0
    head_dim_v: int | None = None
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    softmax_scale: float | None = None
    sink: bool = False
    alibi: bool = False
    num_splits: int | None = None
    split_size: int | None = None

    @property
    def id(self) -> str:
        """The readable name."""
        page = "" if self.page_size is None else f"page{self.page_size}"
        cut = f"splits{self.num_splits}" if self.num_splits else f"split{self.split_size}" if self.split_size else ""
        parts = [
            self.name.replace(" ", "_"),
            f"d{self.head_dim}" + ("" if self.head_dim_v is None else f"x{self.head_dim_v}"),
            "bf16" if self.dtype == "bfloat16" else "fp16",
            f"h{self.heads_q}x{self.heads_kv}",
            f"q{self.seqlen_q}" if self.lengths_q is None else "packed",
            page,
            f"new{self.seqlen_new}" if self.seqlen_new else "",
            "causal" if self.causal else "",
            cut,
        ]
        return "-".join(part for part in parts if part)

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    @property
    def _rows(self) -> int:
        """Rows of the cache, or its pages."""
        if self.page_size is None:
            return self.batch + self.spare * self.batch_idx
        own = sum(max(0, pages - self.prefix) for pages in self._pages)
        return self.prefix + own + self.spare

    @property
    def _pages(self) -> list[int]:
        """Pages that each sequence needs."""
        size = self.page_size or 1
        return [-(-(length + self.seqlen_new) // size) for length in self.lengths]

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        if self.page_size is None:
            return max(self.lengths, default=0) + self.seqlen_new + self.spare
        return (max(self._pages, default=0) + self.spare) * self.page_size

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the function and of the oracles."""
        options: dict[str, Any] = {"causal": self.causal}
        if self.window_size != (None, None):
            options["window_size"] = self.window_size
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.softmax_scale is not None:
            options["softmax_scale"] = self.softmax_scale
        if self.sink:
            options["sink"] = random_array((self.heads_q,), np.float32, seed=1)
        if self.alibi:
            shape = (self.batch, self.heads_q)
            options["alibi_slopes"] = np.exp2(-4 * np.abs(random_array(shape, np.float32, seed=2))).astype(np.float32)
        if self.rotary_dim:
            options["rotary_interleaved"] = self.rotary_interleaved
        return options

    @property
    def splits(self) -> dict[str, int]:
        """The keyword arguments that say how keys are split, and how long packed queries are."""
        given = {"num_splits": self.num_splits, "split_size": self.split_size}
        if self.lengths_q is not None:
            given["max_seqlen_q"] = max(self.lengths_q, default=0)
        return {name: value for name, value in given.items() if value is not None}

    def make_arrays(self, seed: int = 0) -> dict[str, Any]:
        """Make all arrays of a call, and ``cache_seqlens``, which may be a number.

        What no sequence has in the cache is NaN, the places of new keys too; so are rows of nobody in q. Entries of the
        page table that are not needed lead nowhere.

        Parameters
        ----------
        seed : int, optional
            Seed of the arrays.

        Returns
        -------
        dict
            By the name of the argument; NumPy arrays.
        """
        dtype = DTYPES[self.dtype]
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        places = self._places()
        arrays: dict[str, Any] = {"q": self._queries(seed)}
        keys = self.capacity if self.page_size is None else self.page_size
        for n, (name, columns) in enumerate((("k_cache", self.head_dim), ("v_cache", head_dim_v)), 1):
            cache = np.full((self._rows, keys, self.heads_kv, columns), _NAN, np.uint16).view(dtype)
            values = random_array(cache.shape, dtype, 8 * seed + n)
            for b, length in enumerate(self.lengths):
                of_sequence = places.of(cache, b, 0, length)
                cache[of_sequence] = values[of_sequence]
            arrays[name] = cache
        arrays["cache_seqlens"] = self.lengths[0] if self.one_length else np.array(self.lengths, np.int32)
        arrays |= {"page_table": places.page_table, "cache_batch_idx": places.cache_batch_idx}
        if self.lengths_q is not None:
            arrays["cu_seqlens_q"] = np.cumsum([0, *self.lengths_q]).astype(np.int32)
        if self.seqlen_new:
            for n, (name, columns) in enumerate((("k", self.head_dim), ("v", head_dim_v)), 3):
                shape = (self.batch, self.seqlen_new, self.heads_kv, columns)
                arrays[name] = random_array(shape, dtype, 8 * seed + n)
        if self.rotary_dim:
            of_pair = 10000.0 ** (-np.arange(0, self.rotary_dim, 2) / self.rotary_dim)
            rows = max(self.seqlen_new, self.seqlen_q, *(self.lengths_q or ()))
            angles = np.arange(max(self.lengths) + rows)[:, None] * of_pair
            arrays |= {"rotary_cos": np.cos(angles).astype(dtype), "rotary_sin": np.sin(angles).astype(dtype)}
        return {name: array for name, array in arrays.items() if array is not None}

    def _queries(self, seed: int) -> npt.NDArray[Any]:
        dtype = DTYPES[self.dtype]
        if self.lengths_q is None:
            shape: tuple[int, ...] = (self.batch, self.seqlen_q, self.heads_q, self.head_dim)
            return random_array(shape, dtype, 8 * seed)  # type: ignore[no-any-return]
        rows = sum(self.lengths_q)
        q: npt.NDArray[Any] = random_array((rows + self.rows_of_nobody, self.heads_q, self.head_dim), dtype, 8 * seed)
        q.view(np.uint16)[rows:] = _NAN
        return q

    def _places(self) -> Places:
        """Return shuffled pages, or rows from the last one on."""
        if self.page_size is None:
            rows = np.arange(self._rows)[::-1][: self.batch].astype(np.int32)
            return Places(cache_batch_idx=rows if self.batch_idx else None)
        shuffled = np.argsort(random_array((self._rows,), np.float32, seed=7))
        shared, own = shuffled[: self.prefix].tolist(), iter(shuffled[self.prefix :].tolist())
        table = np.full((self.batch, max(self._pages, default=0) + self.spare), _UNUSED, np.int32)
        for b, count in enumerate(self._pages):
            pages = shared[:count] + list(itertools.islice(own, max(0, count - self.prefix)))
            table[b, :count] = pages
        return Places(table)

    def expected_caches(self, arrays: dict[str, Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return what the call leaves in the caches: bit for bit, unless new keys turn.

        Parameters
        ----------
        arrays : dict
            From `make_arrays`, before the call.

        Returns
        -------
        k_cache, v_cache : numpy.ndarray
            New arrays.
        """
        k_cache, v_cache = arrays["k_cache"].copy(), arrays["v_cache"].copy()
        if self.seqlen_new:
            rotary, lengths = None, np.array(self.lengths, np.int32)
            if self.rotary_dim:
                rotary = Rotary(arrays["rotary_cos"], arrays["rotary_sin"], self.rotary_interleaved)
            append(k_cache, v_cache, arrays["k"], arrays["v"], lengths, self._places(), rotary)
        return k_cache, v_cache


_MIXED = (0, 1, 63, 64, 65, 1000)

CACHE_CASES = (
    CacheCase("one token", (1000, 65, 1), heads_q=8, heads_kv=8, head_dim=128),
    CacheCase("mixed", _MIXED, heads_q=8, heads_kv=2, head_dim=128),
    CacheCase("mixed", _MIXED, heads_q=8, heads_kv=2, dtype="float16", page_size=16),
    CacheCase("one key", (1,), dtype="float16"),
    CacheCase("no key", (0, 0), heads_q=2, heads_kv=2),
    CacheCase("no key but a sink", (0, 5), sink=True),
    CacheCase("group of eight", (300, 64), heads_q=16, heads_kv=2, head_dim=128, dtype="float16"),
    CacheCase("group of sixteen", (300, 63), heads_q=32, heads_kv=2, head_dim=96),
    CacheCase("one key head", (130, 500), heads_q=24, heads_kv=1, head_dim=128, dtype="float16"),
    CacheCase("group of three", (130, 70), heads_q=9, heads_kv=3, head_dim=64),
    CacheCase("wide", (200, 64), head_dim=256, dtype="float16", seqlen_q=2, causal=True),
    CacheCase("wide", (200, 7), head_dim=256, page_size=64, seqlen_new=1),
    CacheCase("narrow values", (200, 64, 0), head_dim=192, head_dim_v=128, heads_q=16, seqlen_q=4, causal=True),
    CacheCase("narrow values", (200, 63), head_dim=192, head_dim_v=128, page_size=24, seqlen_new=1),
    CacheCase("padded head_dim", (100, 140), head_dim=80, dtype="float16", seqlen_new=5, seqlen_q=5, causal=True),
    CacheCase("padded head_dim", (100, 140), head_dim=72, head_dim_v=40, page_size=3),
    CacheCase("two rows", (64, 1000), seqlen_q=2, causal=True, head_dim=128, heads_q=8, heads_kv=2),
    CacheCase("four rows", (63, 65), seqlen_q=4, causal=True, heads_q=4, heads_kv=4, dtype="float16"),
    CacheCase("sixteen rows", (130, 17), seqlen_q=16, causal=True, heads_q=16, heads_kv=2, head_dim=128),
    CacheCase("forty rows", (130, 41), seqlen_q=40, causal=True, heads_q=4, dtype="float16", page_size=16),
    CacheCase("forty rows, all keys", (130, 1), seqlen_q=40, heads_q=2, heads_kv=2),
    CacheCase("more rows than keys", (3, 0, 16), seqlen_q=16, causal=True, heads_q=4),
    CacheCase("pages of one", (65, 3, 0), page_size=1, head_dim=128),
    CacheCase("pages of three", (65, 3, 200), page_size=3, seqlen_new=1, dtype="float16"),
    CacheCase("pages of sixteen", (1000, 16, 17), page_size=16, head_dim=128, heads_q=8, heads_kv=2, seqlen_new=1),
    CacheCase("pages of twenty four", (100, 24, 23), page_size=24, seqlen_new=5, seqlen_q=5, causal=True),
    CacheCase("pages of sixty four", (1000, 63, 64), page_size=64, head_dim=128, dtype="float16", seqlen_new=1),
    CacheCase("large pages", (300, 127, 0), page_size=128, heads_q=8, seqlen_new=1, causal=True),
    CacheCase("larger pages", (600, 255, 256), page_size=256, head_dim=128, seqlen_new=5, dtype="float16"),
    CacheCase("shared prefix", (100, 64, 200), page_size=16, prefix=4, seqlen_new=1, head_dim=128),
    CacheCase("batch_idx", (65, 200, 3), batch_idx=True, spare=3, heads_q=2),
    CacheCase("batch_idx", (65, 200, 0), batch_idx=True, spare=3, seqlen_new=5, seqlen_q=2, causal=True),
    CacheCase("one length for all", (77, 77, 77), one_length=True, heads_q=2),
    CacheCase("one length for all", (77, 77, 77), one_length=True, page_size=16, seqlen_new=1, spare=5),
    CacheCase("full", (15, 64), seqlen_new=1, spare=0, dtype="float16"),
    CacheCase("full", (63, 63), seqlen_new=1, spare=0, page_size=16),
    CacheCase("first tokens", (0, 0), seqlen_new=5, seqlen_q=5, causal=True, page_size=16),
    CacheCase("rotary", (65, 0, 200), seqlen_new=1, rotary_dim=64, head_dim=64),
    CacheCase("rotary of a part", (65, 0, 200), seqlen_new=5, seqlen_q=5, rotary_dim=32, head_dim=128, causal=True),
    CacheCase(
        "rotary of neighbours", (65, 7), seqlen_new=5, seqlen_q=5, rotary_dim=48, causal=True, rotary_interleaved=True,
        page_size=16, dtype="float16",
    ),
    CacheCase(
        "rotary of neighbours, rows at one place", (65, 7), seqlen_new=1, seqlen_q=4, rotary_dim=2,
        rotary_interleaved=True, head_dim=128,
    ),
    CacheCase("rotary under a window", (90, 7), seqlen_new=2, seqlen_q=2, rotary_dim=64, window_size=(20, 0)),
    CacheCase("rotary under a wide window", (90, 7), seqlen_new=3, seqlen_q=3, rotary_dim=64, window_size=(999, 999)),
    CacheCase("window", (500, 3, 70), window_size=(50, 0), head_dim=128, seqlen_q=2, dtype="float16"),
    CacheCase("window in pages", (500, 3, 70), window_size=(50, None), causal=True, seqlen_q=4, page_size=16),
    CacheCase("window to the right", (100, 3), window_size=(30, 5), seqlen_q=16, num_splits=2),
    CacheCase("window of one", (200, 3), window_size=(0, 0), num_splits=3),
    CacheCase("softcap", (150, 33), softcap=5.0, dtype="float16", heads_q=8, heads_kv=2),
    CacheCase("sink", (150, 0, 300), sink=True, heads_q=8, heads_kv=2, num_splits=5, head_dim=128),
    CacheCase("alibi", (150, 33), alibi=True, seqlen_q=4, causal=True, page_size=16),
    CacheCase("negative scale", (150, 33), softmax_scale=-0.2, dtype="float16"),
    CacheCase(
        "all options", (150, 33, 300), alibi=True, sink=True, softcap=20.0, window_size=(60, None), causal=True,
        seqlen_q=5, seqlen_new=5, rotary_dim=32, page_size=16, head_dim=128, heads_q=8, heads_kv=2, split_size=64,
    ),
    CacheCase("one split", (1000, 64), num_splits=1, head_dim=128, heads_q=8, heads_kv=2),
    CacheCase("two splits", (1000, 64, 65), num_splits=2, head_dim=128, heads_q=8, heads_kv=2, dtype="float16"),
    CacheCase("five splits", (1000, 0, 300), num_splits=5, seqlen_q=4, causal=True, page_size=64, seqlen_new=1),
    CacheCase("more splits than blocks", (1000, 1, 65), num_splits=64, head_dim=128),
    CacheCase("more splits than blocks", (300, 0), num_splits=64, page_size=16, dtype="float16", sink=True),
    CacheCase("split size", (1000, 63, 129), split_size=64, head_dim=128, heads_q=8, heads_kv=2),
    CacheCase("split size", (1000, 63, 129), split_size=128, page_size=16, dtype="float16", seqlen_q=4, causal=True),
    CacheCase("packed", (100, 64, 0, 7), lengths_q=(1, 4, 2, 0), heads_q=8, heads_kv=2),
    CacheCase(
        "packed", (100, 64, 0, 7), lengths_q=(1, 9, 2, 0), causal=True, page_size=16, rows_of_nobody=3, sink=True,
        head_dim=128, dtype="float16",
    ),
    CacheCase(
        "packed", (100, 40, 3), lengths_q=(1, 40, 2), causal=True, seqlen_new=2, rotary_dim=32, num_splits=2,
        page_size=24, head_dim=128,
    ),
    CacheCase("many", tuple(n * 37 % 200 for n in range(50)), heads_q=2, page_size=16, seqlen_new=1, spare=2),
)  # fmt: skip
