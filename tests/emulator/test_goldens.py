"""The emulator against an H200: every micro-kernel, bit for bit or within the manual's bound."""

from __future__ import annotations

from typing import Any

import pytest
from emulator.micro import golden
from emulator.micro.case import Case
from emulator.micro.emulated import Emulated
from emulator.micro.families import FAMILIES, cases_of

emulator = pytest.importorskip("cupyfa.emulator.device")


@pytest.fixture(scope="module")
def goldens() -> tuple[dict[str, Any], dict[str, Any]]:
    return golden.load()


def check(machine: Emulated, case: Case, records: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Differences of one case; an exception is one, so that it hides no other case."""
    try:
        return golden.compare(case, machine.run(case), records[case.name], kept)
    except Exception as error:
        return [f"{case.name}: {type(error).__name__}: {error}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_the_hardware(family, goldens):
    records, kept = goldens
    machine = Emulated(emulator.EmulatedDevice("sm_90a"))
    known = [case for case in cases_of(family) if case.name in records[family]]
    failures = {case.name: found for case in known if (found := check(machine, case, records[family], kept))}
    lines = [line for found in failures.values() for line in found]
    assert not failures, f"{len(failures)} of {len(known)} cases differ:\n" + "\n".join(lines[:60])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_has_a_golden(family, goldens):
    assert [case.name for case in cases_of(family)] == list(goldens[0][family])


def test_what_the_hardware_refuses_is_an_error(goldens):
    records = goldens[0]["refused"]
    assert [case.name for case in cases_of("refused")] == list(records)
    machine = Emulated(emulator.EmulatedDevice("sm_90a"))
    for case in cases_of("refused"):
        assert records[case.name]["fingerprint"] == case.fingerprint()
        if records[case.name]["error"]:
            with pytest.raises(AssertionError, match="error: "):
                machine.run(case)
