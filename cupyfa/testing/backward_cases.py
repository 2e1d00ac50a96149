"""The table of problems whose gradients every backward kernel is tested on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyfa.oracles import dense, packed
from cupyfa.oracles.packed import sequences
from cupyfa.testing.case import DTYPES, Case, as_bshd
from cupyfa.testing.inputs import random_array
from cupyfa.testing.packed_cases import PackedCase

__all__ = ["BACKWARD_CASES", "BackwardCase"]


@dataclass(frozen=True)
class BackwardCase:
    """One problem of the table.

    Attributes
    ----------
    forward : Case or PackedCase
        Shapes, types and options.
    dlse : bool
        Whether the lse has a gradient.
    deterministic : bool
        Whether the bits must be those of every other run.
    large : bool
        Whether it is for a GPU only, too large to be emulated.
    id : str
        A readable name, unique in the table.
    packed : bool
        Whether it is one of `cupyfa.attention_varlen_backward`.
    options : dict
        The keyword arguments that the oracles take, with NumPy arrays.
    call_options : dict
        Those of the function: layout and deterministic beside them.
    """

    forward: Case | PackedCase
    dlse: bool = False
    deterministic: bool = False
    large: bool = False

    @property
    def id(self) -> str:
        """The readable name."""
        flags = ["packed-" if self.packed else "", "-dlse" if self.dlse else "", "-det" if self.deterministic else ""]
        return flags[0] + self.forward.id + flags[1] + flags[2]

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return isinstance(self.forward, PackedCase)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that the oracles take.

        A row whose bias is all the lowest number has no digits of the scores left in its lse, and no gradient worth the
        name: such rows are left out.
        """
        options = self.forward.options
        if "bias" in options:
            bias = options["bias"]
            lowest = ml_dtypes.finfo(bias.dtype).min  # type: ignore[no-untyped-call]
            options["bias"] = np.where(bias == lowest, bias.dtype.type(0), bias)
        return options

    @property
    def call_options(self) -> dict[str, Any]:
        """The keyword arguments that the function takes."""
        layout = {} if isinstance(self.forward, PackedCase) else {"layout": self.forward.layout}
        return self.options | layout | {"deterministic": self.deterministic}

    def make_arrays(self, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Make all arrays that are no options: dout, q, k, v, out, lse, dlse and the lengths of packed sequences.

        Parameters
        ----------
        seed : int, optional
            Seed of the arrays.

        Returns
        -------
        dict
            In the layout of the case. ``out`` and ``lse`` are those of the float64 oracle, rounded. Whatever belongs to
            no sequence is NaN.
        """
        q, k, v = self.forward.make_inputs(seed)
        dtype = DTYPES[self.forward.dtype]
        dout = random_array((*q.shape[:-1], v.shape[-1]), dtype, 1000 + seed)
        lengths: dict[str, Any] = {}
        if isinstance(self.forward, PackedCase):
            lengths = self.forward.lengths
            out, lse = packed.attention(q, k, v, **lengths, **self.options, of_sequence=dense.attention)
        else:
            layout = self.forward.layout
            out, lse = dense.attention(*(as_bshd(x, layout) for x in (q, k, v)), **self.options)
            out = as_bshd(out, layout)
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out.astype(dtype), "lse": lse.astype(np.float32)}
        if self.dlse:
            arrays["dlse"] = random_array(lse.shape, np.float32, 2000 + seed)
        if lengths:
            nobodys = np.ones(len(q), bool)
            for rows, _ in sequences(**lengths):
                nobodys[rows] = False
            for name in ("dout", "out"):
                arrays[name][nobodys] = np.nan
            for name in {"lse", "dlse"} & arrays.keys():
                arrays[name][:, nobodys] = np.nan
        return arrays | lengths


_BOTH = (("bfloat16", True), ("float16", False))


def _of(group: str, *sizes: Any, dlse: bool = False, deterministic: bool = False, **options: Any) -> BackwardCase:
    return BackwardCase(Case(group, *sizes, **options), dlse, deterministic)


def _head_dim() -> Iterator[BackwardCase]:
    """Each native head_dim in both types, and some that are padded.

    Shows a wrong tile, a wrong default scale, columns that were never written, and columns beyond head_dim that were.
    """
    native = [(64, None), (96, None), (128, None), (192, None), (256, None), (192, 128)]
    for (head_dim, head_dim_v), (dtype, causal) in itertools.product(native, _BOTH):
        yield _of("head_dim", 1, 150, 200, 2, 1, head_dim, dtype, causal, head_dim_v=head_dim_v)
    padded = [(80, None), (40, None), (8, None), (72, 40), (64, 128), (128, 64)]
    for (head_dim, head_dim_v), (dtype, causal) in zip(padded, itertools.cycle(_BOTH), strict=False):
        yield _of("padded", 1, 100, 140, 2, 1, head_dim, dtype, causal, head_dim_v=head_dim_v)


def _gqa() -> Iterator[BackwardCase]:
    """1, 4, and other numbers of query heads for a key head, and one key head for all.

    Shows gradients of keys that lack a query head, count one twice, or are those of another group.
    """
    for (heads_q, heads_kv), (head_dim, dtype) in itertools.product(
        ((3, 3), (8, 2), (6, 1)), ((64, "float16"), (128, "bfloat16"))
    ):
        yield _of("gqa", 2, 70, 100, heads_q, heads_kv, head_dim, dtype, head_dim == 128)
    yield _of("gqa", 1, 65, 130, 14, 2, 64, "bfloat16", True)
    yield _of("gqa", 1, 40, 70, 9, 3, 192, "float16", head_dim_v=128)


def _lengths() -> Iterator[BackwardCase]:
    """Lengths around the sizes of tiles, unequal ones both ways, and none.

    Shows a block left out or visited twice, rows and keys beyond the end that count, a mask aligned at the top, and
    gradients of what sees nothing that are not 0.
    """
    toggles = itertools.cycle(itertools.product(("bfloat16", "float16"), (64, 128), (True, False)))
    for size in (1, 63, 64, 65, 127, 128, 129, 200, 300):
        for dtype, head_dim, causal in itertools.islice(toggles, 2):
            yield _of("lengths", 1, size, size, 2, 1, head_dim, dtype, causal)
    for seqlen_q, seqlen_k in ((1, 300), (300, 1), (65, 200), (200, 65), (257, 128), (5, 2)):
        for dtype, head_dim, causal in itertools.islice(toggles, 2):
            yield _of("lengths", 2, seqlen_q, seqlen_k, 2, 2, head_dim, dtype, causal)
    for batch, seqlen_q, seqlen_k in ((2, 130, 0), (2, 0, 64), (0, 64, 64)):
        yield _of("empty", batch, seqlen_q, seqlen_k, 4, 2, 64, causal=True, sink=True, dlse=True)
        yield _of("empty", batch, seqlen_q, seqlen_k, 4, 2, 128, "float16", bias="qk")


def _window() -> Iterator[BackwardCase]:
    """Windows to the left, to the right and on both sides, with a causal mask, and rows and keys that see nothing.

    Shows a first or last query block that is off by one, a mask left out at one end, and keys before every window whose
    gradients were never written.
    """
    windows = [(False, (100, None)), (False, (None, 37)), (False, (70, 45)), (True, (90, None)), (False, (0, 0))]
    shapes = itertools.cycle([(150, 275), (275, 150), (200, 200)])
    for (causal, window), (head_dim, dtype) in itertools.product(windows, ((64, "float16"), (128, "bfloat16"))):
        yield _of("window", 1, *next(shapes), 2, 1, head_dim, dtype, causal, window_size=window)
    yield _of("window", 1, 300, 70, 2, 1, 128, "bfloat16", window_size=(20, 30))
    yield _of("window", 1, 70, 300, 2, 1, 64, "float16", True, window_size=(20, None))
    yield _of("window", 1, 130, 200, 2, 1, 256, "bfloat16", True, window_size=(64, None))


def _modifiers() -> Iterator[BackwardCase]:
    """Yield cases of a softcap, a sink, slopes, gradients of the lse, and scales other than the default.

    Shows a derivative of the cap that is missing or overflowed, a sink of another head, gradients of a sink from rows
    without keys that were left out, a slope of another head or batch, a dlse with the wrong sign or base, and a scale
    that is missing, applied twice, or lost its sign.
    """
    for head_dim, dtype in ((64, "float16"), (128, "bfloat16")):
        sizes = (1, 150, 200, 2, 1, head_dim, dtype)
        for cap, amplitude in ((5.0, 1.0), (30.0, 4.0)):
            yield _of("softcap", *sizes, cap == 5.0, amplitude=amplitude, softcap=cap)
        for causal in (False, True):
            yield _of("sink", 2, 150, 100, 4, 2, head_dim, dtype, causal, sink=True, dlse=causal)
            yield _of("alibi", 2, 100, 150, 4, 1, head_dim, dtype, causal, alibi=True)
            yield _of("dlse", 2, 150, 100, 4, 2, head_dim, dtype, causal, dlse=True)
        for scale in (-0.125, 0.0, 0.5):
            yield _of("scale", *sizes, scale < 0, softmax_scale=scale)
    yield _of("sink", 1, 100, 120, 4, 4, 256, "bfloat16", True, sink=True)
    yield _of("softcap", 1, 100, 120, 2, 1, 192, "float16", softmax_scale=-0.1, softcap=2.0, head_dim_v=128)
    yield _of("dlse", 1, 130, 90, 2, 1, 96, "bfloat16", dlse=True)
    yield _of("layout", 2, 133, 111, 6, 2, 64, "float16", True, layout="BHSD")
    yield _of("layout", 2, 70, 150, 4, 4, 128, "bfloat16", layout="BHSD", sink=True, dlse=True)
    yield _of("amplitude", 1, 128, 200, 2, 1, 64, "float16", True, amplitude=4.0)
    yield _of("amplitude", 1, 128, 200, 2, 1, 128, "bfloat16", amplitude=4.0)


def _bias() -> Iterator[BackwardCase]:
    """Yield cases of a bias with all axes and without each, in both types; it hides some keys, and a row.

    Shows a gradient of another row, key, head or batch, one that was scaled or lacks a part of what it is summed over,
    and what was added beyond the end of a row.
    """
    every = ["bhqk", "hqk", "qk", "bqk", "bk", "k", "bhq"]
    for axes, kind in itertools.product(every, ("float32", "same")):
        dtype = "bfloat16" if (len(axes) % 2 == 0) == (kind == "same") else "float16"
        sizes = (2, 100, 136, 4, 2, 128 if kind == "same" else 64, dtype, axes in ("qk", "bqk"))
        yield _of("bias", *sizes, bias=axes, bias_dtype=kind)
    yield _of("bias", 1, 150, 275, 2, 1, 64, "bfloat16", True, bias="hqk")
    yield _of("bias", 1, 90, 70, 3, 3, 128, "float16", bias="hqk", bias_dtype="same", dlse=True)
    yield _of("bias", 1, 80, 104, 2, 1, 256, "bfloat16", True, bias="qk")


def _mixed() -> Iterator[BackwardCase]:
    """Several options at once, in the order cap, slope and bias, mask, sink."""
    every: dict[str, Any] = {"window_size": (60, 20), "softcap": 15.0, "sink": True, "alibi": True}
    for pair in itertools.combinations(every, 2):
        options = {name: every[name] for name in pair}
        yield _of("mixed", 1, 150, 175, 4, 2, 64, "float16", **options)
    for head_dim, head_dim_v, dtype in ((64, None, "bfloat16"), (128, None, "float16"), (192, 128, "bfloat16")):
        sizes = (1, 130, 200, 4, 2, head_dim, dtype)
        yield _of("mixed", *sizes, head_dim_v=head_dim_v, **every, dlse=True)
        yield _of("mixed", *sizes, True, head_dim_v=head_dim_v, **every, bias="hqk", bias_dtype="same")
    yield _of("mixed", 2, 200, 70, 4, 1, 128, "bfloat16", True, softmax_scale=-0.2, **every, bias="bk", dlse=True)


def _deterministic() -> Iterator[BackwardCase]:
    """Yield cases in which several thread blocks add to one place: to dQ by key tile, to dK and dV by query head.

    Shows a turn that is waited for and never comes, and one that two writers hold.
    """
    for causal, (head_dim, dtype) in itertools.product((False, True), ((64, "bfloat16"), (128, "float16"))):
        yield _of("order", 1, 270, 300, 4, 1, head_dim, dtype, causal, deterministic=True)
    yield _of("order", 1, 300, 280, 2, 2, 128, "bfloat16", window_size=(90, 30), deterministic=True)
    yield _of("order", 1, 300, 100, 2, 1, 64, "float16", True, deterministic=True)  # rows without keys
    yield _of("order", 2, 130, 200, 4, 2, 64, "bfloat16", True, sink=True, bias="k", deterministic=True)
    yield _of("order", 1, 150, 150, 2, 1, 256, "bfloat16", True, deterministic=True)
    yield _of("order", 1, 150, 150, 4, 2, 192, "bfloat16", head_dim_v=128, deterministic=True)


def _packed() -> Iterator[BackwardCase]:
    """Sequences of different lengths: ragged, empty on either side, used in part, and rows that belong to nobody.

    Shows rows of a neighbour, gradients of nobody's rows that were never written, and what is read behind the end: it
    is NaN there.
    """
    for case in (
        PackedCase("equal", (128, 128)),
        PackedCase("ragged", (100, 1, 130), dtype="float16"),
        PackedCase("ragged", (100, 1, 130), causal=True, heads_q=6, heads_kv=2, head_dim=128),
        PackedCase("other keys", (70, 150, 3), (150, 10, 3), causal=True, heads_q=4, heads_kv=4, head_dim=96),
        PackedCase("no queries", (0, 50, 0), (30, 60, 0), head_dim=32),
        PackedCase("no keys", (40, 50, 0, 9), (0, 60, 7, 0), causal=True, dtype="float16"),
        PackedCase("nothing used", (40, 50), (70, 60), used_q=(0, 50), used_k=(70, 0)),
        PackedCase("rows of nobody", (100, 60), (90, 140), before=13, behind=37, causal=True, head_dim=128),
        PackedCase("seqused", (100, 60, 20), (90, 140, 20), used_q=(37, 60, 0), used_k=(64, 5, 20), causal=True),
        PackedCase("window", (150, 40), (160, 90), window_size=(50, 0), head_dim=128),
        PackedCase("softcap", (110, 33), (80, 130), softcap=5.0, causal=True, dtype="float16"),
        PackedCase("alibi", (110, 33), (80, 130), alibi=True, heads_q=4, heads_kv=2, head_dim=128),
        PackedCase("wide", (100, 40), (130, 20), head_dim=256, causal=True),
        PackedCase("narrow values", (100, 70), (130, 20), head_dim=192, head_dim_v=128),
        PackedCase("padded head_dim", (60, 70), head_dim=72, head_dim_v=40, dtype="float16", causal=True),
    ):
        yield BackwardCase(case)
    sink = PackedCase("sink", (90, 33), (80, 0), sink=True, causal=True, behind=3, heads_q=4, heads_kv=2)
    yield BackwardCase(sink, dlse=True)
    lengths = (100, 7, 40), (120, 90, 0)
    for bias, kind, beyond in (("bhqk", "float32", (3, 2)), ("hqk", "same", (0, 6)), ("bk", "float32", (0, 2))):
        case = PackedCase("bias", *lengths, 4, 2, 64, causal=True, bias=bias, bias_dtype=kind, bias_beyond=beyond)
        yield BackwardCase(case, dlse=bias == "hqk")
    everything: dict[str, Any] = {"alibi": True, "sink": True, "softcap": 20.0, "window_size": (60, None)}
    case = PackedCase("all options", (110, 33, 90), (80, 130, 100), 4, 2, 128, causal=True, **everything)
    yield BackwardCase(replace(case, used_k=(70, 130, 90)), dlse=True)
    yield BackwardCase(PackedCase("order", (200, 5, 130), causal=True, heads_q=4, heads_kv=1), deterministic=True)
    yield BackwardCase(PackedCase("order", (150, 60), (170, 0), head_dim=128, window_size=(70, 10)), deterministic=True)


def _large() -> Iterator[BackwardCase]:
    """Many tiles, long sequences, many heads and batches: for a GPU.

    Shows a tile that is worked on twice or never, a ring that lost its phase after many blocks, sums that forget, and
    an index that wrapped at 65,536.
    """
    for head_dim, dtype, causal in ((64, "bfloat16", True), (128, "bfloat16", False), (128, "float16", True)):
        yield _of("large", 2, 1024, 1024, 8, 2, head_dim, dtype, causal)
        yield _of("large", 40, 72, 100, 8, 4, head_dim, dtype, causal)
    yield _of("large", 1, 1500, 1100, 4, 2, 192, "bfloat16", True, head_dim_v=128)
    yield _of("large", 1, 900, 1300, 4, 1, 256, "bfloat16", True)
    yield _of("large", 1, 2500, 2500, 2, 1, 64, "float16", True)
    yield _of("large", 1, 2000, 2300, 2, 1, 128, "bfloat16", window_size=(500, 100))
    yield _of("large", 2, 700, 900, 4, 2, 128, "bfloat16", True, softcap=20.0, sink=True, alibi=True, bias="hqk")
    yield _of("large", 1, 1500, 1500, 8, 1, 128, "bfloat16", True, deterministic=True)
    yield _of("large", 3, 900, 1024, 4, 2, 64, "bfloat16", sink=True, bias="k", dlse=True, deterministic=True)
    yield _of("large", 65_537, 1, 2, 1, 1, 16, "bfloat16", True)
    yield _of("large", 1, 2, 3, 65_537, 1, 8, "float16")
    many = tuple(int(n) for n in np.exp2(np.arange(40) * 7 % 40 / 5).astype(int))
    yield BackwardCase(PackedCase("large many", many * 4, heads_q=3, heads_kv=3, causal=True))
    yield BackwardCase(PackedCase("large", (900, 5, 1300), causal=True, heads_q=4, heads_kv=2), deterministic=True)
    yield BackwardCase(PackedCase("large", (700, 900), (1100, 300), 8, 2, 128, window_size=(300, 300)), dlse=True)


#: The problems that every backward kernel is held to; those that are not large can be emulated.
BACKWARD_CASES: tuple[BackwardCase, ...] = (
    *_head_dim(),
    *_gqa(),
    *_lengths(),
    *_window(),
    *_modifiers(),
    *_bias(),
    *_mixed(),
    *_deterministic(),
    *_packed(),
    *(replace(case, large=True) for case in _large()),
)
