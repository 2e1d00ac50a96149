"""Windows, softcap, sink, ALiBi and bias: the kernel under the emulator against oracle and twin, and planted faults."""

from __future__ import annotations

import dataclasses
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

GROUPS = ("window", "softcap", "sink", "alibi", "bias", "mixed")
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
LOGITS, ARITHMETIC, READER = "logits.cuh", "ptx/arithmetic.cuh", "hopper/bias.cuh"
PRODUCER = "hopper/producer.cuh"
BIAS = Case("bias", 2, 150, 200, 4, 2, 64, "float16", bias="bhqk")
BIAS_16 = dataclasses.replace(BIAS, dtype="bfloat16", bias_dtype="same")
SHARED = dataclasses.replace(BIAS, bias="qk")
SHARED_ROW = dataclasses.replace(BIAS, bias="bk")
GATHERED = dataclasses.replace(BIAS, seqlen_k=203)
GATHERED_16 = dataclasses.replace(GATHERED, bias_dtype="same")
BIASED_SLOPES = dataclasses.replace(BIAS, alibi=True)
BIASED_SINK = dataclasses.replace(BIAS, sink=True)
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
    "the sink is in base e": (EPILOGUE, r"Softmax::of_natural", "", SINK),
    "the sink is of the key head": (EPILOGUE, r"p\.sink\[tile\.head ", "p.sink[tile.head_kv ", SINK),
    "the sink is not in the sum": (SOFTMAX, r"fmaf\(sum, shrink, [^;]*;", "sum * shrink;", SINK),
    "O keeps the frame of the keys": (SOFTMAX, r"shrink \* ptx::rcp", "ptx::rcp", SINK),
    "the cap is not added back": (EPILOGUE, r"__fadd_rn\(lse\.row\[r\], shift\)", "lse.row[r]", SOFTCAP),
    "the sink is not in the frame of the cap": (EPILOGUE, r" - shift\)", ")", CAPPED_SINK),
    "a slope rises": (MOD, r"= -p\.alibi", "= p.alibi", ALIBI),
    "a slope knows one direction": (MOD, r"fabsf\(", "(", ALIBI),
    "both rows have one distance": (MOD, r"block \* S\.tile_n - 8\)", "block * S.tile_n)", ALIBI),
    "slopes of the first batch": (MOD, r"tile\.batch \* p\.alibi_stride_batch \+ ", "", ALIBI),
    "slopes are aligned top-left": (MOD, r" - \(sequence\.seqlen_k\(\) - sequence\.seqlen_q\(\)\)", "", ALIBI),
    "a slope is in base 2": (MOD, r"if constexpr \(S\.bias == Bias::none\) slope_", "slope_", BIASED_SLOPES),
    "the bias is not added": (MOD, r"p_\.scale, bias\[i\]\)", "p_.scale, 0.f)", BIAS),
    "the bias is scaled": (MOD, r"fmaf\(scores\[i\], p_\.scale, bias\[i\]\)", "(scores[i] + bias[i]) * p_.scale", BIAS),
    "scores with a bias are in base 2": (LOGITS, r"0\.5f : log2_e", "0.5f : 1.f", BIAS),
    "maxima near the end of float32 overflow": (LOGITS, r"fabsf\(maximum\) > 0x1p127f", "false", BIAS),
    "the lse of a bias is in base 2": (
        LOGITS,
        r"ptx::lg2_approx_ftz\(sum\), ln_2",
        "ptx::lg2_approx_ftz(sum), 1.f",
        BIAS,
    ),
    "a sink beside a bias is in base 2": (
        LOGITS,
        r"\(float logit\) \{ return logit; \}",
        "(float logit) { return logit * log2_e; }",
        BIASED_SINK,
    ),
    "both halves of a word are one": (
        ARITHMETIC,
        r"upper \? packed & 0xffff0000 : packed << 16",
        "packed << 16",
        BIAS_16,
    ),
    "both rows have one bias": (READER, r"group\(first, g\) \+ 8 \* r \* Box::swizzle", "group(first, g)", BIAS),
    "columns of a bias repeat": (READER, r"group\(first, g \+ apart\)", "group(first, g)", BIAS),
    "groups are fetched in another order than kept": (READER, r"chunk \^= 2 \* apart;", "(void)apart;", BIAS),
    "panels of a bias repeat": (READER, r" \+ number / of_panel \* Box::panel_bytes", "", BIAS_16),
    "the bias is not swizzled": (READER, r"\(chunk \^ line % \(Box::swizzle / 16\)\)", "(chunk + 0 * line)", BIAS),
    "matrices of a bias are exchanged": (
        READER,
        r"w\[4 \* g \+ 1\], w\[4 \* g \+ 2\]",
        "w[4 * g + 2], w[4 * g + 1]",
        BIAS_16,
    ),
    "warps read the bias of the first": (READER, r"\? place\.row\(\) :", "? place.lane() / 4 :", BIAS),
    "lanes give the same rows to ldmatrix": (
        READER,
        r" - lane / 4 \+ lane % 16",
        " - lane / 4",
        BIAS_16,
    ),
    "a shared row begins with its first column": (
        READER,
        r"slot_\.data \+ offset_ \+ 2 \* i",
        "slot_.data + 2 * i",
        SHARED_ROW,
    ),
    "the bias of the next block": (PRODUCER, r"bias\.load\(tile, row\)", "bias.load(tile, row - S.tile_n)", BIAS),
    "the bias of the first tile": (PRODUCER, r"0 : tile\.m \* S\.tile_m", "0 : 0", BIAS),
    "the bias of the key head": (PRODUCER, r"0 : tile\.head,", "0 : tile.head_kv,", BIAS),
    "the bias of the first batch": (PRODUCER, r"0 : tile\.batch,", "0 : 0,", BIAS),
    "a bias that heads share is walked": (PRODUCER, r"p_\.bias_stride_head == 0 \? 0 : ", "", SHARED),
    "a bias that batches share is walked": (PRODUCER, r"p_\.bias_stride_batch == 0 \? 0 : ", "", SHARED),
    "gathered keys are one late": (READER, r"key = first \+ 8", "key = 1 + first + 8", GATHERED),
    "gathered rows are one": (READER, r"place_\.row\(\) \+ 8 \* r", "place_.row()", GATHERED),
    "a gathered bias is of the key head": (READER, r"tile\.head \* p_\.bias", "tile.head_kv * p_.bias", GATHERED),
    "halves of gathered words are exchanged": (
        READER,
        r"load\(first, i\);(.*)\n(.*)load\(first, i \+ 1\) << 16",
        r"load(first, i + 1);\1\n\2load(first, i) << 16",
        GATHERED_16,
    ),
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
