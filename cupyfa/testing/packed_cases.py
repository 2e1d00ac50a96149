"""The table of packed sequences that `attention_varlen` is tested on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyfa.oracles.packed import sequences
from cupyfa.testing.cases import DTYPES
from cupyfa.testing.inputs import random_array

__all__ = ["PACKED_CASES", "PackedCase"]


@dataclass(frozen=True)
class PackedCase:
    """Sequences one behind the other, and what is asked of them.

    Attributes
    ----------
    name : str
        What it is for.
    lengths_q : tuple of int
        Query rows of each sequence.
    lengths_k : tuple of int or None
        Keys of each; None: as many.
    used_q, used_k : tuple of int or None
        How many of them are used.
    before, behind : int
        Rows of the arrays before the first sequence and behind the last one.
    heads_q, heads_kv, head_dim, dtype, causal, head_dim_v, window_size, softcap, sink, alibi
        As for `Case`.
    id : str
        A readable name, unique in the table.
    options : dict
        Keyword arguments of `cupyfa.attention_varlen` and of the oracles, with NumPy arrays; without the lengths.
    """

    name: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...] | None = None
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 64
    dtype: str = "bfloat16"
    causal: bool = False
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    before: int = 0
    behind: int = 0
    head_dim_v: int | None = None
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    sink: bool = False
    alibi: bool = False

    @property
    def id(self) -> str:
        """The readable name."""
        head_dim = f"d{self.head_dim}" + ("" if self.head_dim_v is None else f"x{self.head_dim_v}")
        causal = ["causal"] if self.causal else []
        return "-".join(
            [self.name.replace(" ", "_"), head_dim, self.dtype, f"h{self.heads_q}x{self.heads_kv}", *causal]
        )

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not lengths."""
        options: dict[str, Any] = {"causal": self.causal}
        if self.window_size != (None, None):
            options["window_size"] = self.window_size
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.sink:
            options["sink"] = random_array((self.heads_q,), np.float32, seed=1)
        if self.alibi:
            shape = (len(self.lengths_q), self.heads_q)
            options["alibi_slopes"] = np.exp2(-4 * np.abs(random_array(shape, np.float32, seed=2))).astype(np.float32)
        return options

    @property
    def lengths(self) -> dict[str, Any]:
        """The int32 arrays cu_seqlens_q, cu_seqlens_k, and those of seqused_q and seqused_k that are there."""
        keys = self.lengths_q if self.lengths_k is None else self.lengths_k
        arrays = {
            f"cu_seqlens_{side}": self.before + np.cumsum([0, *lengths]).astype(np.int32)
            for side, lengths in (("q", self.lengths_q), ("k", keys))
        }
        used = {"seqused_q": self.used_q, "seqused_k": self.used_k}
        arrays |= {name: np.array(values, np.int32) for name, values in used.items() if values is not None}
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def make_inputs(self, seed: int = 0, xp: Any = np) -> tuple[Any, Any, Any]:
        """Make q, k and v; the rows that belong to no sequence, or are not used, are NaN.

        Parameters
        ----------
        seed : int, optional
            Seed of the arrays.
        xp : module, optional
            ``numpy`` or ``cupy``.

        Returns
        -------
        q, k, v : numpy.ndarray or cupy.ndarray
            Packed.
        """
        lengths = self.lengths
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        rows, keys = (np.ones(int(lengths[f"cu_seqlens_{side}"][-1]) + self.behind, bool) for side in "qk")
        for row_range, key_range in sequences(**lengths):
            rows[row_range] = keys[key_range] = False
        arrays = []
        for n, (nobodys, heads, columns) in enumerate(
            (
                (rows, self.heads_q, self.head_dim),
                (keys, self.heads_kv, self.head_dim),
                (keys, self.heads_kv, head_dim_v),
            )
        ):
            x = random_array((len(nobodys), heads, columns), DTYPES[self.dtype], 3 * seed + n, xp=xp)
            x.view(np.uint16)[xp.asarray(nobodys)] = 0x7FFF
            arrays.append(x)
        return arrays[0], arrays[1], arrays[2]


_MANY = tuple(int(n) for n in np.exp2(np.arange(40) * 7 % 40 / 5).astype(int))

PACKED_CASES = (
    PackedCase("equal", (128, 128)),
    PackedCase("ragged", (100, 1, 130, 257), dtype="float16"),
    PackedCase("ragged", (100, 1, 130, 257), causal=True, heads_q=6, heads_kv=2, head_dim=128),
    PackedCase("other keys", (70, 200, 3), (150, 10, 3), causal=True, heads_q=4, heads_kv=4, head_dim=96),
    PackedCase("no queries", (0, 50, 0), (30, 60, 0), head_dim=32),
    PackedCase("no keys", (40, 50, 0, 9), (0, 60, 7, 0), causal=True, dtype="float16"),
    PackedCase("nothing used", (40, 50), (70, 60), used_q=(0, 50), used_k=(70, 0)),
    PackedCase("rows of nobody", (100, 60), (90, 140), before=13, behind=37, causal=True, head_dim=128),
    PackedCase("seqused", (100, 60, 20), (90, 140, 20), used_q=(37, 60, 0), used_k=(64, 5, 20), causal=True),
    PackedCase("seqused beyond", (100, 60), (90, 140), used_q=(-1, 61), used_k=(1000, -7), dtype="float16"),
    PackedCase(
        "decode", (1,) * 9, (300, 1, 17, 64, 65, 0, 128, 129, 5), heads_q=8, heads_kv=2, head_dim=128, causal=True,
    ),
    PackedCase("many", _MANY, heads_q=3, heads_kv=3, causal=True),
    PackedCase("long", (900, 5), causal=True, heads_q=4, heads_kv=2, head_dim=64),
    PackedCase("window", (300, 40), (310, 90), window_size=(50, 0), head_dim=128),
    PackedCase("window to the right", (150, 200), (310, 90), window_size=(30, 20), dtype="float16"),
    PackedCase("softcap", (150, 33), (80, 170), softcap=5.0, causal=True, dtype="float16"),
    PackedCase("sink", (150, 33), (80, 0), sink=True, causal=True, behind=3, heads_q=4, heads_kv=2),
    PackedCase("alibi", (150, 33), (80, 170), alibi=True, heads_q=4, heads_kv=2, head_dim=128),
    PackedCase(
        "all options", (150, 33, 300), (80, 170, 310), alibi=True, sink=True, softcap=20.0, window_size=(60, None),
        causal=True, used_k=(70, 170, 300), heads_q=4, heads_kv=2, head_dim=128,
    ),
    PackedCase("wide", (100, 40), (130, 20), head_dim=256, causal=True),
    PackedCase("narrow values", (100, 140), (130, 20), head_dim=192, head_dim_v=128),
    PackedCase("padded head_dim", (100, 140), head_dim=72, head_dim_v=40, dtype="float16", causal=True),
    PackedCase("group of seven", (60, 70), heads_q=21, heads_kv=3, causal=True),
)  # fmt: skip
