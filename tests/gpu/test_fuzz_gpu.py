"""A sample of ``make gpu-fuzz``."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from fuzz.runner import Pool, run

import cupyfa
from cupyfa.spec import BwdSpec, FwdSpec

KERNELS, PROBLEMS = 24, 400


def test_random_problems() -> None:
    pool = Pool(seed=0, specs=KERNELS)
    warm = cupyfa.warmup(pool.warm_calls(), progress=False)
    assert sum(isinstance(spec, (FwdSpec, BwdSpec)) for spec in warm) == KERNELS  # beside those that prepare for them
    verdicts = list(run(pool, range(PROBLEMS), "cuda"))
    again = f'make gpu-fuzz FUZZ_ARGS="--seed {pool.seed} --specs {KERNELS} --only {{}}"'
    wrong = [verdict.report(again) for verdict in verdicts if verdict.error is not None]
    assert not wrong, "\n".join(wrong)
    assert len(verdicts) == PROBLEMS
