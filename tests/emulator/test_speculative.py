"""The speculative softmax of the forward kernel: hard scores, its twin, its decisions, its range, planted faults."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from hard_scores import FINITE, KINDS, harden
from nvrtc_tools import import_nvrtc
from twins import assert_lse_of_twin, assert_within_two_ulp

from cupyfa import compiler, emulate, sources
from cupyfa.oracles import dense, online
from cupyfa.testing import Case, assert_close, assert_lse_close, score_magnitude

CASES = [
    Case("full", 1, 200, 500, 2, 1, 128, "bfloat16"),
    Case("full", 1, 200, 500, 2, 1, 128, "float16"),
    Case("causal", 1, 300, 500, 2, 1, 128, "float16", True),
    Case("rows that see no key", 1, 400, 300, 2, 2, 128, "bfloat16", True),
]
ids = {"ids": lambda x: x.id if isinstance(x, Case) else str(x).replace(" ", "_")}


#: float16 has to be asked for it.
ON = {"speculative": True}


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


def inputs(case: Case, kind: str) -> tuple[Any, Any, Any]:
    q, k, v = case.make_inputs()
    return (*(harden(kind, q, k) if kind != "normal" else (q, k)), v)


@functools.cache
def problem(case: Case, kind: str) -> tuple[Any, ...]:
    """Inputs, reference output and LSE, the plain algorithm's output, and the magnitude of the scores."""
    q, k, v = inputs(case, kind)
    with np.errstate(invalid="ignore"):
        reference, lse = dense.attention(q, k, v, **case.options)
        plain, _ = dense.same_precision(q, k, v, **case.options)
    return q, k, v, reference, lse, plain, score_magnitude(q, k)


@pytest.mark.parametrize("case", CASES, **ids)
@pytest.mark.parametrize("kind", KINDS, **ids)
def test_hard_scores(case: Case, kind: str, backend: Any) -> None:
    q, k, v, reference, reference_lse, plain, magnitude = problem(case, kind)
    out, lse = backend.attention(q, k, v, causal=case.causal, config=ON)
    assert_close(out, reference, plain, context=(case, kind))
    assert_lse_close(lse, reference_lse, score_magnitude=magnitude, context=(case, kind))


@pytest.mark.parametrize("case", CASES, **ids)
@pytest.mark.parametrize("kind", KINDS, **ids)
def test_the_exact_softmax_has_the_same_special_values(case: Case, kind: str) -> None:
    q, k, v = inputs(case, kind)
    one = emulate.attention(q, k, v, causal=case.causal, config=ON)
    other = emulate.attention(q, k, v, causal=case.causal, config={"speculative": False})
    for a, b in ((one.out, other.out), (one.lse, other.lse)):
        for special in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(special(a.astype(np.float32)), special(b.astype(np.float32)))


# --- The twin, and its decisions ---


def twin(case: Case, q: Any, k: Any, v: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, int]:
    """Output and LSE of the twin, and how many times a warp left its range."""
    made: list[online.SpeculativeSoftmax] = []

    class Counted(online.SpeculativeSoftmax):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(online, "SpeculativeSoftmax", Counted)
    out, lse = online.attention(q, k, v, speculative=True, tile_m=128, tile_n=128, **case.options)
    return out, lse, sum(softmax.corrections for softmax in made)


@pytest.mark.parametrize("case", CASES, **ids)
@pytest.mark.parametrize("kind", ["normal", *FINITE], **ids)
def test_kernel_is_its_twin(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(case, kind)
    result = emulate.attention(q, k, v, config=ON, **case.options)
    assert result.run.verdict == "clean"
    out, lse, _ = twin(case, q, k, v, monkeypatch)
    assert_within_two_ulp(result.out, out)
    assert_lse_of_twin(result.lse, lse, score_magnitude(q, k))


@pytest.mark.parametrize("case", CASES, **ids)
def test_kernel_decides_as_its_twin(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A correction takes a fixed number of instructions: they count how many there were."""

    def instructions(kind: str) -> int:
        run = emulate.attention(*inputs(case, kind), sms=1, policy="eager", config=ON, **case.options).run
        assert run.verdict == "clean"
        return int(run.statistics["instructions"])

    corrections = {kind: twin(case, *inputs(case, kind), monkeypatch)[2] for kind in ("normal", *FINITE)}
    none = corrections["normal"]
    assert corrections["constant"] == corrections["negative"] == none
    if case.causal:
        assert none > 0  # the first block shows keys to some rows of a warp only, and the next one to all
    else:
        assert none == 0
        # 8 warps of the first tile, 5 with rows of the second one; the first of four blocks corrects nothing.
        assert corrections["steps"] == case.heads_q * (8 + 5) * 3
    plain = instructions("normal")
    each, rest = divmod(instructions("steps") - plain, corrections["steps"] - none)
    assert rest == 0
    assert each > 3 * 64  # a thread has 64 scores of a block: fma, exponential and sum of each
    for kind, count in corrections.items():
        assert instructions(kind) == plain + each * (count - none), kind


# --- Range ---


def error(out: Any, reference: Any) -> float:
    return float(np.abs(out.astype(np.float64) - reference).max())


@pytest.mark.parametrize("exponent", [-40, -54, -64, -110])
def test_small_values(exponent: int, backend: Any) -> None:
    """An output loses up to 2**-66 where O is below 2**-126, once for each frame: down to 2**-57 that is no loss."""
    q, k, v = CASES[0].make_inputs()
    V = (v.astype(np.float32) * 2.0**exponent).astype(v.dtype)
    reference, plain = dense.attention(q, k, V)[0], dense.same_precision(q, k, V)[0]
    out, _ = backend.attention(q, k, V, config=ON)
    usual = 1.25 * error(plain, reference) + float(np.abs(reference).max()) * 2.0**-8
    assert error(out, reference) <= usual + 2.0**-66
    if exponent >= -54:  # outputs of 2**-57 and more
        assert_close(out, reference, plain)
    if exponent == -110:
        assert not out.any()
        exact, _ = backend.attention(q, k, V, config={"speculative": False})
        assert_close(exact, reference, plain)


@pytest.mark.parametrize("beyond", [16.5, 18.5])
def test_small_weights_of_float16(beyond: float, backend: Any) -> None:
    """Weights are rounded to multiples of 2**-17 of the largest one; without speculation, of 2**-24."""
    keys = 500
    q, k, v = (np.zeros((1, n, 1, 128), np.float16) for n in (130, keys, keys))
    q[..., 0] = 1
    k[:, :-1, :, 0] = -beyond * np.log(2)
    v[:, :-1] = 1
    reference, _ = dense.attention(q, k, v, softmax_scale=1.0)
    out, lse = backend.attention(q, k, v, softmax_scale=1.0, config=ON)
    exact, exact_lse = backend.attention(q, k, v, softmax_scale=1.0)
    assert error(out, reference) <= (keys - 1) * 2.0**-18
    assert error(exact, reference) <= (keys - 1) * 2.0**-25 + 2.0**-11 * reference.max()
    assert bool(out.any()) == (beyond < 18)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=1e-6)  # the sum takes the unrounded weights


# --- Planted faults ---

SOFTMAX, CONSUMER = "speculative_softmax.cuh", "hopper/consumer.cuh"
FAULTS = {
    # name: file, pattern, replacement, what shows it
    "O keeps the old frame": (CONSUMER, r"if \(!in_range\) scale_rows", "if (!S.speculative) scale_rows", "out"),
    "the sum keeps the old frame": (SOFTMAX, r"sum_\[r\]\[c\] \*= shrink.row\[r\];", "", "out"),
    "the offset stays in the lse": (SOFTMAX, r"reference_\[r\] - offset \+", "reference_[r] +", "lse"),
    "out of range is not seen": (SOFTMAX, r"__any_sync\([^)]*\)", "false", "out"),
    "one of two columns is looked at": (SOFTMAX, r"0x40004000u", "0x4000u", "out"),
    "each thread decides for itself": (SOFTMAX, r"__any_sync\([^,]*, ([^)]*)\)", r"\1", "hazard"),
    "the two P are not swapped": (CONSUMER, r"round\(j - 1, two, one\)", "round(j - 1, two, two)", "out"),
    "O is rescaled in flight": (
        CONSUMER,
        r"(if \(j > 0\) k = K_.wait\(\);\s*complete<0>\(O\);[^\n]*\s*release\(v\);)\s*(if \(!in_range\)[^;]*;)",
        r"\2 \1",
        "hazard",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, **ids)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, shows = FAULTS[fault]
    read = sources.read

    def edited(path: str) -> str:
        text, count = re.subn(old, new, read(path)) if path == file else (read(path), 1)
        assert count == 1, f"{path} holds {old!r} {count} times: the kernel has changed, so must the fault"
        return text

    monkeypatch.setattr(sources, "read", edited)
    monkeypatch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    monkeypatch.setattr(emulate, "kernel_of", emulate.kernel_of.__wrapped__)
    q, k, v, reference, reference_lse, plain, magnitude = problem(CASES[1], "huge")
    out, lse, run = emulate.attention(q, k, v, sms=1, policy="lazy", config=ON, max_instructions=20_000_000)
    assert (run.verdict == "clean") == (shows != "hazard"), run
    if shows == "lse":
        with pytest.raises(AssertionError, match=r"^lse\["):
            assert_lse_close(lse, reference_lse, score_magnitude=magnitude)
    elif shows == "out":
        with pytest.raises(AssertionError, match=r"^out\["):
            assert_close(out, reference, plain)
