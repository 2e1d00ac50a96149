"""Windows, softcap, sink and ALiBi: the kernel under the emulator against oracle and twin, and planted faults."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
from nvrtc_tools import import_nvrtc
from twins import assert_lse_of_twin, assert_within_two_ulp

from cupyfa import compiler, emulate, sources
from cupyfa.emulator import POLICIES
from cupyfa.oracles import dense, online
from cupyfa.testing import CASES, Case, as_bshd, assert_close, assert_lse_close, score_magnitude

GROUPS = ("window", "softcap", "sink", "alibi", "mixed")
OPTIONS = [case for case in CASES if case.group in GROUPS]


def label(x: Any) -> str:
    return x.id if isinstance(x, Case) else str(x)


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


def run(case: Case, policy: str = "eager", **options: Any) -> Any:
    q, k, v = case.make_inputs()
    return emulate.attention(q, k, v, layout=case.layout, sms=2, policy=policy, **case.options, **options)


@functools.cache
def problem(case: Case) -> tuple[Any, ...]:
    """Inputs, reference output and LSE, the plain algorithm's output, and the magnitude of the scores."""
    q, k, v = (as_bshd(x, case.layout) for x in case.make_inputs())
    reference, lse = dense.attention(q, k, v, **case.options)
    plain, _ = dense.same_precision(q, k, v, **case.options)
    return (q, k, v), reference, lse, plain, score_magnitude(q, k, case.softmax_scale, case.softcap)


def hold_to_oracle(case: Case, result: Any) -> None:
    _, reference, reference_lse, plain, magnitude = problem(case)
    assert_close(as_bshd(result.out, case.layout), reference, plain, context=case)
    assert_lse_close(result.lse, reference_lse, score_magnitude=magnitude, context=case)


@pytest.mark.parametrize(("case", "policy"), [*zip(OPTIONS, itertools.cycle(POLICIES), strict=False)], ids=label)
def test_kernel_is_right(case: Case, policy: str) -> None:
    result = run(case, policy)
    assert result.run.verdict in ("clean", "nothing to launch"), result.run
    hold_to_oracle(case, result)


@pytest.mark.parametrize("case", OPTIONS[::5], ids=label)
def test_kernel_is_its_twin(case: Case) -> None:
    result = run(case)
    spec = emulate.prepare(*case.make_inputs(), layout=case.layout, **case.options).selection.spec
    (q, k, v), *_, magnitude = problem(case)
    out, lse = online.attention(q, k, v, speculative=True, tile_m=spec.tile_m, tile_n=spec.tile_n, **case.options)
    assert_within_two_ulp(as_bshd(result.out, case.layout), out)
    assert_lse_of_twin(result.lse, lse, magnitude)


@pytest.mark.parametrize("config", [{"overlap": False, "speculative": False}, {"speculative": False}], ids=str)
def test_the_exact_softmax_takes_them_too(config: dict[str, Any]) -> None:
    for case in OPTIONS[2::9]:
        result = run(case, config=config)
        assert result.run.verdict in ("clean", "nothing to launch"), result.run
        hold_to_oracle(case, result)


# --- Planted faults ---

MASK, MOD, EPILOGUE, SOFTMAX = "mask.cuh", "score_mod.cuh", "hopper/epilogue.cuh", "softmax.cuh"
WINDOW = Case("window", 1, 300, 300, 2, 1, 64, "float16", window_size=(70, 0))
SINK = Case("sink", 1, 300, 200, 4, 2, 64, "float16", True, sink=True)
ALIBI = Case("alibi", 2, 150, 200, 4, 2, 64, "float16", alibi=True)
SOFTCAP = Case("softcap", 1, 150, 200, 2, 1, 64, "float16", softcap=2.0)
CAPPED_SINK = Case("mixed", 1, 150, 200, 4, 2, 64, "float16", softcap=2.0, sink=True)
FAULTS = {
    # name: file, pattern, replacement, the case that shows it
    "the window begins a key late": (MASK, r"row \+ p_\.first_diagonal", "row + 1 + p_.first_diagonal", WINDOW),
    "the window begins a key early": (MASK, r"column < begin", "column + 1 < begin", WINDOW),
    "the first blocks are not masked": (MASK, r"\+ S\.tile_n - 1\) / S\.tile_n,\n", ") / S.tile_n,\n", WINDOW),
    "a block is left out": (
        MASK,
        r"\{sequence\.first_key\(row_begin\)",
        "{S.tile_n - 1 + sequence.first_key(row_begin)",
        WINDOW,
    ),
    "the sink is in base e": (EPILOGUE, r"shift\) \* log2_e", "shift)", SINK),
    "the sink is of the key head": (EPILOGUE, r"p\.sink\[tile\.head ", "p.sink[tile.head_kv ", SINK),
    "the sink is not in the sum": (SOFTMAX, r"fmaf\(sum, shrink, [^;]*;", "sum * shrink;", SINK),
    "O keeps the frame of the keys": (SOFTMAX, r"shrink \* ptx::rcp", "ptx::rcp", SINK),
    "the cap is not added back": (EPILOGUE, r"__fadd_rn\(lse\.row\[r\], shift\)", "lse.row[r]", SOFTCAP),
    "the sink is not in the frame of the cap": (EPILOGUE, r" - shift\)", ")", CAPPED_SINK),
    "a slope rises": (MOD, r"__fmul_rn\(-p\.alibi", "__fmul_rn(p.alibi", ALIBI),
    "a slope knows one direction": (MOD, r"fabsf\(", "(", ALIBI),
    "both rows have one distance": (MOD, r"block \* S\.tile_n - 8\)", "block * S.tile_n)", ALIBI),
    "slopes of the first batch": (MOD, r"tile\.batch \* p\.alibi_stride_batch \+ ", "", ALIBI),
    "slopes are aligned top-left": (MOD, r" - \(sequence\.seqlen_k\(\) - sequence\.seqlen_q\(\)\)", "", ALIBI),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda name: name.replace(" ", "_"))
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, case = FAULTS[fault]
    read = sources.read

    def edited(path: str) -> str:
        text, count = re.subn(old, new, read(path)) if path == file else (read(path), 1)
        assert count == 1, f"{path} holds {old!r} {count} times: the kernel has changed, so must the fault"
        return text

    hold_to_oracle(case, run(case))
    monkeypatch.setattr(sources, "read", edited)
    monkeypatch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    monkeypatch.setattr(emulate, "kernel_of", emulate.kernel_of.__wrapped__)
    with pytest.raises(AssertionError, match=r"^(out|lse)\["):
        hold_to_oracle(case, run(case))
