"""The mutation score: of the faults that one wrong synchronization instruction makes, how many do the checks notice?

Every instruction that orders, signals, waits or copies is mutated by every operator of `cupyfa.emulator.mutate` that
applies to it. A mutant is caught when, under one of the eight fixed schedules, a hazard is reported, nothing can run,
or the output differs from the oracle's. Those that are not caught must be in `equivalent_mutants.toml`, each with the
order of events that makes the instruction redundant, or else with the rule that the emulator lacks: a gap.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from emulator.mutation import SUBJECTS, Laboratory, Subject, Verdict, kind_of, lies_at
from nvrtc_tools import import_nvrtc

from cupyfa.emulator import POLICIES, EmulatedKernel, edit, isa
from cupyfa.emulator.mutate import place_of

HERE = Path(__file__).parent
READS_PREDICATE, WRITES_PREDICATE = 5, 6
PINNED_NVRTC = (13, 0)  # pyproject.toml, extra "test"


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the list."""

    operators: tuple[str, ...]
    at: tuple[str, ...]
    kernels: tuple[str, ...]
    edge: str
    argument: str

    def names(self, subject: Subject, verdict: Verdict) -> bool:
        """Whether it is about this mutant."""
        mutant = verdict.mutant
        return subject.name in self.kernels and mutant.operator in self.operators and lies_at(mutant.place, self.at)


def entries(kind: str) -> list[Entry]:
    """The list's entries of a kind: equivalent or gap."""
    listed = tomllib.loads((HERE / "equivalent_mutants.toml").read_text(encoding="utf-8")).get(kind, [])
    return [Entry(tuple(e["operators"]), tuple(e["at"]), tuple(e["kernels"]), e["edge"], e["argument"]) for e in listed]


EQUIVALENTS, GAPS = entries("equivalent"), entries("gap")


@functools.cache
def verdicts(subject: Subject) -> tuple[list[Verdict], float]:
    """What became of all mutants of a subject, and the seconds that it took."""
    start = time.perf_counter()
    return Laboratory(subject).judge_all(), time.perf_counter() - start


@pytest.fixture(autouse=True)
def _compiler() -> None:
    import_nvrtc()


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_kernel_itself_passes(subject: Subject) -> None:
    laboratory = Laboratory(subject)
    found = [
        (str(bench.problem), policy, check)
        for bench in laboratory.benches()
        for policy in POLICIES
        if (check := bench.check_of(laboratory.kernel, policy)) is not None
    ]
    assert found == []


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.name in ("full", "causal")], ids=str)
def test_problems_take_both_paths_of_each_round(subject: Subject) -> None:
    """Whatever a vote of the speculative softmax is forced to say, some warp would have gone the other way."""
    laboratory = Laboratory(subject)
    program, device = laboratory.kernel.program, laboratory.kernel.device
    votes = [index for index, name in enumerate(edit.named(program)) if name == "vote"]
    in_range = ["speculative_softmax.cuh: if (!__all_sync(0xffffffff, in_range)) return false;"]
    votes = [index for index in votes if lies_at(place_of(program, index), in_range)]
    assert len(votes) == 3  # two rounds in the loop, and one behind it
    for vote in votes:
        result = int(edit.entries(program, vote)[0])
        changes = set()
        for constant in (0, isa.NEGATED):  # true, false
            roles = (WRITES_PREDICATE, READS_PREDICATE)
            forced = edit.with_operation(program, vote, "mov", (result, constant), roles, type=isa.TYPES["pred"])
            for bench in laboratory.benches():
                ran = [bench.launch(k, "eager") for k in (laboratory.kernel, EmulatedKernel(device, forced))]
                before, after = (int(run.statistics["instructions"]) for run in ran)
                changes.add((constant, (after > before) - (after < before)))
        assert {(0, -1), (isa.NEGATED, 1)} <= changes, "all in range, or none"


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_survivors_are_listed(subject: Subject) -> None:
    survivors = [v.mutant for v in verdicts(subject)[0] if v.check is None]
    listed = [v.mutant for v in verdicts(subject)[0] if any(e.names(subject, v) for e in EQUIVALENTS + GAPS)]
    assert [mutant.name for mutant in survivors if mutant not in listed] == [], "nobody noticed, and no argument"
    assert [mutant.name for mutant in listed if mutant not in survivors] == [], "neither equivalent nor a gap"


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_names_are_unique(subject: Subject) -> None:
    counts = collections.Counter(verdict.mutant.name for verdict in verdicts(subject)[0])
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("entry", EQUIVALENTS + GAPS, ids=lambda e: f"{e.operators[0]} {e.at[0][:60]}")
def test_entry_names_a_mutant_of_each_kernel(entry: Entry) -> None:
    assert entry.edge
    assert entry.argument.strip()
    subjects = {subject.name: subject for subject in SUBJECTS}
    for kernel in entry.kernels:
        found = {v.mutant.operator for v in verdicts(subjects[kernel])[0] if entry.names(subjects[kernel], v)}
        assert found == set(entry.operators), kernel


def score() -> tuple[str, str, float, float]:
    """The line for the README, the table, the adjusted score and the share of equivalents."""
    rows = []
    total = equivalent = caught = 0
    kinds: collections.Counter[str] = collections.Counter()
    schedules: collections.Counter[str] = collections.Counter()
    for subject in SUBJECTS:
        found, seconds = verdicts(subject)
        kinds.update(kind_of(verdict) for verdict in found)
        schedules.update(verdict.policy for verdict in found if verdict.policy)
        n, here = len(found), sum(verdict.check is not None for verdict in found)
        same = sum(any(entry.names(subject, verdict) for entry in EQUIVALENTS) for verdict in found)
        scores = f"{100 * here / n:9.1f} %{100 * here / (n - same):8.1f} %"
        rows.append(f"{subject.name:18}{n:7}{here:8}{n - here:10}{same:12}{scores}{seconds:8.1f} s")
        total, caught, equivalent = total + n, caught + here, equivalent + same
    adjusted = caught / (total - equivalent)
    line = (
        f"{total:,} mutants, {caught:,} caught: {100 * caught / total:.1f} % raw, {100 * adjusted:.1f} % without the "
        f"{equivalent} equivalent ones"
    )
    table = "\n".join(
        [
            "mutation score of the Hopper forward kernel",
            f"{'kernel':18}mutants  caught  survived  equivalent       raw  adjusted      time",
            *rows,
            line,
            "caught by: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common() if kind != "nothing"),
            "first under: " + ", ".join(f"{policy} {schedules[policy]}" for policy in POLICIES if schedules[policy]),
        ]
    )
    return line, table, adjusted, equivalent / total


def test_score(show: Callable[[str], None]) -> None:
    line, table, adjusted, equivalent = score()
    show(table)
    assert adjusted >= 0.98
    assert equivalent <= 0.08
    if import_nvrtc().nvrtcVersion()[1:] != PINNED_NVRTC:
        pytest.skip("another compiler may make another number of instructions: the README is about the pinned one")
    readme = (HERE.parent.parent / "README.md").read_text(encoding="utf-8")
    assert line in re.sub(r"\s+", " ", readme), f"the README does not say: {line}"
