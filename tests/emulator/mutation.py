"""Runs mutants of the project's kernels under the fixed schedules until something notices the fault."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from hard_scores import harden

from cupyfa import emulate, sources
from cupyfa.emulator import POLICIES, EmulatedKernel, Run
from cupyfa.emulator.mutate import Mutant, mutants
from cupyfa.emulator.report import Place
from cupyfa.oracles import dense
from cupyfa.testing import Guarded, assert_close, assert_lse_close, guarded_empty, random_array, score_magnitude

VALUE, CANARY, COUNTER = "VALUE", "CANARY", "COUNTER"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call with one key head. One CTA walks all of its tiles (``sms=1``)."""

    rows: int
    keys: int
    heads: int = 1
    head_dim: int = 128
    head_dim_v: int = 128
    scores: str = "normal"  # or a kind of hard_scores.py

    def __str__(self) -> str:
        return f"{self.heads} x {self.rows} rows x {self.keys} keys, {self.scores} scores"

    def inputs(self) -> tuple[Any, Any, Any]:
        """q, k, v, the same each time."""
        shapes = (
            (1, self.rows, self.heads, self.head_dim),
            (1, self.keys, 1, self.head_dim),
            (1, self.keys, 1, self.head_dim_v),
        )
        q, k, v = (random_array(shape, "bfloat16", i) for i, shape in enumerate(shapes))
        return (q, k, v) if self.scores == "normal" else (*harden(self.scores, q, k), v)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel and the problems on which its faults show.

    There are more tiles than the Q ring has slots; or two, because then nothing has been waited for twice. A tile has
    more key blocks than the K and V rings have slots, so that they wrap in the middle of it; or one or two, because
    then no block of the same tile orders what two tiles do. The last tile ends in each branch that there is. Huge
    scores make a speculative softmax correct in some warps and rounds, and succeed in others.
    """

    name: str
    problems: tuple[Problem, ...]
    causal: bool = False
    bias: bool = False
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name


def _problems(*sizes: tuple[int, int, int], **options: Any) -> tuple[Problem, ...]:
    return tuple(Problem(rows, keys, heads, **options) for rows, keys, heads in sizes)


#: Two, five and one key blocks a tile; two tiles of one block.
FULL = _problems((500, 250, 1), (200, 556, 2), (300, 100, 1), (200, 100, 1))
PINGPONG = ("pingpong", True)
EXACT = (("speculative", False), PINGPONG)
D64 = {"head_dim": 64, "head_dim_v": 64}

SUBJECTS = (
    Subject("full", (*FULL, *_problems((200, 380, 2), (500, 250, 1), scores="huge"))),
    Subject(
        "causal",
        (
            *_problems((600, 620, 1)),  # five to two blocks
            *_problems((100, 125, 5), (200, 460, 1), (600, 140, 1)),  # one; four; two, and three tiles that see no key
            *_problems((200, 100, 1)),  # two tiles of one block
            *_problems((500, 520, 1), (200, 220, 2), scores="huge"),
        ),
        causal=True,
        config=(PINGPONG,),
    ),
    Subject("exact", FULL, config=EXACT),
    Subject(
        "three consumers",
        (
            *_problems((600, 500, 1), (300, 300, 1), **D64),  # six to one blocks; four and two
            *_problems((100, 90, 5), (200, 600, 1), (200, 90, 1), **D64),  # one; seven; two tiles of one
            *_problems((500, 308, 1), **D64),  # four, two, and a tile that sees no key
            *_problems((600, 500, 1), (300, 300, 1), **D64, scores="huge"),
        ),
        causal=True,
        config=(("tile_m", 192), ("tile_n", 96), ("q_stages", 2), PINGPONG),
    ),
    Subject("without overlap", FULL, config=(("overlap", False), ("scheduler", "persistent"), *EXACT)),
    Subject(
        "one Q slot",
        (
            *_problems((500, 180, 1), (200, 430, 2), (300, 90, 1), (300, 330, 1), head_dim=192),  # two; five; one; four
            *_problems((200, 280, 2), (500, 180, 1), head_dim=192, scores="huge"),
        ),
        config=(("q_stages", 1), PINGPONG),
    ),
    Subject(
        "bias",
        (
            *_problems((500, 192, 1), (200, 480, 2), (300, 96, 1), (200, 96, 1)),  # two; five; one; two tiles of one
            *_problems((200, 384, 2), (500, 264, 1), scores="huge"),  # four; three
        ),
        bias=True,
    ),
)


@functools.cache
def _source(file: str) -> list[str]:
    return sources.read(file).splitlines()


def lies_at(place: Place, marks: Sequence[str]) -> bool:
    """Whether each ``"file: text"`` is on a line that the instruction comes from, or that it was inlined at.

    The text may begin on the line before, where a line alone says too little.
    """
    frames = [(place.file, place.line), *place.callers]

    def found(mark: str) -> bool:
        where, text = mark.split(": ", 1)
        for file, number in frames:
            if file == where:
                before, line = (_source(file)[n].strip() for n in (number - 2, number - 1))
                at = f"{before} {line}".find(text)
                if at >= 0 and at + len(text) > len(before):
                    return True
        return False

    return all(found(mark) for mark in marks)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What noticed a mutant (a hazard's name, VALUE, CANARY or COUNTER), under which schedule and on which problem."""

    mutant: Mutant
    check: str | None
    policy: str | None
    problem: int | None


class Bench:
    """Inputs, oracle and outputs of a problem; one for each thread, because a run writes to its outputs."""

    def __init__(self, subject: Subject, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.seed = seed  # all problems of a subject begin alike: with one seed chance would decide alike, too
        q, k, v = problem.inputs()
        options: dict[str, Any] = {"causal": subject.causal}
        if subject.bias:
            options["bias"] = random_array((problem.heads, problem.rows, problem.keys), "bfloat16", 3, amplitude=4.0)
        self.out: Guarded = guarded_empty((*q.shape[:3], v.shape[3]), q.dtype)
        self.lse: Guarded = guarded_empty((1, problem.heads, problem.rows), np.float32)
        self.out.array[...] = self.lse.array[...] = np.nan
        self.poisoned = [(x.buffer, x.buffer.copy()) for x in (self.out, self.lse)]  # with intact canaries
        self.prepared = emulate.prepare(
            q,
            k,
            v,
            **options,
            out=self.out.array,
            lse=self.lse.array,
            config=dict(subject.config),
            sms=1,
        )
        assert self.prepared.kernel is not None
        self.kernel = self.prepared.kernel
        self.reference, self.lse_reference = dense.attention(q, k, v, **options)
        self.yardstick, _ = dense.same_precision(q, k, v, **options)
        self.magnitude = score_magnitude(q, k)

    def launch(self, kernel: EmulatedKernel, policy: str, **options: Any) -> Run:
        """Run from poisoned outputs; nothing is left of what a mutant did to canaries."""
        for buffer, poisoned in self.poisoned:
            buffer[...] = poisoned
        kernel = kernel.on(self.kernel.device)
        options = {"seed": self.seed, "strict_warpgroup": True, "stop_at_error": True, **options}
        return self.prepared.launch(kernel, policy=policy, **options)

    def check_of(self, kernel: EmulatedKernel, policy: str, max_instructions: int = 0) -> str | None:
        """The name of the check that fails, if one does."""
        run = self.launch(kernel, policy, max_instructions=max_instructions)
        if "PROGRESS_SLOTS_EXHAUSTED" in run.hazards:
            run = self.launch(kernel, policy, max_instructions=max_instructions, slots=4096)
        if run.hazards:
            return run.hazards[0]
        assert run.verdict != "incomplete", run  # findings to review catch nothing
        try:
            assert_close(self.out.array, self.reference, self.yardstick)
            assert_lse_close(self.lse.array, self.lse_reference, score_magnitude=self.magnitude)
        except AssertionError:
            return VALUE
        try:
            self.out.check()
            self.lse.check()
        except AssertionError:
            return CANARY
        if self.prepared.counter.any():
            return COUNTER
        return None


class Laboratory:
    """A subject's mutants and what becomes of them."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._mine = threading.local()
        benches = self.benches()
        self.kernel = benches[0].kernel
        # A mutant may spin for ever: four times the instructions of the kernel as it is are enough.
        self.limits = {
            (number, policy): 4 * int(bench.launch(self.kernel, policy).statistics["instructions"])
            for number, bench in enumerate(benches)
            for policy in POLICIES
        }

    def mutants(self) -> Iterator[Mutant]:
        return mutants(self.kernel.program)

    def benches(self) -> list[Bench]:
        """The calling thread's."""
        if not hasattr(self._mine, "benches"):
            self._mine.benches = [Bench(self.subject, problem, n) for n, problem in enumerate(self.subject.problems)]
        return self._mine.benches  # type: ignore[no-any-return]

    def judge(self, mutant: Mutant) -> Verdict:
        """All problems under one schedule, then under the next, until a check fails."""
        benches = self.benches()
        kernel = EmulatedKernel(self.kernel.device, mutant.program)
        for policy in POLICIES:
            for number, bench in enumerate(benches):
                check = bench.check_of(kernel, policy, self.limits[number, policy])
                if check is not None:
                    return Verdict(mutant, check, policy, number)
        return Verdict(mutant, None, None, None)

    def judge_all(self, chosen: Callable[[Mutant], bool] = lambda mutant: True) -> list[Verdict]:
        """The verdicts on all mutants, in their order; the machine runs without the interpreter's lock."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(self.judge, (mutant for mutant in self.mutants() if chosen(mutant))))


#: What a check's name says about how a fault was noticed.
KINDS = {
    "wrong result": (VALUE, CANARY, COUNTER),
    "deadlock, or no end": ("PROGRESS_", "REGISTERS_POOL_DEADLOCK"),
    "order of accesses": ("SHARED_", "BULK_"),
    "mbarrier protocol": ("MBARRIER_",),
    "named barrier protocol": ("BARRIER_", "WARP_"),
    "product and its registers": ("WGMMA_",),
}


def kind_of(verdict: Verdict) -> str:
    """How a mutant was noticed, if it was."""
    if verdict.check is None:
        return "nothing"
    kinds = {kind: len(name) for kind, names in KINDS.items() for name in names if verdict.check.startswith(name)}
    return max(kinds, key=lambda kind: kinds[kind], default=verdict.check)
