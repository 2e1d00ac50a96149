"""The speculative softmax of the forward kernel: hard scores, its twin, its decisions, its range, planted faults."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hard_scores import FINITE, KINDS, harden
from nvrtc_tools import import_nvrtc
from twins import assert_lse_of_twin, assert_within_two_ulp

from cupyfa import compiler, emulate, sources
from cupyfa.oracles import dense, online
from cupyfa.oracles.exp2.polynomial import exp2_polynomial
from cupyfa.testing import Case, assert_close, assert_lse_close, score_magnitude

CASES = [
    Case("full", 1, 200, 500, 2, 1, 128, "bfloat16"),
    Case("full", 1, 200, 500, 2, 1, 128, "float16"),
    Case("causal", 1, 300, 500, 2, 1, 128, "float16", True),
    Case("rows that see no key", 1, 400, 300, 2, 2, 128, "bfloat16", True),
    Case("blocks of 80 keys", 1, 200, 300, 2, 1, 192, "float16", True),
]
ids = {"ids": lambda x: x.id if isinstance(x, Case) else str(x).replace(" ", "_")}


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


@functools.cache
def tiles(case: Case) -> dict[str, int]:
    """The kernel's tile sizes."""
    spec = emulate.prepare(*case.make_inputs(), **case.options).selection.spec
    assert spec.speculative
    return {"tile_m": spec.tile_m, "tile_n": spec.tile_n}


def inputs(case: Case, kind: str) -> tuple[Any, Any, Any]:
    q, k, v = case.make_inputs()
    return (*(harden(kind, q, k, block=tiles(case)["tile_n"]) if kind != "normal" else (q, k)), v)


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
    out, lse = backend.attention(q, k, v, causal=case.causal)
    assert_close(out, reference, plain, context=(case, kind))
    assert_lse_close(lse, reference_lse, score_magnitude=magnitude, context=(case, kind))


@pytest.mark.parametrize("case", CASES, **ids)
@pytest.mark.parametrize("kind", KINDS, **ids)
def test_the_exact_softmax_has_the_same_special_values(case: Case, kind: str) -> None:
    q, k, v = inputs(case, kind)
    one = emulate.attention(q, k, v, causal=case.causal)
    other = emulate.attention(q, k, v, causal=case.causal, config={"speculative": False})
    for a, b in ((one.out, other.out), (one.lse, other.lse)):
        for special in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(special(a.astype(np.float32)), special(b.astype(np.float32)))


@pytest.mark.parametrize("speculative", [False, True])
def test_rows_without_keys_are_0_whatever_v_is(speculative: bool, backend: Any) -> None:
    """A masked block is multiplied with V, and a weight of 0 makes NaN of NaN."""
    case = Case("no key", 1, 300, 150, 1, 1, 128, "float16", True)  # none in the first tile, some in the second
    q, k, v = case.make_inputs()
    v[...] = np.nan
    out, lse = backend.attention(q, k, v, causal=True, config={"speculative": speculative})
    assert not out[:, :150].any()
    assert np.isnan(out[:, 150:]).all()
    np.testing.assert_array_equal(np.isneginf(lse[0, 0]), np.arange(300) < 150)


@pytest.mark.parametrize("speculative", [False, True])
def test_a_sum_that_vanished_does_not_pass_for_a_row_without_keys(speculative: bool, backend: Any) -> None:
    """Beyond 2**31 a scaled maximum is rounded by more than any exponent: no result, and 0 would look like one."""
    q, k, v = (np.full((1, n, 1, 64), x, np.float16) for n, x in ((64, 49152), (1, 49152), (1, 1)))
    score = 64 * 49152.0**2
    scale = 1.0
    while np.float64(np.float32(scale)) * score - np.float64(np.float32(scale * score)) > -200:
        scale = float(np.nextafter(np.float32(scale), np.float32(2)))
    out, lse = backend.attention(q, k, v, softmax_scale=scale * np.log(2), config={"speculative": speculative})
    assert np.isnan(out).all()
    assert np.isneginf(lse).all()


#: What the ablation changes in the arithmetic.
VARIANTS: list[dict[str, Any]] = [
    {"speculative": False, "rescale_threshold": 8},
    {"speculative": False, "rescale_threshold": 8, "overlap": False},
    {"exp2_fma": 1},
    {"exp2_fma": 3},
]


@pytest.mark.parametrize("config", VARIANTS, **ids)
@pytest.mark.parametrize("kind", KINDS, **ids)
def test_hard_scores_of_variants(kind: str, config: dict[str, Any], backend: Any) -> None:
    for case in CASES[1:4]:
        q, k, v, reference, reference_lse, plain, magnitude = problem(case, kind)
        out, lse = backend.attention(q, k, v, causal=case.causal, config=config)
        assert_close(out, reference, plain, context=(case, kind))
        if "exp2_fma" in config:  # the polynomial is off by 8.8e-5 at most, and so is a sum
            np.testing.assert_allclose(lse, reference_lse, rtol=1e-5, atol=1e-4 + float(2.0**-21 * np.max(magnitude)))
        else:
            assert_lse_close(lse, reference_lse, score_magnitude=magnitude, context=(case, kind))


# --- The twin, and its decisions ---


@pytest.fixture
def softmaxes(monkeypatch: pytest.MonkeyPatch) -> list[online.SpeculativeSoftmax]:
    """Those that the twin makes."""
    made: list[online.SpeculativeSoftmax] = []

    class Kept(online.SpeculativeSoftmax):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(online, "SpeculativeSoftmax", Kept)
    return made


@pytest.mark.parametrize("case", CASES, **ids)
@pytest.mark.parametrize("kind", ["normal", *FINITE], **ids)
def test_kernel_is_its_twin(case: Case, kind: str) -> None:
    q, k, v = inputs(case, kind)
    result = emulate.attention(q, k, v, **case.options)
    assert result.run.verdict == "clean"
    out, lse = online.attention(q, k, v, speculative=True, **tiles(case), **case.options)
    assert_within_two_ulp(result.out, out)
    assert_lse_of_twin(result.lse, lse, score_magnitude(q, k))


@pytest.mark.parametrize("config", VARIANTS, **ids)
@pytest.mark.parametrize("kind", ["normal", *FINITE], **ids)
def test_variants_are_their_twins(kind: str, config: dict[str, Any]) -> None:
    options = {name: value for name, value in config.items() if name != "overlap"}
    for case in CASES[1:4]:
        q, k, v = inputs(case, kind)
        result = emulate.attention(q, k, v, **case.options, config=config)
        assert result.run.verdict == "clean"
        out, lse = online.attention(q, k, v, **{"speculative": True} | options, **tiles(case), **case.options)
        assert_within_two_ulp(result.out, out)
        assert_lse_of_twin(result.lse, lse, score_magnitude(q, k))


@pytest.mark.parametrize("eights", range(9))
def test_so_many_exponentials_are_on_the_fma_units(eights: int) -> None:
    """By their error: 2**0.5 of the polynomial is 5e-5 off."""
    q, k, v = (np.zeros((1, n, 1, 64), np.float16) for n in (128, 256, 256))
    q[..., 0] = 1
    k[:, 128:, :, 0] = 10.0  # visited first: the references
    k[:, :128, :, 0] = 9.5
    v[...] = 1
    config = {"tile_n": 128, "exp2_fma": eights}
    found, exact = (
        float(emulate.attention(q, k, v, softmax_scale=np.log(2), config=changed).lse[0, 0, 0])
        for changed in (config, {"tile_n": 128})
    )
    off = np.log1p(128 * 2**-0.5 * relative_error(-0.5) * eights / 8 / (128 * (1 + 2**-0.5)))
    assert found - exact == pytest.approx(off, abs=1.2e-6)  # an ulp of the lse, and a quarter of what an eighth is


def relative_error(x: float) -> float:
    """Of the polynomial."""
    return float(exp2_polynomial(x)) / 2**x - 1


def counts(softmaxes: list[online.SpeculativeSoftmax]) -> tuple[int, int]:
    """How many corrections there were, and how many of them without having tried the old maxima."""
    return sum(softmax.corrections for softmax in softmaxes), sum(softmax.untried for softmax in softmaxes)


class Decisions(NamedTuple):
    """Of the kernel, relative to those of another run of it: where warps shuffle and vote tells them."""

    corrections: int
    untried: int


def decisions(run: Any, other: Any) -> Decisions:
    """A correction takes four shuffles and a vote, a try takes a vote."""
    assert run.verdict == other.verdict == "clean"
    shuffles, votes = (int(run.statistics[n] - other.statistics[n]) for n in ("shuffles", "votes"))
    corrections, rest = divmod(shuffles, 4)
    assert rest == 0
    return Decisions(corrections, untried=corrections - votes)


@pytest.mark.parametrize("case", CASES, **ids)
def test_kernel_decides_as_its_twin(case: Case, softmaxes: list[online.SpeculativeSoftmax]) -> None:
    kinds = ("normal", *FINITE, "NaN in q", "inf in q")  # in k, it would reach rows that only the kernel has
    corrections, untried = {}, {}
    for kind in kinds:
        softmaxes.clear()
        with np.errstate(invalid="ignore"):
            online.attention(*inputs(case, kind), speculative=True, **tiles(case), **case.options)
        corrections[kind], untried[kind] = counts(softmaxes)
    least = corrections["normal"]
    assert corrections["constant"] == corrections["negative"] == corrections["slow"] == least
    if not case.causal:
        # 8 warps of the first tile and 5 with rows of the second one, each in the first of its four blocks.
        assert least == case.heads_q * (8 + 5)
        assert (corrections["steps"], untried["steps"]) == (4 * least, 2 * least)
        assert corrections["NaN in q"] == corrections["inf in q"] == least + 3  # the other blocks of one warp
    runs = {kind: emulate.attention(*inputs(case, kind), sms=1, policy="eager", **case.options).run for kind in kinds}
    assert {kind: decisions(run, runs["normal"]) for kind, run in runs.items()} == {
        kind: (corrections[kind] - least, untried[kind]) for kind in kinds
    }


# --- The limit ---


class Probe(NamedTuple):
    """Scores in four key blocks, relative to log2(limit), in some rows and columns; all others are 0.

    Block 3 is visited first and makes the references, and block 0 shows whether it is tried: they have no other score.
    """

    corrections: int
    columns: dict[int, float]  # of block 2, which is visited next
    columns_of_third: dict[int, float] = {}  # of block 1  # noqa: RUF012 - nobody writes to it
    limits_of_third: int = 1  # they are relative to so many log2(limit)
    untried: int = 0  # of the corrections
    rows: tuple[int, ...] = (21,)  # of the second warp
    query: float = 1.0  # a factor on the scores


ALL = range(128)
PROBES = {
    **{f"column {c}, below": Probe(0, {c: -0.25}) for c in (0, 1, 7, 126)},
    # Whatever has left the range may do so again: the next block goes untried.
    **{f"column {c}, above": Probe(2, {c: 0.25}, untried=1) for c in (0, 1, 7, 126)},
    "at the limit": Probe(2, {0: 0}, untried=1),
    "row g + 8, above": Probe(2, {1: 0.25}, untried=1, rows=(29,)),
    "two columns of a sum, below": Probe(0, {3: -1.25, 123: -1.25}),
    "two columns of a sum, above": Probe(2, {3: -0.75, 123: -0.75}, untried=1),
    "two columns of two parities": Probe(0, {2: -0.75, 3: -0.75}),
    "two columns of two threads": Probe(0, {3: -0.75, 5: -0.75}),
    "two rows of a thread": Probe(0, {3: -0.75}, rows=(21, 29)),
    "all columns, below": Probe(0, dict.fromkeys(ALL, -4.25)),
    "all columns, at the limit": Probe(2, dict.fromkeys(ALL, -4), untried=1),
    "two blocks, only together above": Probe(0, dict.fromkeys(ALL, -4.25), dict.fromkeys(ALL, -4.25)),
    "two rows of a warp": Probe(2, {0: 0.25}, untried=1, rows=(21, 24)),
    "two rows of two warps": Probe(4, {0: 0.25}, untried=2, rows=(21, 32)),
    # In the untried block, a sum has 16 columns: growing by less than a 16th of the limit is calm.
    "a calm growth": Probe(2, {0: 0.25}, {0: -4}, 2, untried=1),
    "a growth that may leave the range again": Probe(3, {0: 0}, {0: -4}, 2, untried=2),
    "NaN": Probe(3, {}, query=np.nan),
}


def check_decisions(dtype: str, names: Iterable[str], softmaxes: list[online.SpeculativeSoftmax]) -> None:
    """Hold the kernel and the twin to some of the probes."""
    case = Case("probe", 1, 64, 4 * 128, 1, 1, 64, dtype, softmax_scale=np.log(2))  # exactly 1 in base 2
    assert tiles(case)["tile_n"] == 128

    def arrays(probe: Probe) -> tuple[Any, Any, Any]:
        q, k, v = (np.zeros_like(x) for x in case.make_inputs())
        q[0, list(probe.rows), 0, 0] = probe.query
        log2_limit = {"bfloat16": 60, "float16": 15}[dtype]
        for j, limits, columns in (2, 1, probe.columns), (1, probe.limits_of_third, probe.columns_of_third):
            for column, x in columns.items():
                k[0, 128 * j + column, 0, 0] = limits * log2_limit + x
        return q, k, v

    def run(probe: Probe) -> Any:
        return emulate.attention(*arrays(probe), sms=1, policy="eager", **case.options).run

    plain = run(Probe(0, {}))
    for name in names:
        probe = PROBES[name]
        softmaxes.clear()
        online.attention(*arrays(probe), speculative=True, **tiles(case), **case.options)
        assert counts(softmaxes) == (4 + probe.corrections, probe.untried), name
        assert decisions(run(probe), plain) == (probe.corrections, probe.untried), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernel_decides_at_the_limit(dtype: str, softmaxes: list[online.SpeculativeSoftmax]) -> None:
    check_decisions(dtype, PROBES, softmaxes)


# --- Range ---


def error(out: Any, reference: Any) -> float:
    return float(np.abs(out.astype(np.float64) - reference).max())


@pytest.mark.parametrize("exponent", [-40, -64, -100, -110])
def test_small_values(exponent: int, backend: Any) -> None:
    """P of the largest weight is 1 or more, so that O is no smaller than the output: nothing more is lost."""
    q, k, v = CASES[0].make_inputs()
    V = (v.astype(np.float32) * 2.0**exponent).astype(v.dtype)
    reference, plain = dense.attention(q, k, V)[0], dense.same_precision(q, k, V)[0]
    out, _ = backend.attention(q, k, V)
    assert_close(out, reference, plain)
    assert out.any()


@pytest.mark.parametrize(("beyond", "each"), [(55.75, 128), (59.75, 8)])
def test_large_values(beyond: float, each: int, backend: Any) -> None:
    """2**9 keys of 2**55, up to 2**60 above the reference, make an O below 2**124, as 2**17 keys of 2**47 do."""
    case = Case("range", 1, 64, 4 * 128, 1, 1, 64, "bfloat16")
    q, k, v = (np.zeros_like(x) for x in case.make_inputs())
    q[..., 0] = 1
    k[..., 0] = -4096
    blocks = k.reshape(4, 128, 64)
    blocks[:-1, :each, 0] = beyond
    blocks[-1, :, 0] = 0  # visited first
    v[...] = 2.0**55
    v[..., 1] *= -1
    out, lse = backend.attention(q, k, v, softmax_scale=np.log(2))
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, :1], out.shape))
    np.testing.assert_allclose(lse, np.log(2) * (beyond + np.log2(3 * each)), rtol=1e-6)


@pytest.mark.parametrize("beyond", [16.5, 23.5])
def test_small_weights_of_float16(beyond: float, backend: Any) -> None:
    """Weights are rounded to multiples of 2**-24 of the largest one, as they are without speculation."""
    keys = 500
    q, k, v = (np.zeros((1, n, 1, 128), np.float16) for n in (130, keys, keys))
    q[..., 0] = 1
    k[:, :-1, :, 0] = -beyond * np.log(2)
    v[:, :-1] = 1
    reference, reference_lse = dense.attention(q, k, v, softmax_scale=1.0)
    out, lse = backend.attention(q, k, v, softmax_scale=1.0)
    exact, exact_lse = backend.attention(q, k, v, softmax_scale=1.0, config={"speculative": False})
    assert error(out, reference) <= (keys - 1) * 2.0**-25 + 2.0**-11 * reference.max()
    assert out.any()
    np.testing.assert_array_equal(out, exact)
    # The exact softmax adds the terms to the row's sum one by one.
    assert error(lse, reference_lse) <= min(1e-6, error(exact_lse, reference_lse))


# --- Planted faults ---

SOFTMAX, CONSUMER = "speculative_softmax.cuh", "hopper/consumer.cuh"
IN_RANGE = r"sum\[0\]\[0\] < limit && sum\[0\]\[1\] < limit && sum\[1\]\[0\] < limit && sum\[1\]\[1\] < limit"
FAULTS = {
    # name: file, pattern, replacement, what shows it: a result, a hazard or a probe
    "O keeps the old frame": (CONSUMER, r"if \(!same_frame\) scale_rows", "if (!S.speculative) scale_rows", "out"),
    "the sum keeps the old frame": (SOFTMAX, r"sum_\[r\]\[c\] \*= shrink.row\[r\];", "", "out"),
    "the reference is left out of the lse": (
        SOFTMAX,
        r"close_row<Logits>\(reference_\[r\]",
        "close_row<Logits>(0.f",
        "lse",
    ),
    "out of range is not seen": (SOFTMAX, r"!__all_sync\([^)]*\)", "false", "out"),
    "a NaN is in range": (
        SOFTMAX,
        IN_RANGE,
        "!(sum[0][0] >= limit || sum[0][1] >= limit || sum[1][0] >= limit || sum[1][1] >= limit)",
        "NaN",
    ),
    "one of two columns is looked at": (SOFTMAX, IN_RANGE, "sum[0][0] < limit && sum[1][0] < limit", "column 1, above"),
    "one of two rows is looked at": (SOFTMAX, IN_RANGE, "sum[0][0] < limit && sum[0][1] < limit", "row g + 8, above"),
    "the sums of a row are taken together": (
        SOFTMAX,
        IN_RANGE,
        "sum[0][0] + sum[0][1] < limit && sum[1][0] + sum[1][1] < limit",
        "two columns of two parities",
    ),
    "the sums of all blocks are looked at": (
        SOFTMAX,
        IN_RANGE,
        " && ".join(f"sum_[{r}][{c}] + sum[{r}][{c}] < limit" for r in (0, 1) for c in (0, 1)),
        "two blocks, only together above",
    ),
    "the limit is too high": (SOFTMAX, "0x1p60f : 0x1p15f", "0x1p61f : 0x1p16f", "column 0, above"),
    "the limit is too low": (SOFTMAX, "0x1p60f : 0x1p15f", "0x1p59f : 0x1p14f", "column 0, below"),
    "every block is tried": (SOFTMAX, r"if \(!try_next_\) return false;", "", "column 0, above"),
    "no block is tried after a correction": (SOFTMAX, r"try_next_ = __all_sync\([^)]*\)", "try_next_ = false", "NaN"),
    "what may leave the range again is calm": (
        SOFTMAX,
        r"> 1 / expected",
        ">= 1 / expected",
        "all columns, at the limit",
    ),
    "only a growth by the limit is not calm": (
        SOFTMAX,
        r"limit / \(count / 4\)",
        "limit",
        "two columns of a sum, above",
    ),
    "what stays in range is not calm": (SOFTMAX, r"limit / \(count / 4\)", "limit / (count / 2)", "a calm growth"),
    "each thread decides for itself": (SOFTMAX, r"!__all_sync\([^,]*, ([^)]*)\)", r"!\1", "hazard"),
    "the two P are not swapped": (CONSUMER, r"round\(two, one\)", "round(two, two)", "hazard"),
    "O is rescaled in flight": (
        CONSUMER,
        r"(if \(j > blocks.begin\) k = K_.wait\(\);\s*complete<0>\(O\);[^\n]*\s*release\(v\);)"
        r"\s*(if \(!same_frame\)[^;]*;)",
        r"\2 \1",
        "hazard",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, **ids)
def test_a_fault_is_found(
    fault: str, softmaxes: list[online.SpeculativeSoftmax], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, old, new, shows = FAULTS[fault]
    read = sources.read

    def edited(path: str) -> str:
        text, count = re.subn(old, new, read(path)) if path == file else (read(path), 1)
        assert count == 1, f"{path} holds {old!r} {count} times: the kernel has changed, so must the fault"
        return text

    monkeypatch.setattr(sources, "read", edited)
    monkeypatch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    monkeypatch.setattr(emulate, "kernel_of", emulate.kernel_of.__wrapped__)
    if shows in PROBES:
        with pytest.raises(AssertionError, match=shows.replace("+", r"\+")):
            check_decisions("float16", [shows], softmaxes)
        return
    q, k, v, reference, reference_lse, plain, magnitude = problem(CASES[1], "huge")
    out, lse, run = emulate.attention(q, k, v, sms=1, policy="lazy", max_instructions=20_000_000)
    assert (run.verdict == "clean") == (shows != "hazard"), run
    if shows == "lse":
        with pytest.raises(AssertionError, match=r"^lse\["):
            assert_lse_close(lse, reference_lse, score_magnitude=magnitude)
    elif shows == "out":
        with pytest.raises(AssertionError, match=r"^out\["):
            assert_close(out, reference, plain)
