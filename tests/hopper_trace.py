"""The forward kernel's own sources, run on the machine of the oracles.

`Host` compiles ``cuda/hopper/fwd.cu`` for the host, with ``tests/hopper_host/`` in the place of ``cuda/ptx/``. One
thread of each warp runs as a coroutine that stops at whatever it asks of the hardware. `replay` plays the hardware:
barriers, copies and products that take random time, so that the threads meet in shared memory in ever other
interleavings. All that a descriptor or an address says is compared with `cupyfa.oracles.hopper.descriptors` and
`swizzle`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cupyfa.oracles.hopper.barriers import MBarrier, NamedBarrier
from cupyfa.oracles.hopper.descriptors import Descriptor, k_major_addresses, mn_major_addresses
from cupyfa.oracles.hopper.machine import Machine, Program, Wait, Work
from cupyfa.oracles.hopper.pipeline import ConservationError, DanglingArrival, EarlyRead, EarlyReuse, StaleGeneration
from cupyfa.oracles.hopper.swizzle import panel_addresses, stmatrix_addresses
from cupyfa.oracles.hopper.two_stage import MissingProduct
from cupyfa.oracles.hopper.wgmma_queue import AccumulatorInFlight, MissingFence, ReleaseBeforeCompletion
from cupyfa.oracles.scheduling.makespan import TileSetViolation
from cupyfa.spec import FwdSpec, Scheduler

ROOT = Path(__file__).resolve().parent.parent
HOST = Path(__file__).resolve().parent / "hopper_host"

PRODUCER, STORER, CONSUMERS = 0, 32, 128  # the threads of the roles, the first one of the consumers
UNWRITTEN = np.uint32(0x7FC0_DEAD)  # what LSE holds before the launch


@dataclass(frozen=True)
class Problem:
    """Run-time parameters of a launch."""

    seqlen_q: int
    seqlen_k: int
    heads_q: int = 1
    heads_per_kv: int = 1
    batch: int = 1
    heads_per_section: int = 1
    left: int = 60  # of kernels with a window
    right: int = 0  # of causal kernels

    @property
    def last_diagonal(self) -> int:
        """Row 0 sees no key behind this one."""
        return self.seqlen_k - self.seqlen_q + self.right

    @property
    def first_diagonal(self) -> int:
        """Row 0 sees no key before this one."""
        return self.seqlen_k - self.seqlen_q - self.left


class Tile(NamedTuple):
    """A query tile: its row in the grid of tiles, its query head, its batch."""

    m: int
    head: int
    batch: int


def tiles_grow(spec: FwdSpec) -> bool:
    """Tell whether later tiles are longer: under a window all but the first ones are alike."""
    return spec.causal and not spec.window


def tiles(spec: FwdSpec, problem: Problem) -> list[Tile]:
    """Return all tiles in their order: head by head, or by sections of heads, in each the longest tiles first."""
    rows = range(-(-problem.seqlen_q // spec.tile_m))
    heads = range(problem.batch * problem.heads_q)
    if not spec.longest_first:
        return [Tile(m, head % problem.heads_q, head // problem.heads_q) for head in heads for m in rows]
    return [
        Tile(m, head % problem.heads_q, head // problem.heads_q)
        for first in heads[:: problem.heads_per_section]
        for m in (rows[::-1] if tiles_grow(spec) else rows)
        for head in heads[first : first + problem.heads_per_section]
    ]


def dealt(order: Sequence[Tile], cta: int, ctas: int, alternate: bool) -> list[Tile]:
    """Return the tiles that a CTA is dealt: one a round, in every other round in reverse."""
    rounds = [order[first : first + ctas] for first in range(0, len(order), ctas)]
    places = [ctas - 1 - cta if alternate and r % 2 else cta for r in range(len(rounds))]
    return [tiles[place] for tiles, place in zip(rounds, places, strict=True) if place < len(tiles)]


def key_range(spec: FwdSpec, problem: Problem, tile: Tile) -> range:
    """Return the key blocks that a tile walks over, from the last one down: one even if it sees no key."""
    row, row_end = tile.m * spec.tile_m, (tile.m + 1) * spec.tile_m
    first = max(0, row + problem.first_diagonal) if spec.window else 0
    end = min(problem.seqlen_k, row_end + problem.last_diagonal) if spec.causal else problem.seqlen_k
    return range(first // spec.tile_n, max(1, -(-end // spec.tile_n)))[::-1]


def key_blocks(spec: FwdSpec, problem: Problem, tile: Tile) -> int:
    """Return how many key blocks a tile walks over."""
    return len(key_range(spec, problem, tile))


def panels(columns: int) -> int:
    """Return the panels of 64 columns that hold so many."""
    return -(-columns // 64)


class Layout(NamedTuple):
    """Addresses of the members of ``Storage``, and its size."""

    qo: int
    k: int
    v: int
    tiles: int
    work: int
    staged: int
    k_barriers: int
    v_barriers: int
    size: int


class Host:
    """The kernels of some specs, with optional edits of the sources: file, pattern and replacement."""

    def __init__(self, folder: Path, specs: list[FwdSpec], edits: Mapping[str, tuple[str, str]] | None = None) -> None:
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        sources = folder / "cuda"
        shutil.copytree(ROOT / "cuda", sources)
        shutil.copytree(HOST, sources, dirs_exist_ok=True)
        for name, (old, new) in (edits or {}).items():
            text, count = re.subn(old, new, (sources / name).read_text())
            assert count == 1, f"{name} holds {old!r} {count} times: the kernel has changed, so must the edit"
            (sources / name).write_text(text)
        (sources / "specs.h").write_text("#define SPECS " + " ".join(f"X({spec.template_argument})" for spec in specs))
        command = [compiler, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-include", "specs.h", "-I", str(sources)]
        command += [str(sources / "launch.cpp"), "-o", str(folder / "host.so")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        self.specs, self.library = specs, ctypes.CDLL(str(folder / "host.so"))
        self.library.layout.restype = ctypes.POINTER(ctypes.c_uint)
        self.library.resume.restype = ctypes.c_char_p

    def layout(self, spec: FwdSpec) -> Layout:
        """Return where things lie in shared memory."""
        return Layout(*self.library.layout(self.specs.index(spec))[: len(Layout._fields)])

    def chunk_address(self, panel: int, row: int, chunk: int) -> int:
        """Return ``swizzled_chunk``."""
        return int(self.library.chunk_address(panel, row, chunk))


@functools.cache
def reads_k_major(bits: int, tile: int, tile_rows: int, first: int, rows: int, step: int) -> bool:
    """Tell whether a descriptor reads these rows and 16 columns of a tile, byte for byte."""
    expected = panel_addresses(tile, tile_rows, 64 * panels(16 * step + 16), 2)
    expected = expected[first : first + rows, 16 * step : 16 * step + 16]
    return np.array_equal(k_major_addresses(Descriptor.decode(bits), rows, 2), expected)


@functools.cache
def reads_n_major(bits: int, tile: int, tile_rows: int, columns: int, step: int) -> bool:
    """Tell whether a descriptor reads these 16 rows of a tile, all columns, byte for byte."""
    expected = panel_addresses(tile, tile_rows, 64 * panels(columns), 2)[16 * step : 16 * step + 16, :columns]
    return np.array_equal(mn_major_addresses(Descriptor.decode(bits), columns), expected)


@functools.cache
def staged_addresses(tile: int, tile_rows: int, thread: int, columns: int) -> list[int]:
    """Return where a warp's first lane stores O, 16 columns at a time."""
    warpgroup, first = divmod(thread - CONSUMERS, 128)
    start = tile + 64 * 128 * warpgroup
    return [int(stmatrix_addresses(start, tile_rows, step)[first]) for step in range(columns // 16)]


Content = tuple[str, int, int, int]  # tensor, first row, head, batch


@dataclass
class Region:
    """One slot of shared memory: what it holds, and who is reading it."""

    tensor: str
    start: int
    rows: int
    columns: int  # that a copy brings
    content: Content | None = None
    panels: set[int] = field(default_factory=set)  # that a copy was asked for
    missing: int = 0  # bytes in flight
    readers: list[int] = field(default_factory=list)  # threads whose asynchronous work reads it
    written: set[tuple[int, int]] = field(default_factory=set)  # by which warp, 16 columns of O each
    staged: set[tuple[int, int]] = field(default_factory=set)  # of these, what the asynchronous proxy sees

    def require(self, content: Content, who: str) -> None:
        """Raise unless all of this is here."""
        if self.content is None or self.missing or len(self.panels) < panels(self.columns):
            raise EarlyRead(f"{who} reads {content} from {self.content}, of which {self.missing} bytes are missing")
        if self.content != content:
            raise StaleGeneration(f"{who} reads {content} from {self.content}")


@dataclass
class Batch:
    """Asynchronous work of one warp: a WGMMA group, or a bulk store."""

    regions: list[Region] = field(default_factory=list)
    closed: bool = False
    complete: bool = False
    proven: bool = False


class Warp:
    """A represented thread and what it has in flight."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.warpgroup = (thread - CONSUMERS) // 128
        self.requests: list[tuple[str, tuple[int | str, ...]]] = []
        self.groups: list[Batch] = []
        self.bulk: list[Batch] = []
        self.registers: int | None = None  # asked for by setmaxnreg
        self.fenced = False  # by wgmma.fence, since the last group was closed
        self.products: Iterator[tuple[Tile, str, int, int]] = iter(())
        self.pieces = 0  # of 16 columns of O, written so far
        self.tiles_stored = 0

    def collect(self, batches: list[Batch], regions: list[Region]) -> None:
        """Add reads to the open batch, which is the last one."""
        if not batches or batches[-1].closed:
            batches.append(Batch())
        batches[-1].regions += [region for region in regions if not any(region is r for r in batches[-1].regions)]

    def unproven(self, region: Region) -> bool:
        """Tell whether work that reads a region may still be running."""
        return any(not b.proven and any(r is region for r in b.regions) for b in [*self.groups, *self.bulk])


class Cta:
    """The shared memory, the barriers and the warps of a CTA. Each method named after a request grants it."""

    def __init__(self, replay: Replay, number: int) -> None:
        self.replay, self.number, self.machine = replay, number, replay.machine
        self.spec, self.problem = replay.spec, replay.problem
        spec, at = self.spec, replay.host.layout(self.spec)
        self.barriers: dict[int, MBarrier] = {}
        self.regions: dict[int, Region] = {}  # by the address of a slot's barriers
        self.slots: dict[int, Region] = {}  # by its own address
        self.staged = range(at.staged, at.staged + 8 * spec.q_stages)
        for tensor, base, barriers, stages, rows, columns, room in (
            ("Q", at.qo, at.work, spec.q_stages, spec.tile_m, spec.head_dim, max(spec.head_dim, spec.head_dim_v)),
            ("K", at.k, at.k_barriers, spec.stages, spec.tile_n, spec.head_dim, spec.head_dim),
            ("V", at.v, at.v_barriers, spec.stages, spec.tile_n, spec.head_dim_v, spec.head_dim_v),
        ):
            for stage in range(stages):
                region = Region(tensor, base + stage * panels(room) * rows * 128, rows, columns)
                self.slots[region.start] = region
                self.regions[barriers + 8 * stage] = self.regions[barriers + 8 * (stages + stage)] = region
        self.named = {i: NamedBarrier(f"bar {i}") for i in range(16)}
        self.turns: list[int] = []  # warpgroups, in the order of their turns
        self.posted: list[Tile] = []  # in the order in which their Q was loaded
        threads = [PRODUCER, STORER, *range(CONSUMERS, CONSUMERS + 2 * spec.tile_m, 32)]
        self.warps = {thread: Warp(thread) for thread in threads}
        self.alive = len(threads)
        for thread, warp in self.warps.items():
            if thread >= CONSUMERS:
                warp.products = self.products()
            self.machine.spawn(f"CTA {number} thread {thread}", self.run(warp))

    def run(self, warp: Warp) -> Program:
        """Let a thread go on from request to request, and grant each."""
        slowness = self.replay.random.choice([0, 1, 1, 20])
        while True:
            word, numbers = self.replay.resume(self.number, warp.thread)
            if word == "exit":
                break
            warp.requests.append((word, numbers))
            yield from getattr(self, word)(warp, *numbers) or ()
            yield Work(slowness * self.replay.cycles())
        self.alive -= 1
        if not self.alive and any(region.missing or region.readers for region in self.slots.values()):
            raise DanglingArrival(f"CTA {self.number} exits while something is in flight")

    def region_of(self, address: int) -> Region:
        """Find the slot that an address lies in."""
        return self.slots[max(start for start in self.slots if start <= address)]

    def tile_of(self, number: int) -> Tile:
        """Return the tile that was posted as this one of the CTA."""
        if number >= len(self.posted):
            raise EarlyRead(f"CTA {self.number} computes its tile {number} before it is posted")
        return self.posted[number]

    def setmaxnreg(self, warp: Warp, registers: int) -> None:
        warp.registers = registers

    def trap(self, warp: Warp) -> None:
        raise AssertionError(f"thread {warp.thread} traps")

    # --- Barriers ---

    def barrier(self, address: int) -> MBarrier:
        """Find a barrier."""
        if address not in self.barriers:
            raise EarlyRead(f"the barrier at {address} is used before it is initialised")
        return self.barriers[address]

    def init(self, _: Warp, address: int, arrivals: int) -> None:
        self.barriers[address] = MBarrier(arrivals)

    def try_wait(self, _: Warp, address: int, parity: int) -> list[Wait]:
        barrier = self.barrier(address)
        return [Wait(lambda: barrier.passed(parity), f"barrier {address} parity {parity}")]

    def expect(self, _: Warp, address: int, count: int) -> None:
        self.barrier(address).arrive(expect=count)

    def arrive(self, warp: Warp, address: int) -> None:
        """Arrive. Whoever gives a slot back has proved that none of its own work reads it."""
        if address not in self.staged:
            region = self.regions[address]
            if warp.unproven(region):
                raise ReleaseBeforeCompletion(f"thread {warp.thread} gives back a tile that unproven work reads")
            if warp.thread == STORER:
                region.written, region.staged = set(), set()
        self.barrier(address).arrive()

    def cta_sync(self, warp: Warp) -> Program:
        return self.named[0].sync(str(warp.thread), 32, 32 * len(self.warps))

    def bar_sync(self, warp: Warp, number: int, threads: int) -> Program:
        yield from self.named[number].sync(str(warp.thread), 32, threads)
        if number <= 3 and warp.thread % 128 == 0:
            self.turns.append(number - 1)

    def bar_arrive(self, _: Warp, number: int, threads: int) -> None:
        self.named[number].arrive(32, threads)

    # --- Copies ---

    def load(self, _: Warp, tensor: str, address: int, column: int, row: int, head: int, batch: int, full: int) -> None:
        """Start the copy of one panel."""
        region, content, panel = self.regions[full], (tensor, row, head, batch), column // 64
        if region.readers:
            raise EarlyReuse(f"a copy of {content} overwrites {region.content} while {region.readers[0]} reads it")
        if region.written:
            raise EarlyReuse(f"a copy of {content} overwrites the O of {region.content}, which has not been stored")
        size = region.rows * 128
        assert tensor == region.tensor
        assert address == region.start + panel * size
        if panel == 0:
            region.content, region.panels = content, set()
            if tensor == "Q":
                self.posted.append(self.replay.post(Tile(row // self.spec.tile_m, head, batch)))
        assert region.content == content
        region.panels.add(panel)
        region.missing += size

        def land() -> None:
            region.missing -= size
            self.barrier(full).complete_bytes(size)

        self.machine.at(self.machine.now + self.replay.cycles(), land)

    def store(self, warp: Warp, tensor: str, address: int, column: int, row: int, head: int, batch: int) -> None:
        """Start to store one panel of O, all rows of which must be staged."""
        region, tile = self.region_of(address), self.tile_of(warp.tiles_stored)
        assert (tensor, address) == ("O", region.start + column // 64 * region.rows * 128)
        assert (row, head, batch) == (tile.m * self.spec.tile_m, tile.head, tile.batch)
        region.require(self.q_content(tile), "the storer")
        steps = range(self.spec.head_dim_v // 16)
        if region.staged != set(itertools.product(self.consumers(), steps)):
            raise EarlyRead(f"the storer stores {tile}, which is staged in part: {sorted(region.staged)}")
        warp.collect(warp.bulk, [region])
        self.replay.stored.append((tile, column))

    def bulk_commit(self, warp: Warp) -> None:
        self.start(warp, warp.bulk)
        warp.tiles_stored += 1

    def bulk_wait(self, warp: Warp, pending: int) -> Program:
        return self.complete(warp.bulk, pending)

    # --- Products ---

    def fence(self, warp: Warp) -> None:
        warp.fenced = True

    def commit(self, warp: Warp) -> None:
        self.start(warp, warp.groups)
        warp.fenced = False

    def wait(self, warp: Warp, pending: int) -> Program:
        return self.complete(warp.groups, pending)

    def start(self, warp: Warp, batches: list[Batch]) -> None:
        """Close the open batch; it completes some time later, in order."""
        batch, before = batches[-1], batches[:-1]
        batch.closed = True
        for region in batch.regions:
            region.readers.append(warp.thread)

        def finish() -> None:
            if not all(b.complete for b in before):
                self.machine.at(self.machine.now + 1, finish)
                return
            batch.complete = True
            for region in batch.regions:
                region.readers.remove(warp.thread)

        self.machine.at(self.machine.now + self.replay.cycles(), finish)

    def complete(self, batches: list[Batch], pending: int) -> Program:
        """Wait until at most `pending` batches are unproven."""
        covered = batches[: max(0, len(batches) - pending)]
        yield Wait(lambda: all(batch.complete for batch in covered), f"all but {pending} groups")
        for batch in covered:
            batch.proven = True

    def products(self) -> Iterator[tuple[Tile, str, int, int]]:
        """Yield (query tile, tensor, first row, k-step) for each WGMMA of a consumer, in program order."""
        spec = self.spec
        scores = [("K", step) for step in range(spec.head_dim // 16)]
        output = [("V", step) for step in range(spec.tile_n // 16)]
        for number in itertools.count():
            tile = self.tile_of(number)
            blocks = key_range(spec, self.problem, tile)
            last, first = blocks[0], blocks[-1]
            order = [(scores, last)]
            for j in blocks:
                if spec.three_stage:
                    order += [(scores, j - 1)] * (first < j == last) + [(scores, j - 2)] * (j > first + 1)
                    order += [(output, j)]
                elif spec.overlap:
                    order += [(scores, j - 1)] * (j > first) + [(output, j)]
                else:
                    order += [(output, j)] + [(scores, j - 1)] * (j > first)
            for steps, j in order:
                for tensor, step in steps:
                    yield tile, tensor, j * spec.tile_n, step

    def q_content(self, tile: Tile) -> Content:
        """Return what the slot of a tile's Q holds."""
        return ("Q", tile.m * self.spec.tile_m, tile.head, tile.batch)

    def ss(self, warp: Warp, columns: int, a: int, b: int, accumulate: int, trans: int) -> None:
        """S = Q K', 16 columns of both; byte for byte those that are due."""
        tile, tensor, row, step = self.due(warp, ("ss", columns, trans, accumulate))
        k, q = self.region_of(Descriptor.decode(b).start), self.region_of(Descriptor.decode(a).start)
        who = f"thread {warp.thread}"
        assert reads_k_major(b, k.start, k.rows, 0, columns, step), f"{who}: K, step {step}"
        assert reads_k_major(a, q.start, q.rows, 64 * warp.warpgroup, 64, step), f"{who}: Q, step {step}"
        k.require((tensor, row, tile.head // self.problem.heads_per_kv, tile.batch), who)
        q.require(self.q_content(tile), who)
        if any(self.warps[writer].warpgroup == warp.warpgroup for writer, _ in q.written):
            raise StaleGeneration(f"{who} reads the Q of {tile}, over which O has been written")
        warp.collect(warp.groups, [k, q])

    def rs(self, warp: Warp, columns: int, _: int, b: int, accumulate: int, trans: int) -> None:
        """O += P V, 16 keys; byte for byte those that are due."""
        tile, tensor, row, step = self.due(warp, ("rs", columns, trans, accumulate))
        v = self.region_of(Descriptor.decode(b).start)
        who = f"thread {warp.thread}"
        assert reads_n_major(b, v.start, v.rows, columns, step), f"{who}: V, keys {16 * step} and up"
        v.require((tensor, row, tile.head // self.problem.heads_per_kv, tile.batch), who)
        warp.collect(warp.groups, [v])

    def due(self, warp: Warp, issued: tuple[str, int, int, int]) -> tuple[Tile, str, int, int]:
        """Return the product that is due, if this one is of its kind."""
        product = next(warp.products)
        step = product[-1]
        due = ("rs", self.spec.head_dim_v, 1, 1) if product[1] == "V" else ("ss", self.spec.tile_n, 0, int(step > 0))
        if issued != due:
            raise MissingProduct(f"thread {warp.thread} issues {issued} where {product} is due: {due}")
        if not warp.fenced:
            raise MissingFence(f"thread {warp.thread} issues {product} without a fence")
        return product

    # --- O ---

    def consumers(self) -> list[int]:
        """Return the threads of the consumers' warps."""
        return [thread for thread in self.warps if thread >= CONSUMERS]

    def stmatrix(self, warp: Warp, address: int) -> None:
        """O goes to this warp's rows of its tile's slot, where the layout says, when nobody reads Q any more."""
        region, who = self.region_of(address), f"thread {warp.thread}"
        tile = self.tile_of(warp.pieces // (self.spec.head_dim_v // 16))
        places = staged_addresses(region.start, region.rows, warp.thread, self.spec.head_dim_v)
        assert region.tensor == "Q"
        assert address in places, f"{who}: O at {address}"
        region.require(self.q_content(tile), who)
        if any(not b.proven and r.tensor == "V" for b in warp.groups for r in b.regions):
            raise AccumulatorInFlight(f"{who} writes an O to which products may still be added")
        if warp.unproven(region):
            raise ReleaseBeforeCompletion(f"{who} writes O over Q, which unproven work reads")
        if any(self.warps[reader].warpgroup == warp.warpgroup for reader in region.readers):
            raise EarlyReuse(f"{who} writes O over Q while thread {region.readers[0]} reads it")
        region.written.add((warp.thread, places.index(address)))
        warp.pieces += 1

    def proxy_fence(self, warp: Warp) -> None:
        """From here on TMA sees what the warp has written."""
        for region in self.slots.values():
            region.staged |= {piece for piece in region.written if piece[0] == warp.thread}


class Replay:
    """A launch: all warps of its CTAs on one machine.

    Parameters
    ----------
    host : Host
        The kernels.
    spec : FwdSpec
        One of them.
    problem : Problem
        Run-time parameters.
    seed : int
        Chooses the interleaving.
    ctas : int, optional
        The grid; every CTA has a tile.
    counter : bool, optional
        The launch has a counter that CTAs may draw their tiles from.
    """

    def __init__(
        self, host: Host, spec: FwdSpec, problem: Problem, seed: int, *, ctas: int = 1, counter: bool = True
    ) -> None:
        self.host, self.spec, self.problem = host, spec, problem
        self.machine, self.random = Machine(seed), random.Random(seed)
        self.tiles = tiles(spec, problem)
        self.draws = spec.scheduler is Scheduler.DYNAMIC and counter
        self.stored: list[tuple[Tile, int]] = []  # panels of O: the tile and the first column
        self.counter = ctypes.c_uint(0)
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        # A tile that is not there would write outside of it: there is room for one on either side.
        self.lse = np.full(rows + 2 * (spec.tile_m + problem.seqlen_q), UNWRITTEN)
        numbers = [
            *(problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_per_kv, problem.batch),
            *(problem.heads_per_section, -(-problem.seqlen_q // spec.tile_m)),
            *(problem.last_diagonal, problem.first_diagonal),
        ]
        host.library.launch(
            host.specs.index(spec),
            ctas,
            (ctypes.c_int * len(numbers))(*numbers),
            ctypes.byref(self.counter) if counter else None,
            ctypes.c_void_p(self.lse.ctypes.data + self.lse.itemsize * (spec.tile_m + problem.seqlen_q)),
        )
        self.ctas = [Cta(self, number) for number in range(ctas)]

    def resume(self, cta: int, thread: int) -> tuple[str, tuple[int | str, ...]]:
        """Let a thread run up to its next request."""
        word, *numbers = self.host.library.resume(cta, thread).decode().split()
        return word, tuple(int(n) if n.lstrip("-").isdigit() else n for n in numbers)

    def cycles(self) -> int:
        """Return how long something takes, this time."""
        return self.random.choice([0, 0, 1, 3, 10])

    def post(self, tile: Tile) -> Tile:
        """Take note of a tile that a CTA begins."""
        if tile not in self.tiles or any(tile in cta.posted for cta in self.ctas):
            raise TileSetViolation(f"{tile} does not exist, or is computed a second time")
        return tile

    def run(self) -> None:
        """Play to the end: each tile was computed and stored once, and nothing is half done."""
        self.machine.run()
        for cta in self.ctas:
            due = dealt(self.tiles, cta.number, len(self.ctas), tiles_grow(self.spec))
            if self.draws:  # as many as it had time for
                due = [self.tiles[cta.number], *(t for t in self.tiles[len(self.ctas) :] if t in cta.posted)]
            if cta.posted != due:
                raise TileSetViolation(f"CTA {cta.number} computes {cta.posted} instead of {due}")
        expected = [(tile, 64 * panel) for tile in self.tiles for panel in range(panels(self.spec.head_dim_v))]
        if sorted(self.stored) != sorted(expected):
            raise TileSetViolation(f"{len(self.stored)} panels of O are stored, of {len(expected)}")
        if self.counter.value:
            raise TileSetViolation(f"the counter is left at {self.counter.value}: the next launch would miss tiles")
        self.check_lse()
        for barrier in (barrier for cta in self.ctas for barrier in cta.barriers.values()):
            if barrier.pending != barrier.arrivals or barrier.transactions:
                raise ConservationError(f"an mbarrier is left in the middle of a phase: {barrier}")
        for named in (named for cta in self.ctas for named in cta.named.values()):
            if named.arrived:
                raise ConservationError(f"a named barrier is left with arrivals: {named}")

    def check_lse(self) -> None:
        """Of each quad of rows that a warp holds, lane 0 has written the first row; nothing else was written."""
        margin = self.spec.tile_m + self.problem.seqlen_q
        written = (self.lse.view(np.uint32) != UNWRITTEN)[margin:-margin].reshape(-1, self.problem.seqlen_q)
        if not written[:, ::8].all() or written.sum() != written[:, ::8].size:
            raise TileSetViolation("the LSE of a row is missing, or written to another row")


def replay(host: Host, spec: FwdSpec, problem: Problem, seed: int, *, ctas: int = 1, counter: bool = True) -> Replay:
    """Play a launch to its end and return the final state."""
    played = Replay(host, spec, problem, seed, ctas=ctas, counter=counter)
    played.run()
    return played
