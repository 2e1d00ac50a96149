"""The forward kernel without warp specialization: rounds that rescale, and faults in what it does not share.

``test_forward.py`` has its shapes and masks, beside those of the kernel with roles.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hard_scores import KINDS, harden
from nvrtc_tools import import_nvrtc

from cupyfa import compiler, emulate, sources
from cupyfa.emulator import POLICIES
from cupyfa.oracles import dense
from cupyfa.testing import Case, assert_close, assert_lse_close, score_magnitude

CASE = Case("five blocks", 1, 130, 600, 1, 1, 128, "float16")
CONFIG = {"warp_specialized": False, "q_stages": 1, "pingpong": False, "scheduler": "one_tile", "setmaxnreg": False}


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_hard_scores(kind: str, speculative: bool, backend: Any) -> None:
    q, k, v = CASE.make_inputs()
    q, k = harden(kind, q, k, block=128)
    with np.errstate(invalid="ignore"):
        reference, reference_lse = dense.attention(q, k, v)
        plain, _ = dense.same_precision(q, k, v)
    out, lse = backend.attention(q, k, v, config=CONFIG | {"speculative": speculative})
    assert_close(out, reference, plain, context=kind)
    assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k), context=kind)


KERNEL = "hopper/unspecialized.cuh"
FAULTS = {  # name: file, pattern, replacement
    "k released before its wait": (KERNEL, r"(complete<1>\(scores\);)[^\n]*\s*release\(k\);", r"release(k); \1"),
    "v released before its wait": (KERNEL, r"(complete<0>\(O\);)[^\n]*\s*release\(v\);", r"release(v); \1"),
    "v is not released": (KERNEL, r"release\(v\);", ""),
    "a copy does not wait for its slot": (
        "ring.cuh",
        r"wait_parity\(slot.empty, this->parity_\);(?=.*the tile of)",
        "",
    ),
    "a copy waits for the round before": (KERNEL, r"(k_barriers, last - block)\)", r"\1 + S.stages)"),
    "a copy goes where the next V is": (KERNEL, r"(v_barriers, last - block)\)", r"\1 + 1)"),
    "a V is copied twice": (KERNEL, r"j \+ 2 <= last && ", ""),
    "two threads copy": (KERNEL, r"threadIdx.x == 0", "threadIdx.x % 128 == 0"),
    "O stored before it is staged": (KERNEL, r"wait_parity\(works_.staged\(work\), work.parity\);", ""),
    "exit before O is read": (KERNEL, r"ptx::cp_async_bulk_wait_group_read<0>\(\);", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new = FAULTS[fault]
    read = sources.read

    def edited(path: str) -> str:
        text, count = re.subn(old, new, read(path)) if path == file else (read(path), 1)
        assert count == 1, f"{path} holds {old!r} {count} times: the kernel has changed, so must the fault"
        return text

    monkeypatch.setattr(sources, "read", edited)
    monkeypatch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    monkeypatch.setattr(emulate, "kernel_of", emulate.kernel_of.__wrapped__)
    prepared = emulate.prepare(*CASE.make_inputs(), config=CONFIG)
    verdicts = {policy: prepared.launch(policy=policy, max_instructions=5_000_000).verdict for policy in POLICIES}
    assert set(verdicts.values()) != {"clean"}
