"""The table of packed sequences that `attention_varlen` is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyfa.oracles.packed import sequences
from cupyfa.testing.case import DTYPES, random_bias
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
    heads_q, heads_kv, head_dim, dtype, causal, head_dim_v, window_size, softcap, sink, alibi, bias, bias_dtype
        As for `Case`.
    bias_beyond : tuple of int
        How many rows and keys, of NaN, the bias has that no sequence has.
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
    bias: str = ""
    bias_dtype: str = "float32"
    bias_beyond: tuple[int, int] = (0, 0)

    @property
    def id(self) -> str:
        """The readable name."""
        head_dim = f"d{self.head_dim}" + ("" if self.head_dim_v is None else f"x{self.head_dim_v}")
        options = ["causal"] if self.causal else []
        if self.bias:
            options.append(f"bias_{self.bias}_{self.bias_dtype}")
        return "-".join(
            [self.name.replace(" ", "_"), head_dim, self.dtype, f"h{self.heads_q}x{self.heads_kv}", *options]
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
        if self.bias:
            options["bias"] = self._bias()
        return options

    def _bias(self) -> npt.NDArray[Any]:
        used = [(rows.stop - rows.start, keys.stop - keys.start) for rows, keys in sequences(**self.lengths)]
        longest = [int(n) for n in np.max(used, axis=0)]
        more_rows, more_keys = self.bias_beyond
        sizes = dict(
            zip("bhqk", (len(used), self.heads_q, longest[0] + more_rows, longest[1] + more_keys), strict=True)
        )
        dtype = np.float32 if self.bias_dtype == "float32" else DTYPES[self.dtype]
        bias = random_bias(self.bias, sizes, dtype, lowest=not self.sink)
        if "q" in self.bias:
            bias[..., longest[0] :, :] = np.nan
        if "k" in self.bias:
            bias[..., longest[1] :] = np.nan
        return bias

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


def _biased() -> Iterator[PackedCase]:
    """Yield cases of an additive bias, copied by TMA in tiles and in rows, and gathered.

    Shows keys that are counted from the beginning of the array, the bias of another sequence or of none, and one that
    is read behind its end: most sequences are shorter than the bias, which is NaN behind the longest.
    """
    lengths = (130, 7, 40), (150, 90, 0)
    yield PackedCase("tiles", *lengths, causal=True, bias="bhqk", bias_beyond=(3, 2))
    yield PackedCase("tiles", *lengths, 4, 2, 128, "float16", bias="bhqk", bias_dtype="same", bias_beyond=(0, 10))
    yield PackedCase("tiles of all", *lengths, 4, 4, 128, causal=True, bias="hqk", bias_beyond=(0, 6), sink=True)
    yield PackedCase("rows", *lengths, 4, 2, 64, "float16", causal=True, bias="bk", bias_beyond=(0, 2))
    yield PackedCase("rows", *lengths, 4, 2, 128, bias="k", bias_dtype="same", bias_beyond=(0, 2), behind=5)
    yield PackedCase("gathered", *lengths, 4, 2, 64, causal=True, bias="bhqk", bias_beyond=(1, 1))
    yield PackedCase("gathered", *lengths, 4, 2, 128, "float16", bias="bqk", bias_dtype="same", bias_beyond=(2, 3))
    yield PackedCase("gathered rows", *lengths, 4, 2, 192, causal=True, bias="hq", bias_beyond=(1, 0))
    yield PackedCase(
        "biased window", (200, 90), (220, 150), 4, 2, 128, window_size=(60, 10), softcap=20.0, alibi=True, bias="bhqk",
        used_q=(150, 90), used_k=(220, 30), before=3, bias_dtype="same", bias_beyond=(4, 4),
    )  # fmt: skip
    yield PackedCase("biased long keys", (5, 70), (300, 500), 7, 1, 64, "float16", causal=True, bias="bk")
    yield PackedCase("biased wide", (140, 20), (90, 130), 2, 2, 256, bias="qk", bias_beyond=(0, 2), causal=True)


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
    *_biased(),
    PackedCase("wide", (100, 40), (130, 20), head_dim=256, causal=True),
    PackedCase("narrow values", (100, 140), (130, 20), head_dim=192, head_dim_v=128),
    PackedCase("padded head_dim", (100, 140), head_dim=72, head_dim_v=40, dtype="float16", causal=True),
    PackedCase("group of seven", (60, 70), heads_q=21, heads_kv=3, causal=True),
)  # fmt: skip
