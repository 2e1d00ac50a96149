"""Decoding over caches, beside the bytes that it cannot do without. Run as ``python -m cupyfa bench decode``.

One to sixteen queries over long caches are bound by memory: K and V are read once. The floor is that at the rate of a
large float32 sum, measured in the same run. Before each call another array is read, so that nothing of the caches is in
L2, and so long that the host has enqueued the call when it ends; each call is timed by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupyfa
from cupyfa.bench import manifest
from cupyfa.bench.clocks import Clocks
from cupyfa.bench.columns import line
from cupyfa.bench.harness import Contestant, Spread, Timing, first_line, interleave
from cupyfa.bench.peers import why_not_here
from cupyfa.bench.torch_arrays import from_torch, to_torch
from cupyfa.bench.usage import count
from cupyfa.testing import random_array

__all__ = ["CELLS", "DESCRIPTION", "DecodeCell", "DecodeRow", "add_arguments", "format_rows", "run"]

#: Of the command, for its help.
DESCRIPTION = (
    "Time attention over caches with a cold L2, beside the floor of its bytes and cuDNN. Exit status: 0; 1 if cupyfa "
    "was wrong somewhere; 2 without a GPU, or for wrong usage."
)

_HEADS_KV, _HEAD_DIM = 8, 128
#: Many times what L2 holds, and 0.24 ms to read: the first calls of a process take the host 0.2 ms. With less, the GPU
#: waits for it, between the events of the call.
_COLD_BYTES = 2**30
_SUM_BYTES = 2**30
_SETTLING_READS = 120  # of that array, about 30 ms: for the clocks, between problems that are being made
_LIMIT = 0.01  # of a difference from float64 or the peer; outputs are averages over thousands of N(0, 1)
PEER = "cuDNN"


@dataclasses.dataclass(frozen=True)
class DecodeCell:
    """A problem of 8 key/value heads of 128 columns, in bfloat16.

    Attributes
    ----------
    batch, length : int
        Sequences, and keys of each.
    group : int
        Query heads of a key/value head.
    queries : int
        Of each sequence.
    page_size : int or None
        Keys of a page, in shuffled order; None: contiguous.
    """

    batch: int
    length: int
    group: int = 1
    queries: int = 1
    page_size: int | None = None

    @property
    def cache_bytes(self) -> int:
        """The bytes of K and V."""
        return 2 * self.batch * self.length * _HEADS_KV * _HEAD_DIM * 2

    def __str__(self) -> str:
        """Return a short name."""
        page = "" if self.page_size is None else f", pages of {self.page_size}"
        return f"{self.batch} x {self.length}, group {self.group}, {self.queries} queries{page}"


_SIZES = ((1, 4096), (1, 16384), (1, 131072), (8, 16384), (16, 32768), (64, 16384))

#: What the tables show.
CELLS = (
    *(DecodeCell(batch, length, group) for batch, length in _SIZES for group in (1, 4, 8)),
    *(DecodeCell(batch, length, 8, queries) for batch, length in _SIZES[2:4] for queries in (4, 16)),
    *(DecodeCell(batch, length, 8, 1, page) for batch, length in _SIZES[2:4] for page in (16, 64, 128)),
)


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """What was measured for a problem.

    Attributes
    ----------
    cell : DecodeCell
        The problem.
    kernel : str
        What cupyfa chose.
    error : float
        Largest difference of cupyfa's from float64, over a sample.
    timings : dict
        Name to Timing.
    """

    cell: DecodeCell
    kernel: str
    error: float
    timings: dict[str, Timing]


def _time_cold(contestant: Contestant, calls: int) -> float:
    """Time calls one by one, each behind a read of another array."""
    import cupy

    other, result = _other(), cupy.empty((), np.float32)
    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(calls)]
    with contestant.context():
        for begin, end in events:
            other.sum(out=result)
            begin.record()
            contestant.call()
            end.record()
    events[-1][1].synchronize()
    return sum(float(cupy.cuda.get_elapsed_time(*pair)) for pair in events) * 1e-3


_others: list[Any] = []


def _other() -> Any:
    import cupy

    if not _others:
        _others.append(cupy.zeros(_COLD_BYTES // 4, np.float32))
    return _others[0]


def _sum_bandwidth(rounds: int) -> float:
    """Bytes a second of a sum over float32."""
    import cupy

    data, result = cupy.zeros(_SUM_BYTES // 4, np.float32), cupy.empty((), np.float32)
    timing = interleave([Contestant("sum", lambda: data.sum(out=result))], rounds, _time_cold, calls=1)["sum"]
    return _SUM_BYTES / timing.spread.median


def _measure(cell: DecodeCell, rounds: int, with_peer: bool) -> DecodeRow:
    import cupy

    keys = (cell.batch, cell.length, _HEADS_KV, _HEAD_DIM)
    shape = (cell.batch, cell.queries, _HEADS_KV * cell.group, _HEAD_DIM)
    shapes = (shape, keys, keys)
    q, k, v = (random_array(x, ml_dtypes.bfloat16, seed, xp=cupy) for seed, x in enumerate(shapes))
    caches, table = (k, v), None
    if cell.page_size is not None:
        pages = (cell.batch * cell.length // cell.page_size, cell.page_size, _HEADS_KV, _HEAD_DIM)
        table = cupy.asarray(np.random.default_rng(0).permutation(pages[0]).astype(np.int32))
        caches = tuple(cupy.empty(pages, np.uint16) for _ in "kv")
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[table] = rows.view(np.uint16).reshape(pages)
        caches = tuple(cache.view(ml_dtypes.bfloat16) for cache in caches)
        table = table.reshape(cell.batch, -1)
    lengths, out = cupy.full(cell.batch, cell.length, np.int32), cupy.empty_like(q)
    options = {"cache_seqlens": lengths, "page_table": table, "causal": cell.queries > 1}
    own = Contestant("cupyfa", lambda: cupyfa.attention_with_kvcache(q, *caches, **options, out=out))
    error = _error(own.output(), q, k, v)
    contestants = [own]
    if with_peer and cell.queries == 1 and cell.page_size is None:
        contestants.append(_cudnn(q, k, v))
    _time_cold(Contestant("settle", lambda: None), _SETTLING_READS)
    timings = interleave(contestants, rounds, _time_cold, calls=1)
    return DecodeRow(cell, str(cupyfa.explain_kvcache(q, *caches, **options).selection), error, timings)


def _cudnn(q: Any, k: Any, v: Any) -> Contestant:
    sdpa = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
    attention = importlib.import_module("torch.nn.attention")
    tensors = [to_torch(array).transpose(1, 2) for array in (q, k, v)]
    return Contestant(
        PEER,
        lambda: sdpa(*tensors, enable_gqa=q.shape[2] != k.shape[2]),
        convert=lambda result: from_torch(result.transpose(1, 2), q.dtype),
        context=lambda: attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION),
    )


def _error(out: Any, q: Any, k: Any, v: Any) -> float:
    """Return the largest difference of the last sequence's last head from float64."""
    import cupy

    queries, length = q.shape[1], k.shape[1]
    rows, keys, values = (array[-1, :, -1].astype(np.float32).astype(np.float64) for array in (q, k, v))
    scores = rows @ keys.T / np.sqrt(_HEAD_DIM)
    hidden = cupy.arange(length)[None] > cupy.arange(queries)[:, None] + length - queries
    scores[hidden] = -np.inf
    weights = cupy.exp(scores - scores.max(axis=1, keepdims=True))
    expected = weights @ values / weights.sum(axis=1, keepdims=True)
    return float(abs(out[-1, :, -1].astype(np.float32) - expected).max())


def format_rows(rows: Sequence[DecodeRow], bandwidth: float) -> list[str]:
    """Return the figures as a Markdown table.

    Parameters
    ----------
    rows : sequence of DecodeRow
        The problems.
    bandwidth : float
        Bytes a second.

    Returns
    -------
    list of str
        Time, and the part of the floor's rate that was reached: 1 is the rate of a sum.
    """
    titles = (
        "batch x keys",
        "group",
        "queries",
        "pages",
        "floor us",
        "cupyfa us",
        "of floor",
        PEER,
        f"cupyfa / {PEER}",
    )
    lines = [line(*titles), "|" + "---:|" * len(titles)]
    for row in rows:
        cell, own, peer = row.cell, row.timings["cupyfa"], row.timings.get(PEER)
        floor = cell.cache_bytes / bandwidth
        beside = ("-", "-")
        if peer is not None:
            quotients = Spread.of([theirs / ours for theirs, ours in zip(peer.seconds, own.seconds, strict=True)])
            beside = f"{floor / peer.spread.median:.2f}", f"{quotients.median:.2f}"
        wrong = "" if row.error < _LIMIT else " WRONG"
        lines.append(
            line(
                *(f"{cell.batch} x {cell.length}", cell.group, cell.queries, cell.page_size or "-"),
                *(f"{1e6 * floor:.1f}", f"{1e6 * own.spread.median:.1f}{wrong}"),
                *(f"{floor / own.spread.median:.2f}", *beside),
            )
        )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    """
    parser.add_argument("--rounds", type=count, default=21, help="rounds of the timing (%(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Parameters
    ----------
    options : argparse.Namespace
        Of :func:`add_arguments`.

    Returns
    -------
    int
        Exit status, as in :data:`DESCRIPTION`.
    """
    if reason := why_not_here():
        print(reason, file=sys.stderr)
        return 2
    import cupy
    from tqdm import tqdm

    try:
        importlib.import_module("torch.nn.attention")
        with_peer, absent = True, ""
    except Exception as error:  # a broken build raises anything
        with_peer, absent = False, f"* {PEER} is absent: {first_line(error)}"
    rows = []
    with cupy.cuda.Stream.null:  # the legacy default stream, which is also torch's
        bandwidth = _sum_bandwidth(options.rounds)
        for cell in tqdm(CELLS, desc="decode", unit="cell", file=sys.stderr):
            rows.append(_measure(cell, options.rounds, with_peer))
            cupy.get_default_memory_pool().free_all_blocks()
    header = manifest.environment(Clocks(cupy.cuda.Device().pci_bus_id), [])
    if options.json:
        figures = {"environment": header, "bandwidth": bandwidth, "rows": [dataclasses.asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print("\n".join(format_rows(rows, bandwidth)))
    print(
        f"\n* bfloat16, 8 key/value heads, head_dim 128. Floor: K and V once at {bandwidth / 1e12:.2f} TB/s, a float32 "
        f"sum of {_SUM_BYTES // 2**20} MiB. Medians of {options.rounds} interleaved rounds of one call, CUDA events, a "
        "cold L2."
    )
    if absent:
        print(absent)
    return 0 if all(row.error < _LIMIT for row in rows) else 1
