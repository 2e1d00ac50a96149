"""Random programs on the emulator against the checksums of an H200.

One module of 500 programs by default; CUPYFA_FULL_FUZZ=1 takes all twenty (``make test-full``).
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from emulator.micro import fuzz, golden
from emulator.micro.emulated import Emulated

emulator = pytest.importorskip("cupyfa.emulator.device")

FULL = os.environ.get("CUPYFA_FULL_FUZZ", "0") not in ("", "0")


@pytest.mark.parametrize("module", range(fuzz.MODULES if FULL else 1))
def test_programs_equal_the_hardware(module):
    records, arrays = golden.load()
    family = fuzz.FAMILIES[module // fuzz.GROUP]
    assert records[family][f"fuzz{module}"]["text"] == fuzz.fingerprint(module), (
        "made for other programs: run goldens.py"
    )
    expected = arrays[f"{family}:checksums"][module % fuzz.GROUP]
    machine = Emulated(emulator.EmulatedDevice("sm_90a"))
    wrong = {}
    for index, case in enumerate(fuzz.cases_of(module)):
        found = fuzz.checksums(machine.run(case)["out"])
        for number, differs in enumerate(found != expected[index]):
            wrong[fuzz.seed_of(module, index, number)] = bool(differs)
    failed = [seed for seed, differs in wrong.items() if differs]
    if failed:
        text = "\n".join(fuzz.program(failed[0])[0])
        suspects = ", ".join(fuzz.suspects(wrong))
        pytest.fail(
            f"{len(failed)} of {len(wrong)} programs differ; suspects: {suspects}\nprogram {failed[0]}:\n{text}"
        )


def test_checksums_are_kept_of_all_programs():
    _, arrays = golden.load()
    shapes = {arrays[f"{family}:checksums"].shape for family in fuzz.FAMILIES}
    assert shapes == {(fuzz.GROUP, fuzz.KERNELS, fuzz.PROGRAMS)}
    assert all(len(np.unique(arrays[f"{family}:checksums"])) > 1000 for family in fuzz.FAMILIES)


DIGEST = """
import hashlib
from cupyfa.emulator import _core
from cupyfa.emulator.device import EmulatedDevice
from emulator.micro import fuzz
from emulator.micro.emulated import Emulated

machine, digest = Emulated(EmulatedDevice("sm_90a")), hashlib.sha256()
for case in fuzz.cases_of(0):
    digest.update(machine.run(case)["out"].tobytes())
print(_core.VECTOR_UNIT, digest.hexdigest())
"""


def test_vector_units_agree():
    """Each level of the vector unit in a process of its own; one that the processor does not have says so."""
    answers = {}
    for level in ("baseline", "v3", "v4"):
        environment = os.environ | {"CUPYFA_EMULATOR_LEVEL": level, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", DIGEST]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode and "does not have" in done.stderr:
            continue
        assert not done.returncode, done.stderr
        name, digest = done.stdout.split()
        assert name == level
        answers[name] = digest
    assert "baseline" in answers
    assert len(set(answers.values())) == 1, answers
