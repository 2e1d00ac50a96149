"""Sequences that use a part of their rows, under the emulator: plan, kernel and oracle, and planted faults."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from nvrtc_tools import import_nvrtc
from used import USED_CASES, UsedCase, hold_to_oracle

import cupyfa
from cupyfa import compiler, emulate, sources
from cupyfa.emulator import POLICIES
from cupyfa.operand import Arrays
from cupyfa.options import check_options
from cupyfa.packing import read_plan


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


def prepare(case: UsedCase) -> emulate.Prepared:
    """A call whose outputs are NaN."""
    arguments = case.call()
    options = check_options(
        causal=case.causal, window_size=case.window_size, softcap=case.softcap, layout=arguments["layout"]
    )
    q, v = arguments["q"], arguments["v"]
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    out.view(np.uint16)[...] = 0x7FFF
    lse = np.full((case.batch, case.heads_q, case.seqlen_q), np.nan, np.float32)
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    return emulate.prepare_arrays(Arrays(**arrays, out=out, lse=lse), options, sms=2)


@pytest.mark.parametrize(
    ("case", "policy"), [*zip(USED_CASES, itertools.cycle(POLICIES), strict=False)], ids=lambda x: getattr(x, "id", x)
)
def test_kernel_is_right(case: UsedCase, policy: str) -> None:
    prepared = prepare(case)
    run = prepared.launch(policy=policy)
    assert run.verdict == "clean", run
    hold_to_oracle(case, prepared.out, prepared.lse)


def test_the_public_function() -> None:
    case = USED_CASES[4]
    out, lse = cupyfa.attention(**case.call(), backend="emulator", return_lse=True)
    hold_to_oracle(case, out, lse)


def test_rows_that_are_not_used_are_tiles_without_keys() -> None:
    prepared = prepare(USED_CASES[0])
    assert prepared.planning is not None
    assert prepared.planning.launch().verdict == "clean"
    plan = read_plan(prepared.planning.plan)
    said = {tuple(int(tile[name]) for name in plan.dtype.names[:5]) for tile in plan}
    assert said == {(0, 200, 0, 260, 0), (200, 70, 260, 100, 1), (270, 130, 0, 0, 1), (400, 200, 0, 0, 2)}


# --- Planted faults ---

PLAN, STORER, EPILOGUE = "plan.cu", "hopper/storer.cuh", "hopper/epilogue.cuh"
ROWS_OF_SEQUENCE = "packed_rows.cuh"
RAGGED = UsedCase("ragged", 70, 150, (70, 9), (20, 150), heads_q=2, causal=True)
FAULTS = {
    # name: file, pattern, replacement, the case that shows it
    "all batches begin at the first": (PLAN, r"int\(i\) \* step", "0", RAGGED),
    "all rows are used": (ROWS_OF_SEQUENCE, r"seqused == nullptr \? length", "true ? length", RAGGED),
    "rows that are not used are left": (PLAN, r"end = before\.begin \+ before\.length", "end = begin", RAGGED),
    "rows that are not used are of the first batch": (PLAN, r", batch = int\(i - 1\)", "", RAGGED),
    "lse counts rows from the first batch": (EPILOGUE, r" - tile\.batch \* p\.q_step", "", RAGGED),
    "lse of the first batch": (EPILOGUE, r" \+ tile\.batch \* p\.lse_stride_batch", "", RAGGED),
    "lse of rows that are not used is that of others": (
        EPILOGUE,
        r"\(tile\.q_begin - tile\.batch \* p\.q_step\)",
        "(0)",
        RAGGED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda name: name.replace(" ", "_"))
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, case = FAULTS[fault]
    read = sources.read

    def edited(path: str) -> str:
        text, count = re.subn(old, new, read(path)) if path == file else (read(path), 1)
        assert count == 1, f"{path} holds {old!r} {count} times: the kernel has changed, so must the fault"
        return text

    monkeypatch.setattr(sources, "read", edited)
    monkeypatch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    monkeypatch.setattr(emulate, "kernel_of", emulate.kernel_of.__wrapped__)
    prepared = prepare(case)
    run = prepared.launch()
    if run.verdict == "clean":
        with pytest.raises(AssertionError, match=r"^(out|lse)\["):
            hold_to_oracle(case, prepared.out, prepared.lse)


def test_out_may_have_other_strides_than_q(monkeypatch: pytest.MonkeyPatch) -> None:
    case = RAGGED
    arguments: dict[str, Any] = case.call()
    q = arguments["q"]
    longer = np.zeros((2, 80, *q.shape[2:]), np.uint16)
    longer[:, :70] = q.view(np.uint16)
    arguments["q"] = longer.view(q.dtype)[:, :70]
    out, lse = cupyfa.attention(**arguments, backend="emulator", return_lse=True)
    hold_to_oracle(case, out, lse)
    read = sources.read
    shift = "rows.batch += tile.batch * p.o_shift;"
    assert shift in read(STORER)
    monkeypatch.setattr(sources, "read", lambda path: read(path).replace(shift, ""))
    monkeypatch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    monkeypatch.setattr(emulate, "kernel_of", emulate.kernel_of.__wrapped__)
    with pytest.raises((AssertionError, cupyfa.HazardError)):
        hold_to_oracle(case, *cupyfa.attention(**arguments, backend="emulator", return_lse=True))
