"""Every hazard is reported where it has to be, and not where it must not be, under every schedule."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
from emulator.hazards import OWNERS, PAIRS
from emulator.hazards.pair import Pair

from cupyfa.emulator._core import HAZARDS
from cupyfa.emulator.policies import POLICIES

SEEDS = {"random": (0, 1, 2), "fine": (0, 1, 2), "pct": (0, 1, 2)}


def schedules() -> list[tuple[str, int]]:
    return [(policy, seed) for policy in POLICIES for seed in SEEDS.get(policy, (0,))]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_fault_is_reported_under_every_schedule(pair: Pair) -> None:
    for policy, seed in schedules():
        run = pair.run(True, policy=policy, seed=seed)
        found = {(finding.hazard, finding.severity) for finding in run.findings}
        assert (pair.hazard, pair.severity) in found, f"{policy}, seed {seed}:\n{run}"
        assert run.verdict != "clean"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_nothing_is_reported_without_the_fault(pair: Pair) -> None:
    for policy, seed in schedules():
        run = pair.run(False, policy=policy, seed=seed)
        assert (run.verdict, run.findings) == ("clean", ()), f"{policy}, seed {seed}:\n{run}"


def test_every_hazard_has_both_kernels() -> None:
    tested = {pair.hazard for pair in PAIRS}
    for group, owner in OWNERS.items():
        if importlib.util.find_spec(owner) is None:
            pytest.skip(f"{owner}, which tests {group}, does not exist")
        tested |= set(importlib.import_module(owner).HAZARDS)
    assert tested == set(HAZARDS)
