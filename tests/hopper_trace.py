"""What the forward kernel asks of the hardware, from its own sources, and a replay on the machine of the oracles.

`Traces` compiles ``cuda/hopper/fwd.cu`` for the host, with ``tests/hopper_host/`` in the place of ``cuda/ptx/``, and
runs one thread of each warp. No path in the kernel depends on a wait, so each warp's list of requests is complete.
`replay` then plays the lists against each other with real barriers, copies and products that take random time, and
compares all that a descriptor or an address says with the layouts of `cupyfa.oracles.hopper.descriptors` and `swizzle`.
"""

from __future__ import annotations

import functools
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cupyfa.oracles.hopper.barriers import MBarrier, NamedBarrier
from cupyfa.oracles.hopper.descriptors import Descriptor, k_major_addresses, mn_major_addresses
from cupyfa.oracles.hopper.machine import Machine, Program, Wait, Work
from cupyfa.oracles.hopper.pipeline import EarlyRead, EarlyReuse, StaleGeneration
from cupyfa.oracles.hopper.swizzle import panel_addresses, stmatrix_addresses
from cupyfa.oracles.hopper.two_stage import MissingProduct
from cupyfa.oracles.hopper.wgmma_queue import ReleaseBeforeCompletion
from cupyfa.oracles.mask import block_range
from cupyfa.spec import FwdSpec

ROOT = Path(__file__).resolve().parent.parent
HOST = Path(__file__).resolve().parent / "hopper_host"

Op = tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Run-time parameters of one CTA that computes everything."""

    seqlen_q: int
    seqlen_k: int
    heads_q: int = 1
    heads_per_kv: int = 1


@dataclass
class Trace:
    """Requests of each represented thread, and where things lie."""

    spec: FwdSpec
    problem: Problem
    layout: list[int]
    chunks: list[int]  # swizzled_chunk of rows 0 to 15, chunks 0 to 7
    agents: dict[str, list[Op]]


class Traces:
    """A host program for some specs, with optional edits of the sources: file, pattern and replacement."""

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
        self.specs, self.program = specs, folder / "trace"
        command = [compiler, "-std=c++20", "-O0", "-w", "-include", "specs.h", "-I", str(sources)]
        command += [str(sources / "main.cpp"), "-o", str(self.program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    def of(self, spec: FwdSpec, problem: Problem) -> Trace:
        """Run the kernel for a problem."""
        numbers = [self.specs.index(spec), problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_per_kv]
        numbers.append(-(-problem.seqlen_q // spec.tile_m))
        done = subprocess.run([self.program, *map(str, numbers)], capture_output=True, text=True, check=True)
        agents: dict[str, list[Op]] = {}
        layout: list[int] = []
        chunks: list[int] = []
        for line in done.stdout.splitlines():
            word, *rest = line.split()
            if word == "layout":
                layout = [int(x) for x in rest]
            elif word == "chunks":
                chunks = [int(x) for x in rest]
            elif word == "agent":
                ops = agents.setdefault(f"thread {rest[0]}", [])
            else:
                ops.append((word, *rest))
        return Trace(spec, problem, layout, chunks, agents)


def tiles(trace: Trace) -> list[tuple[int, int, int]]:
    """Return (tile row, head, key blocks) in the order in which the CTA walks: heads outermost, longest tile first."""
    spec, problem = trace.spec, trace.problem
    count = -(-problem.seqlen_q // spec.tile_m)
    order = range(count)[::-1] if spec.causal else range(count)
    return [
        (
            m,
            head,
            block_range(
                m * spec.tile_m, (m + 1) * spec.tile_m, problem.seqlen_q, problem.seqlen_k, spec.tile_n, spec.causal
            ).end,
        )
        for head in range(problem.heads_q)
        for m in order
    ]


@functools.cache
def reads_k_major(bits: int, tile: int, tile_rows: int, head_dim: int, first: int, rows: int, step: int) -> bool:
    """Tell whether a descriptor reads these rows and 16 columns of a tile, byte for byte."""
    expected = panel_addresses(tile, tile_rows, head_dim, 2)[first : first + rows, 16 * step : 16 * step + 16]
    return np.array_equal(k_major_addresses(Descriptor.decode(bits), rows, 2), expected)


@functools.cache
def reads_n_major(bits: int, tile: int, tile_rows: int, columns: int, step: int) -> bool:
    """Tell whether a descriptor reads these 16 rows of a tile, all columns, byte for byte."""
    expected = panel_addresses(tile, tile_rows, columns, 2)[16 * step : 16 * step + 16]
    return np.array_equal(mn_major_addresses(Descriptor.decode(bits), columns), expected)


@dataclass
class Region:
    """One tile of shared memory: what it holds, and who is reading it."""

    start: int
    rows: int
    content: tuple[str, int, int] | None = None  # tensor, first row, head
    missing: int = 0  # bytes in flight
    readers: list[str] = field(default_factory=list)


@dataclass
class Batch:
    """Asynchronous work of one warp: a WGMMA group, or a bulk store."""

    regions: list[Region] = field(default_factory=list)
    closed: bool = False
    complete: bool = False
    proven: bool = False


class Replay:
    """All warps of a CTA on one machine."""

    def __init__(self, trace: Trace, seed: int) -> None:
        self.trace, self.machine, self.random = trace, Machine(seed), random.Random(seed)
        self.spec = trace.spec
        spec, (q, k, v, q_bar, k_bar, v_bar, _) = self.spec, trace.layout
        self.barriers: dict[int, MBarrier] = {}
        self.regions: dict[int, Region] = {}  # by the address of a slot's full and empty barriers
        self.tiles: dict[int, Region] = {}  # by its own address
        for base, bars, stages, rows in (
            (q, q_bar, spec.q_stages, spec.tile_m),
            (k, k_bar, spec.stages, spec.tile_n),
            (v, v_bar, spec.stages, spec.tile_n),
        ):
            for stage in range(stages):
                region = Region(base + stage * rows * spec.head_dim * 2, rows)
                self.tiles[region.start] = region
                self.regions[bars + 8 * stage] = self.regions[bars + 8 * (stages + stage)] = region
        self.named = {i: NamedBarrier(f"bar {i}") for i in range(16)}
        self.turns: list[int] = []  # warpgroups, in the order of their turns
        for name, ops in trace.agents.items():
            self.machine.spawn(name, self.initialise(ops) if name == "thread 0" else self.warp(name, ops))

    def run(self) -> None:
        """Play to the end."""
        self.machine.run()

    def cycles(self) -> int:
        """Return how long something takes, this time."""
        return self.random.choice([0, 0, 1, 3, 10])

    def initialise(self, ops: list[Op]) -> Program:
        """Play thread 0: barriers first, then the producer."""
        for word, *x in ops:
            if word == "init":
                self.barriers[int(x[0])] = MBarrier(int(x[1]))
        return self.warp("thread 0", [op for op in ops if op[0] != "init"])

    def warp(self, name: str, ops: list[Op]) -> Program:
        """Play one warp."""
        groups: list[Batch] = []
        bulk: list[Batch] = []
        expected = self.expected_operands()
        for word, *x in ops:
            number = [int(n) for n in x if n.lstrip("-").isdigit()]
            if word == "try_wait":
                barrier, parity = self.barriers[number[0]], number[1]
                yield Wait(lambda b=barrier, p=parity: b.passed(p), f"barrier {number[0]} parity {parity}")  # type: ignore[misc]
            elif word == "expect":
                self.barriers[number[0]].arrive(expect=number[1])
            elif word == "load":
                self.load(x[1], number)
            elif word == "arrive":
                self.release(name, number[0], [*groups, *bulk])
            elif word == "bar_sync":
                yield from self.named[number[0]].sync(name, 32, number[1])
                if number[0] < 4 and int(name.split()[1]) % 128 == 0:
                    self.turns.append(number[0] - 1)
            elif word == "bar_arrive":
                self.named[number[0]].arrive(32, number[1])
            elif word == "cta_sync":
                yield from self.named[0].sync(name, 32, 32 * len(self.trace.agents))
            elif word in ("ss", "rs"):
                self.collect(groups, self.operands(name, word, number, next(expected)))
            elif word in ("commit", "bulk_commit"):
                self.start(name, groups if word == "commit" else bulk)
            elif word in ("wait", "bulk_wait"):
                batches = groups if word == "wait" else bulk
                covered = batches[: max(0, len(batches) - number[0])]
                yield Wait(lambda c=covered: all(b.complete for b in c), word)  # type: ignore[misc]
                for batch in covered:
                    batch.proven = True
            elif word == "stmatrix":
                self.check_stmatrix(name, number[0], groups)
            elif word == "store":
                self.collect(bulk, [self.region_of(number[0])])
            yield Work(self.cycles())

    # --- What the operands must be ---

    def expected_operands(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (tensor, first row, head, k-step) for each WGMMA of a consumer, in program order."""
        spec = self.spec
        scores = [("K", step) for step in range(spec.head_dim // 16)]
        output = [("V", step) for step in range(spec.tile_n // 16)]
        for _, head, blocks in tiles(self.trace):
            head_kv = head // self.trace.problem.heads_per_kv
            order = [(scores, blocks - 1)] if blocks else []
            for j in range(blocks - 1, -1, -1):
                if spec.overlap:
                    order += [(scores, j - 1)] * (j > 0) + [(output, j)]
                else:
                    order += [(output, j)] + [(scores, j - 1)] * (j > 0)
            for products, j in order:
                for tensor, step in products:
                    yield tensor, j * spec.tile_n, head_kv, step

    def operands(self, name: str, word: str, number: list[int], expected: tuple[str, int, int, int]) -> list[Region]:
        """Check both operands of one WGMMA, byte for byte, and return the tiles that it reads."""
        spec = self.spec
        columns, a, b, accumulate, trans = number
        tensor, row, head, step = expected
        region = self.region_of(Descriptor.decode(b).start)
        regions = [region]
        due = ("rs", spec.head_dim, 1, 1) if tensor == "V" else ("ss", spec.tile_n, 0, int(step > 0))
        if (word, columns, trans, accumulate) != due:
            raise MissingProduct(f"{name} issues {(word, columns, trans, accumulate)} where {expected} is due: {due}")
        if word == "rs":
            assert reads_n_major(b, region.start, region.rows, columns, step), f"{name}: V, keys {16 * step} and up"
        else:
            assert reads_k_major(b, region.start, region.rows, spec.head_dim, 0, columns, step), (
                f"{name}: K, step {step}"
            )
            q = self.region_of(Descriptor.decode(a).start)
            first = 64 * (int(name.split()[1]) // 128 - 1)
            assert reads_k_major(a, q.start, q.rows, spec.head_dim, first, 64, step), f"{name}: Q, step {step}"
            regions.append(q)
            if q.content is None or q.content[0] != "Q" or q.missing:
                raise EarlyRead(f"{name} reads Q, which holds {q.content} with {q.missing} bytes missing")
        if region.content is None or region.missing:
            raise EarlyRead(
                f"{name} reads {expected}, which holds {region.content} with {region.missing} bytes missing"
            )
        if region.content != (tensor, row, head):
            raise StaleGeneration(f"{name} reads {expected}, which holds {region.content}")
        return regions

    def region_of(self, address: int) -> Region:
        """Find the tile that an address lies in."""
        return self.tiles[max(start for start in self.tiles if start <= address)]

    # --- Agents ---

    def load(self, tensor: str, number: list[int]) -> None:
        """Start the copy of one panel."""
        destination, column, row, head, _, barrier = number
        region = self.regions[barrier]
        if region.readers:
            raise EarlyReuse(f"a copy of {tensor} overwrites {region.content} while {region.readers[0]} reads it")
        panel_bytes = region.rows * 128
        assert destination == region.start + column // 64 * panel_bytes
        region.content = (tensor, row, head)
        region.missing += panel_bytes

        def land() -> None:
            region.missing -= panel_bytes
            self.barriers[barrier].complete_bytes(panel_bytes)

        self.machine.at(self.machine.now + self.cycles(), land)

    def release(self, name: str, barrier: int, batches: list[Batch]) -> None:
        """Arrive on an empty barrier; everything that reads its tile must be proven complete."""
        for batch in batches:
            if not batch.proven and any(region is self.regions[barrier] for region in batch.regions):
                raise ReleaseBeforeCompletion(f"{name} gives back a tile that unproven work reads")
        self.barriers[barrier].arrive()

    def collect(self, batches: list[Batch], regions: list[Region]) -> None:
        """Add reads to the open batch, which is the last one."""
        if not batches or batches[-1].closed:
            batches.append(Batch())
        batches[-1].regions += [region for region in regions if not any(region is r for r in batches[-1].regions)]

    def start(self, name: str, batches: list[Batch]) -> None:
        """Close the open batch; it completes some time later, in order."""
        batch = batches[-1]
        batch.closed = True
        for region in batch.regions:
            region.readers.append(name)
        before = batches[:-1]

        def finish() -> None:
            if not all(b.complete for b in before):
                self.machine.at(self.machine.now + 1, finish)
                return
            batch.complete = True
            for region in batch.regions:
                region.readers.remove(name)

        self.machine.at(self.machine.now + self.cycles(), finish)

    def check_stmatrix(self, name: str, address: int, groups: list[Batch]) -> None:
        """O goes to this warp's rows of the Q tile, where the layout says, when nobody reads Q any more."""
        region = self.region_of(address)
        assert region.rows == self.spec.tile_m
        thread = int(name.split()[1]) - 128
        warpgroup, lane0 = divmod(thread, 128)
        places = [
            int(stmatrix_addresses(region.start + 64 * 128 * warpgroup, region.rows, step)[lane0])
            for step in range(self.spec.head_dim // 16)
        ]
        assert address in places
        if any(not group.proven and any(r is region for r in group.regions) for group in groups):
            raise ReleaseBeforeCompletion(f"{name} writes O over Q, which unproven work reads")


def replay(trace: Trace, seed: int) -> Replay:
    """Play a trace to its end and return the final state."""
    played = Replay(trace, seed)
    played.run()
    return played
