"""The table of attention cases that every kernel is tested on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from cupyfa.testing.case import DTYPES, Case

__all__ = ["CASES"]


def _toggles() -> Iterator[tuple[str, bool]]:
    """Yield (dtype, causal) in turn, for groups too wide to take the product."""
    return itertools.cycle([("bfloat16", True), ("float16", False), ("bfloat16", False), ("float16", True)])


def _anchor() -> Iterator[Case]:
    """Shapes from public bug reports, in every mode.

    Whatever is basically wrong fails here first: a tile with one row, a ragged last block, an odd length on either
    side, one query short of whole tiles, and many whole and ragged blocks.
    """
    shapes = [(1, 1, 2, 1), (1, 257, 4, 2), (239, 1, 4, 2), (113, 203, 4, 2), (1023, 1024, 2, 1)]
    for (sq, sk, hq, hk), dtype, causal in itertools.product(shapes, DTYPES, (False, True)):
        yield Case("anchor", 2, sq, sk, hq, hk, 128 if dtype == "bfloat16" else 64, dtype, causal)
    yield Case("anchor", 1, 4224, 4224, 2, 1, 128, "bfloat16", True)
    yield Case("anchor", 1, 4224, 4224, 2, 2, 64, "float16", False)


def _head_dim() -> Iterator[Case]:
    """Every multiple of 8 up to 256, in both types.

    Shows a wrong zero fill or byte count of a partial tile copy, columns beyond head_dim written to the output, a wrong
    default scale, and a head_dim that was given the wrong tile.
    """
    for head_dim, (dtype, causal) in zip([d for d in range(8, 257, 8) for _ in range(2)], _toggles(), strict=False):
        yield Case("head_dim", 1, 150, 275, 2, 1, head_dim, dtype, causal)


def _head_dim_v() -> Iterator[Case]:
    """V and out with a head_dim of their own, smaller and larger than that of q and k.

    Shows a size, a stride or a default scale that was taken from the wrong one of the two, and an output that does not
    fit where its q lay.
    """
    sizes = [(192, 128), (192, 64), (128, 192), (64, 128), (128, 64), (8, 256), (256, 8), (72, 40), (40, 136), (32, 96)]
    for (head_dim, head_dim_v), (dtype, causal) in zip(sizes, _toggles(), strict=False):
        yield Case("head_dim_v", 2, 150, 275, 4, 2, head_dim, dtype, causal, head_dim_v=head_dim_v)
    yield Case("head_dim_v", 16, 300, 300, 16, 4, 192, "bfloat16", True, head_dim_v=128)
    yield Case("head_dim_v", 2, 133, 211, 6, 2, 192, "float16", False, layout="BHSD", head_dim_v=128)


def _gqa() -> Iterator[Case]:
    """Many query heads per key head, including ratios that are no power of two.

    Shows a head index that was divided the wrong way round, taken modulo, or replaced by a shift.
    """
    ratios = [(96, 8), (14, 2), (9, 3), (6, 1), (21, 7), (8, 1), (5, 5)]
    for (hq, hk), head_dim in itertools.product(ratios, (64, 128)):
        yield Case("gqa", 2, 70, 150, hq, hk, head_dim, "bfloat16" if head_dim == 64 else "float16", hq % 2 == 1)
    yield Case("gqa", 1, 200, 333, 21, 7, 120, "bfloat16", True, layout="BHSD")
    yield Case("gqa", 2, 1, 600, 32, 4, 256, "float16", True)


def _empty() -> Iterator[Case]:
    """Nothing to do, for a whole call, a whole tile, or single rows.

    Shows a division by a zero sum, an lse of NaN or +inf, an output that was never written, a wait for a copy that is
    never issued, and a causal mask aligned at the top.
    """
    for causal, head_dim in itertools.product((False, True), (64, 128)):
        yield Case("empty", 2, 130, 0, 4, 2, head_dim, causal=causal)
        yield Case("empty", 0, 64, 64, 2, 1, head_dim, causal=causal)
        yield Case("empty", 2, 0, 64, 2, 1, head_dim, causal=causal)
    for sq, sk in [(5, 2), (300, 1), (513, 130), (700, 333), (129, 128), (400, 64)]:
        yield Case("empty", 2, sq, sk, 3, 1, 64, "float16", True)
        yield Case("empty", 1, sq, sk, 2, 2, 128, "bfloat16", True)


def _scale() -> Iterator[Case]:
    """Scales other than the default.

    Zero and negative ones show a scale applied to scores that are masked already (``-inf * 0`` is NaN, ``-inf * -1`` is
    +inf) and a maximum taken before a negative scale turned the order round. 1.0 and 0.01 show a default used instead.
    """
    for (scale, causal), (head_dim, dtype) in itertools.product(
        itertools.product((0.0, -0.125, -1.0, 1.0, 0.01), (False, True)), ((64, "float16"), (128, "bfloat16"))
    ):
        yield Case("scale", 1, 180, 301, 2, 1, head_dim, dtype, causal, softmax_scale=scale)


def _edge() -> Iterator[Case]:
    """Lengths one below, at and one above the sizes of tiles.

    Shows a block count rounded the wrong way, a mask left out on the last block or applied to the one before, and a
    store past the last row.
    """
    toggles = _toggles()
    for size, head_dim in [(64, 64), (64, 256), (80, 192), (96, 160), (128, 128), (128, 64), (192, 64), (256, 128)]:
        for delta in (-1, 0, 1):
            dtype, causal = next(toggles)
            yield Case("edge", 1, size + delta, 2 * size + delta, 2, 1, head_dim, dtype, causal)
            yield Case("edge", 1, 2 * size - delta, size + delta, 2, 2, head_dim, dtype, not causal)


def _persistent() -> Iterator[Case]:
    """More tiles than a GPU has multiprocessors, several times over, most of them short.

    A persistent kernel takes several tiles per thread block. Shows barrier phases or the issue token that were reset
    or lost between tiles, Q overwritten while it is still read, and a tile scheduled twice or never. Causal tiles of
    one call visit different numbers of blocks: one, two, many, and none.
    """
    for head_dim, dtype in [(64, "bfloat16"), (128, "float16"), (128, "bfloat16"), (256, "float16")]:
        yield Case("persistent", 64, 40, 72, 8, 4, head_dim, dtype, False)
        yield Case("persistent", 32, 17, 300, 16, 4, head_dim, dtype, True)
    yield Case("persistent", 3, 640, 640, 36, 12, 64, "bfloat16", True)
    yield Case("persistent", 3, 640, 640, 36, 12, 128, "float16", True)
    yield Case("persistent", 5, 700, 450, 24, 8, 128, "bfloat16", True)
    yield Case("persistent", 5, 700, 450, 24, 8, 64, "float16", False)


def _ring() -> Iterator[Case]:
    """Few queries, many keys: every number of blocks from one on, and far more blocks than ring stages.

    Shows a wrong stage or parity, a stage released before its last reader, and a drain that misses the last block.
    """
    toggles = _toggles()
    for blocks, head_dim in itertools.product((1, 2, 3, 4, 5, 7), (64, 128)):
        dtype, causal = next(toggles)
        yield Case("ring", 1, 65, 128 * blocks - 3, 2, 1, head_dim, dtype, causal)
    yield Case("ring", 1, 3, 8193, 4, 1, 128, "bfloat16", True)
    yield Case("ring", 1, 130, 6001, 2, 1, 64, "float16", False)
    yield Case("ring", 1, 33, 4097, 2, 1, 256, "bfloat16", False)


def _layout() -> Iterator[Case]:
    """Axes in the order (batch, heads, seqlen, head_dim).

    Shows strides that were derived from the shape instead of read from the array.
    """
    for head_dim, (dtype, causal) in zip((64, 128, 256, 72, 128, 64), _toggles(), strict=False):
        yield Case("layout", 3, 133, 211, 6, 2, head_dim, dtype, causal, layout="BHSD")


def _amplitude() -> Iterator[Case]:
    """Scores with a standard deviation of 64: softmax picks single keys, and running maxima jump.

    Shows an exponent that overflows or underflows, a maximum that starts at 0 and stays there when all scores are
    strongly negative (one and two keys make many such rows), and an output that was not shrunk when the maximum grew.
    """
    for (sq, sk), (head_dim, dtype), causal in itertools.product(
        [(200, 1), (128, 2), (257, 391)], [(64, "float16"), (128, "bfloat16")], (False, True)
    ):
        yield Case("amplitude", 1, sq, sk, 4, 2, head_dim, dtype, causal, amplitude=8.0)
    yield Case("amplitude", 1, 100, 1500, 2, 1, 256, "bfloat16", True, amplitude=8.0)
    yield Case("amplitude", 1, 257, 391, 2, 1, 64, "float16", True, softmax_scale=-1.0, amplitude=8.0)


def _wide() -> Iterator[Case]:
    """More batches or heads than a 16-bit grid dimension holds.

    Shows a batch or a head mapped to the y or z axis of the grid, and an index that wrapped at 65,536.
    """
    yield Case("wide", 65_537, 1, 2, 1, 1, 16, "bfloat16", True)
    yield Case("wide", 1, 2, 3, 65_537, 1, 8, "float16", False)


# Of every kernel tile one; each in one type, to compile few kernels.
_TILES = [
    (64, None, "float16"),
    (96, None, "bfloat16"),
    (128, None, "bfloat16"),
    (192, None, "float16"),
    (192, 128, "bfloat16"),
    (256, None, "bfloat16"),
]


def _window() -> Iterator[Case]:
    """Keys left, right, or on both sides of the diagonal, for every kernel tile.

    Shows a side that is off by one or belongs to the other one, a first block that is not the one with the first key, a
    mask left out on one end of a block with two, a diagonal aligned at the top, rows or whole tiles without a key that
    wait for one, and a count of blocks that still starts at 0.
    """
    shapes = itertools.cycle([(150, 275), (275, 150), (260, 260)])
    for head_dim, head_dim_v, dtype in _TILES:
        for causal, window in [(False, (100, None)), (False, (None, 37)), (False, (70, 45)), (True, (90, None))]:
            sizes = (1, *next(shapes), 2, 1, head_dim, dtype, causal)
            yield Case("window", *sizes, head_dim_v=head_dim_v, window_size=window)
    # The first row's keys begin and end one before, at, or one after the edge of a block.
    for (head_dim, head_dim_v, dtype), size in zip(_TILES, (128, 192, 128, 80, 96, 64), strict=True):
        for side in (size - 1, size, size + 1):
            sk = 140 + 2 * size
            yield Case("window", 1, 140, sk, 1, 1, head_dim, dtype, head_dim_v=head_dim_v, window_size=(side, side))
    for sq, sk in [(200, 200), (150, 300), (300, 150)]:  # one key
        yield Case("window", 1, sq, sk, 2, 1, 128, "bfloat16", window_size=(0, 0))
    yield Case("window", 1, 200, 200, 2, 1, 64, "float16", True, window_size=(0, None))
    yield Case("window", 1, 200, 230, 2, 1, 64, "float16", window_size=(1000, 1000))
    yield Case("window", 1, 200, 230, 2, 1, 128, "bfloat16", True, window_size=(1000, None))
    # Rows without a key, whole tiles of them, and no key at all.
    yield Case("window", 2, 513, 130, 3, 1, 64, "float16", window_size=(20, 30))
    yield Case("window", 2, 513, 130, 3, 1, 128, "bfloat16", True, window_size=(20, None))
    yield Case("window", 1, 300, 1, 2, 2, 128, "bfloat16", True, window_size=(5, None))
    yield Case("window", 2, 130, 0, 4, 2, 64, "float16", window_size=(5, 5))
    # Few of many blocks.
    yield Case("window", 1, 65, 3000, 2, 1, 128, "bfloat16", window_size=(33, 7))
    yield Case("window", 1, 130, 3000, 2, 1, 64, "float16", True, window_size=(1000, None))
    yield Case("window", 1, 1, 1500, 8, 2, 128, "bfloat16", True, window_size=(127, None))
    # Several tiles per thread block.
    yield Case("window", 24, 140, 160, 12, 4, 64, "float16", True, window_size=(50, None))
    yield Case("window", 16, 129, 129, 16, 4, 128, "bfloat16", window_size=(40, 20))


def _softcap() -> Iterator[Case]:
    """Caps that scores hardly feel, and scores far beyond them.

    Shows an exponential whose overflow became NaN, a cap before the scale or after the mask (masked keys at ``-c``
    count), a negative scale whose sign was lost, and a tanh that is too coarse.
    """
    for cap, (head_dim, dtype), amplitude in itertools.product(
        (15.0, 50.0), ((64, "float16"), (128, "bfloat16")), (8.0, 30.0)
    ):
        causal = (cap == 15.0) == (amplitude == 8.0)
        yield Case("softcap", 1, 150, 275, 2, 1, head_dim, dtype, causal, amplitude=amplitude, softcap=cap)
    for head_dim, head_dim_v, dtype in _TILES:
        yield Case("softcap", 1, 150, 275, 2, 1, head_dim, dtype, True, head_dim_v=head_dim_v, softcap=30.0)
    for scale in (-1.0, 0.0):
        yield Case("softcap", 1, 180, 301, 2, 1, 64, "float16", False, scale, softcap=15.0)
        yield Case("softcap", 1, 180, 301, 2, 1, 128, "bfloat16", True, scale, softcap=50.0)
    yield Case("softcap", 1, 300, 70, 2, 1, 128, "bfloat16", True, softcap=15.0)
    yield Case("softcap", 1, 3, 600, 2, 1, 64, "float16", False, softcap=1.0)


def _sink() -> Iterator[Case]:
    """One more logit in each row, which has no value.

    Shows a sink in base 2, or scaled like a score; one of another head, or of the key head; one that was taken for a
    key and is missing where there is none, or that rows without a key divide by; and an infinite one that became NaN.
    """
    for head_dim, head_dim_v, dtype in _TILES:
        yield Case("sink", 2, 150, 275, 4, 2, head_dim, dtype, True, head_dim_v=head_dim_v, sink=True)
    for head_dim, dtype in ((64, "float16"), (128, "bfloat16")):
        yield Case("sink", 2, 300, 70, 4, 1, head_dim, dtype, True, sink=True)
        yield Case("sink", 1, 128, 2, 4, 2, head_dim, dtype, amplitude=8.0, sink=True)
        yield Case("sink", 1, 257, 391, 4, 2, head_dim, dtype, True, amplitude=8.0, sink=True)
        yield Case("sink", 2, 130, 0, 5, 1, head_dim, dtype, sink=True)
    yield Case("sink", 2, 70, 150, 14, 2, 64, "float16", sink=True)
    yield Case("sink", 1, 200, 333, 21, 7, 128, "bfloat16", layout="BHSD", sink=True)
    yield Case("sink", 1, 180, 301, 4, 4, 128, "bfloat16", False, 0.0, sink=True)
    yield Case("sink", 1, 180, 301, 4, 4, 64, "float16", True, -1.0, sink=True)


def _alibi() -> Iterator[Case]:
    """Scores that fall with the distance from the diagonal: hardly for some heads, by a factor in every key for others.

    Shows a diagonal aligned at the top, a distance that is positive on one side and negative on the other, the slope of
    another head or batch, one in the wrong base or scaled like a score, and a maximum taken before it.
    """
    for (head_dim, dtype), causal in itertools.product(((64, "float16"), (128, "bfloat16")), (False, True)):
        for sq, sk in [(150, 275), (275, 150)]:
            yield Case("alibi", 1 + (sq < sk), sq, sk, 4, 2, head_dim, dtype, causal, alibi=True)
    for head_dim, head_dim_v, dtype in _TILES[3:]:
        yield Case("alibi", 1, 150, 275, 2, 1, head_dim, dtype, True, head_dim_v=head_dim_v, alibi=True)
    yield Case("alibi", 1, 70, 150, 64, 8, 64, "float16", alibi=True)
    yield Case("alibi", 3, 70, 150, 9, 3, 128, "bfloat16", True, layout="BHSD", alibi=True)
    yield Case("alibi", 1, 257, 391, 4, 2, 64, "float16", True, amplitude=8.0, alibi=True)
    yield Case("alibi", 1, 65, 2000, 8, 2, 128, "bfloat16", alibi=True)
    yield Case("alibi", 1, 180, 301, 4, 4, 128, "bfloat16", False, 0.0, alibi=True)
    yield Case("alibi", 1, 180, 301, 4, 4, 64, "float16", True, -0.125, alibi=True)


def _bias() -> Iterator[Case]:
    """Yield cases of an additive bias, with all axes and without each, in both types; it hides some keys, and a row.

    Shows the element of another row, key, head or batch, one scaled like a score or in the wrong base, a broadcast axis
    that was walked, a row without keys that became NaN, a slot of the bias that was given back too early, and what lies
    behind the end of a row. Rows of seqlen_k elements are copied by TMA where they are multiples of 16 bytes.
    """
    every = [
        ("bhqk", 304),
        ("hqk", 304),
        ("qk", 304),
        ("bqk", 304),
        ("bk", 304),
        ("k", 304),
        ("bhq", 304),
        ("hqk", 301),
    ]
    for (axes, sk), (dtype, causal), of in zip(every * 2, _toggles(), "ssssffffffffssss", strict=False):
        kind = "same" if of == "s" else "float32"
        yield Case("bias", 2, 150, sk, 4, 2, 128 if causal else 64, dtype, causal, bias=axes, bias_dtype=kind)
    for head_dim, head_dim_v, dtype in _TILES:
        for kind in ("same", "float32"):
            yield Case("bias", 1, 150, 280, 2, 1, head_dim, dtype, head_dim_v=head_dim_v, bias="hqk", bias_dtype=kind)
        yield Case("bias", 1, 150, 275, 2, 1, head_dim, dtype, True, head_dim_v=head_dim_v, bias="hqk")
    yield Case("bias", 1, 300, 72, 2, 1, 64, "float16", True, bias="hqk", bias_dtype="same")
    yield Case("bias", 1, 16, 43, 16, 16, 64, "bfloat16", bias="hqk")
    yield Case("bias", 1, 1, 1000, 8, 2, 128, "bfloat16", bias="hqk", bias_dtype="same")
    yield Case("bias", 2, 130, 0, 4, 2, 64, "float16", bias="qk")
    yield Case("bias", 2, 180, 304, 4, 4, 128, "bfloat16", True, -0.125, "BHSD", bias="bhqk")
    yield Case("bias", 1, 180, 304, 4, 4, 64, "float16", False, 0.0, bias="hqk", bias_dtype="same")
    yield Case("bias", 1, 257, 392, 4, 2, 128, "bfloat16", True, amplitude=8.0, bias="hqk", bias_dtype="same")
    # Several tiles per thread block.
    yield Case("bias", 10, 129, 136, 16, 4, 128, "bfloat16", bias="hqk", bias_dtype="same")
    yield Case("bias", 14, 140, 160, 12, 4, 64, "float16", True, bias="qk")


def _mixed() -> Iterator[Case]:
    """Windows, caps, sinks, slopes and biases together.

    Shows steps in another order than cap, slope and bias, mask, sink, and an argument that took the place of another.
    """
    every: dict[str, Any] = {"window_size": (60, 20), "softcap": 15.0, "sink": True, "alibi": True}
    for pair, (dtype, _) in zip(itertools.combinations(every, 2), _toggles(), strict=False):
        options = {name: every[name] for name in pair}
        yield Case("mixed", 2, 150, 275, 4, 2, 128 if dtype == "bfloat16" else 64, dtype, **options)
    for head_dim, head_dim_v, dtype in _TILES:
        yield Case("mixed", 1, 150, 275, 6, 2, head_dim, dtype, head_dim_v=head_dim_v, amplitude=8.0, **every)
    for dtype, layout in itertools.product(DTYPES, ("BSHD", "BHSD")):
        causal: dict[str, Any] = every | {"window_size": (90, None), "softcap": 50.0}
        yield Case("mixed", 2, 140, 203, 6, 1, 128, dtype, True, layout=layout, **causal)
    yield Case("mixed", 2, 300, 70, 4, 1, 64, "float16", True, -1.0, **every)
    yield Case("mixed", 2, 513, 130, 3, 1, 128, "bfloat16", **every)
    for name, value in every.items():
        options = {name: value}
        yield Case("mixed", 2, 150, 280, 4, 2, 64, "float16", **options, bias="hqk")
        yield Case("mixed", 2, 150, 280, 4, 2, 128, "bfloat16", **options, bias="bqk", bias_dtype="same")
    for (head_dim, head_dim_v, dtype), kind in zip(_TILES, itertools.cycle(("same", "float32")), strict=False):
        options = every | {"bias": "qk", "bias_dtype": kind}
        yield Case("mixed", 1, 150, 280, 6, 2, head_dim, dtype, head_dim_v=head_dim_v, **options)
    yield Case("mixed", 1, 150, 275, 6, 2, 128, "bfloat16", True, -1.0, **every, bias="hqk")


#: The attention problems that every kernel is held to: over 150, cheap enough for a float64 oracle on two cores.
CASES: tuple[Case, ...] = tuple(
    itertools.chain(
        _anchor(),
        _head_dim(),
        _head_dim_v(),
        _gqa(),
        _empty(),
        _scale(),
        _edge(),
        _persistent(),
        _ring(),
        _layout(),
        _amplitude(),
        _wide(),
        _window(),
        _softcap(),
        _sink(),
        _alibi(),
        _bias(),
        _mixed(),
    )
)
