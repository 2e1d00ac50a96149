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

VALUE, CANARY = "VALUE", "CANARY"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes of a call. One CTA walks all of its tiles (``sms=1``)."""

    q_shape: tuple[int, int, int, int]
    kv_shape: tuple[int, int, int, int]
    scores: str = "normal"  # or a kind of hard_scores.py

    def __str__(self) -> str:
        return f"{self.q_shape[1]} rows x {self.kv_shape[1]} keys, {self.scores} scores"

    def inputs(self) -> tuple[Any, Any, Any]:
        """q, k, v, the same each time."""
        q, k, v = (random_array(s, "bfloat16", i) for i, s in enumerate((self.q_shape, self.kv_shape, self.kv_shape)))
        return (q, k, v) if self.scores == "normal" else (*harden(self.scores, q, k), v)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel and the problems on which its faults show.

    There are more tiles than the Q ring has slots. A tile has more key blocks than the K and V rings have slots, so
    that they wrap in the middle of it; or one or two, because then no block of the same tile orders what two tiles do.
    Huge scores make a speculative softmax correct in some warps and rounds, and succeed in others.
    """

    name: str
    problems: tuple[Problem, ...]
    causal: bool = False
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name


def _problem(rows: int, keys: int, head_dim: int, heads: int, scores: str = "normal") -> Problem:
    return Problem((1, rows, heads, head_dim), (1, keys, 1, head_dim), scores)


#: Five, one and two key blocks a tile.
FULL = (_problem(200, 556, 128, 2), _problem(300, 100, 128, 1), _problem(500, 250, 128, 1))
#: Five to one blocks; three tiles in a row that see no key; one block; two.
CAUSAL = (_problem(600, 620, 128, 1), _problem(600, 140, 128, 1), _problem(100, 100, 128, 5))
EXACT = (("speculative", False), ("pingpong", True))

SUBJECTS = (
    Subject("full", (*FULL, _problem(200, 556, 128, 2, "huge"), _problem(500, 250, 128, 1, "huge"))),
    Subject("causal", (*CAUSAL, _problem(600, 620, 128, 1, "huge"), _problem(200, 220, 128, 2, "huge")), causal=True),
    Subject("exact", FULL, config=EXACT),
    Subject(
        "three consumers",
        (_problem(600, 620, 64, 1), _problem(700, 100, 64, 1), _problem(100, 100, 64, 5)),
        causal=True,
        config=(("tile_m", 192),),
    ),
    Subject("without overlap", FULL, config=(("overlap", False), *EXACT)),
    Subject(
        "one Q slot",
        (
            _problem(200, 500, 192, 2),
            _problem(300, 100, 192, 1),
            _problem(500, 200, 192, 1),
            _problem(300, 250, 192, 2),
        ),
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
    """What noticed a mutant (a hazard's name, VALUE or CANARY), under which schedule and on which problem."""

    mutant: Mutant
    check: str | None
    policy: str | None
    problem: int | None


class Bench:
    """Inputs, oracle and outputs of a problem; one for each thread, because a run writes to its outputs."""

    def __init__(self, subject: Subject, problem: Problem) -> None:
        self.problem = problem
        q, k, v = problem.inputs()
        batch, rows, heads, _ = problem.q_shape
        self.out: Guarded = guarded_empty(q.shape, q.dtype)
        self.lse: Guarded = guarded_empty((batch, heads, rows), np.float32)
        self.prepared = emulate.prepare(
            q,
            k,
            v,
            causal=subject.causal,
            out=self.out.array,
            lse=self.lse.array,
            config=dict(subject.config),
            sms=1,
        )
        assert self.prepared.kernel is not None
        self.kernel = self.prepared.kernel
        self.reference, self.lse_reference = dense.attention(q, k, v, causal=subject.causal)
        self.yardstick, _ = dense.same_precision(q, k, v, causal=subject.causal)
        self.magnitude = score_magnitude(q, k)

    def launch(self, kernel: EmulatedKernel, policy: str, **options: Any) -> Run:
        """Run from poisoned outputs."""
        self.out.array[...] = np.nan
        self.lse.array[...] = np.nan
        kernel = kernel.on(self.kernel.device)
        options = {"strict_warpgroup": True, "stop_at_error": True, **options}
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
            self._mine.benches = [Bench(self.subject, problem) for problem in self.subject.problems]
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
    "wrong result": (VALUE, CANARY),
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
