"""Draw problems, compute them and compare, one after the other: the oracles of one take about 10 ms."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

from fuzz.generators import GENERATORS, Problem
from fuzz.machines import MACHINES, Buffers, Outcome

SPECS = 60


class Pool:
    """The problems of a seed, over so many kernels at most."""

    def __init__(self, seed: int, specs: int = SPECS) -> None:
        self.seed = seed
        self._rows = []
        shares = [generator.share for generator in GENERATORS]
        ends = [round(specs * end / sum(shares)) for end in itertools.accumulate(shares, initial=0)]
        for number, generator in enumerate(GENERATORS):
            count = ends[number + 1] - ends[number]
            templates = generator.draw_templates(random.Random(f"templates {seed} {number}"), count)
            self._rows += [(generator, template, spec) for spec, template in templates.items()]

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, number: int) -> Problem:
        """The problem of a number; the kernels take turns."""
        generator, template, spec = self._rows[number % len(self._rows)]
        return generator.draw_problem(random.Random(f"problem {self.seed} {number}"), template, spec)

    def warm_calls(self) -> Iterator[dict[str, Any]]:
        """A call of each kernel, for `cupyfa.warmup`."""
        for row in range(len(self)):
            problems = (self.problem(number) for number in itertools.count(row, len(self)))
            calls = (problem.warm_call for problem in problems if problem.spec is not None)
            yield next(call for call in calls if call is not None)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a problem."""

    number: int
    problem: Problem
    error: str | None = None  # None: it is right
    fatal: bool = False  # nothing can be computed after it

    def report(self, again: str) -> str:
        """What is wrong with which call, and the command that repeats it: `again`, with the number for its {}."""
        problem = self.problem
        lines = [f"problem {self.number}: {self.error}", f"  {problem.function.__name__} by {problem.spec}"]
        lines += [f"    {name}: {place}" for name, place in problem.places.items()]
        lines += [f"    {', '.join(f'{name}={value!r}' for name, value in problem.options.items())}"]
        lines += [f"    {problem.values}", f"  again: {again.format(self.number)}"]
        return "\n".join(lines)


def run(pool: Pool, numbers: Iterable[int], machine: str) -> Iterator[Verdict]:
    """Compute problems and compare them; ends after a fatal one."""
    for number in numbers:
        verdict = _judge(number, pool.problem(number), machine)
        yield verdict
        if verdict.fatal:
            return


def _judge(number: int, problem: Problem, machine: str) -> Verdict:
    before = problem.buffers()
    try:
        outcome = MACHINES[machine](problem, before)
        _compare(problem, before, outcome, by_kernel=machine != "numpy")
    except AssertionError as error:
        return Verdict(number, problem, str(error))
    except Exception as error:
        # After a fault or a hang the context of the GPU is lost.
        fatal = machine == "cuda" and not isinstance(error, (TypeError, ValueError))
        return Verdict(number, problem, f"{type(error).__name__}: {error}", fatal=fatal)
    return Verdict(number, problem)


def _compare(problem: Problem, before: Buffers, outcome: Outcome, *, by_kernel: bool) -> None:
    """Raise AssertionError unless a call left behind what has to be there."""
    for name, place in problem.places.items():
        after = outcome.buffers[name]
        count = place.changes_outside(before[name], after)
        assert not count, f"{name}: {count} bytes beside it have changed"
        assert name in problem.written or (before[name] == after).all(), f"{name} is an input and has changed"
    arrays = {name: place.view(before[name]) for name, place in problem.places.items()}
    problem.check(arrays, outcome.results, by_kernel=by_kernel)
