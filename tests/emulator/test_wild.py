"""The machine comes back from every kernel, whatever it does. `make emulator-sanitize` runs this under ASan and UBSan.

200 kernels by default; CUPYFA_FULL_FUZZ=1 takes 5000.
"""

from __future__ import annotations

import os

import pytest
from emulator.hazards import wild

from cupyfa.emulator.policies import POLICIES

FULL = os.environ.get("CUPYFA_FULL_FUZZ", "0") not in ("", "0")
FAMILIES, COUNT = 8, 625 if FULL else 25


@pytest.mark.parametrize("family", range(FAMILIES))
def test_kernels_without_sense(family: int) -> None:
    policies = list(POLICIES)
    verdicts = set()
    for seed in range(family * COUNT, (family + 1) * COUNT):
        pair, options = wild.kernel(seed)
        maps = [wild.random_map(2 * seed), wild.random_map(2 * seed + 1)] if seed % 3 == 0 else []
        run = pair.run(True, maps=maps, policy=policies[seed % len(policies)], **options)
        verdicts.add(run.verdict)
        assert run.verdict in ("clean", "review", "error", "incomplete")
        assert str(run)
        assert run.to_json()
    assert "error" in verdicts
