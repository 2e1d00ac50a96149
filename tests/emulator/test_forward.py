"""The Hopper forward kernel, as NVRTC compiles it, under every schedule of the emulator, against the oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nvrtc_tools import import_nvrtc

from cupyfa import emulate
from cupyfa.oracles import dense
from cupyfa.testing import assert_close, assert_lse_close, random_array, score_magnitude


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention problem, and what is special about it."""

    why: str
    batch: int = 1
    seqlen_q: int = 200
    seqlen_k: int = 300
    heads_q: int = 1
    heads_kv: int = 1
    head_dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    scale: float | None = None
    layout: str = "BSHD"
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.why.replace(" ", "_")


EXACT_THREE_STAGES = (("three_stage", True), ("speculative", False))
THREE_STAGES = (*EXACT_THREE_STAGES, ("tile_n", 96))
UNSPECIALIZED = (
    ("warp_specialized", False),
    ("q_stages", 1),
    ("pingpong", False),
    ("scheduler", "one_tile"),
    ("setmaxnreg", False),
)
EXACT = (("speculative", False),)

# One CTA walks all tiles of a case (sms=1), so a case with three tiles wraps every ring and every parity.
CASES = [
    *(
        Case(f"d{d} {dtype} {'causal' if causal else 'full'}", head_dim=d, dtype=dtype, causal=causal, heads_q=2)
        for d in (64, 128, 256)
        for dtype in ("bfloat16", "float16")
        for causal in (False, True)
    ),
    *(Case(f"d{d} zero filled columns", head_dim=d, seqlen_q=150, seqlen_k=150) for d in (8, 72, 96, 184, 192, 248)),
    Case("one key", seqlen_k=1),
    Case("one query", seqlen_q=1, seqlen_k=257),
    Case("one of each", seqlen_q=1, seqlen_k=1, head_dim=64),
    Case("exact tiles", seqlen_q=256, seqlen_k=256, heads_q=2),
    Case("one row too many", seqlen_q=129, seqlen_k=129),
    Case("ragged both", seqlen_q=113, seqlen_k=203, dtype="float16"),
    Case("rows that see no key", seqlen_q=300, seqlen_k=100, causal=True),
    Case("rows that see no key d64", seqlen_q=500, seqlen_k=90, head_dim=64, causal=True),
    Case("more keys than queries causal", seqlen_q=100, seqlen_k=384, causal=True),
    Case("grouped heads", heads_q=6, heads_kv=2, seqlen_q=130, seqlen_k=130),
    Case("one key head", heads_q=4, heads_kv=1, causal=True),
    Case("three tiles of one head", seqlen_q=384, seqlen_k=384, causal=True),
    Case("three batches", batch=3, seqlen_q=100, seqlen_k=260),
    Case("many short tiles", batch=5, seqlen_q=3, seqlen_k=70, head_dim=64),
    Case("heads before rows", layout="BHSD", heads_q=2, heads_kv=2),
    Case("scale 0", scale=0.0, seqlen_q=130, seqlen_k=130),
    Case("negative scale", scale=-0.3, seqlen_q=130, seqlen_k=130, causal=True),
    Case("five rounds of the ring", seqlen_q=128, seqlen_k=1280, head_dim=64),
    Case("exact softmax", heads_q=2, config=(("speculative", False),)),
    Case("exact softmax causal", heads_q=2, causal=True, dtype="float16", config=(("speculative", False),)),
    Case("speculative softmax d64", heads_q=2, head_dim=64, causal=True, config=(("speculative", True),)),
    Case("without overlap", heads_q=2, config=(("overlap", False), ("speculative", False))),
    *(
        Case(f"three stages, {why}", **options, config=THREE_STAGES)
        for why, options in {
            "full": {"heads_q": 2, "seqlen_k": 700},
            "causal": {"heads_q": 2, "seqlen_q": 384, "seqlen_k": 384, "causal": True, "dtype": "float16"},
            "one block": {"heads_q": 2, "seqlen_k": 96},
            "two blocks": {"heads_q": 2, "seqlen_k": 97},
            "three blocks": {"heads_q": 2, "seqlen_k": 200},
            "four blocks": {"heads_q": 2, "seqlen_k": 384},
            "one of each": {"seqlen_q": 1, "seqlen_k": 1},
            "grouped heads": {"heads_q": 6, "heads_kv": 2, "seqlen_q": 130, "seqlen_k": 130},
            "rows that see no key": {"seqlen_q": 500, "seqlen_k": 300, "causal": True},
            "negative scale": {"scale": -0.3, "seqlen_q": 130, "seqlen_k": 500, "causal": True},
        }.items()
    ),
    Case("three stages, d64", heads_q=2, head_dim=64, causal=True, seqlen_k=500, config=EXACT_THREE_STAGES),
    Case(
        "three stages, three warpgroups",
        heads_q=2,
        head_dim=64,
        seqlen_k=500,
        config=(*EXACT_THREE_STAGES, ("tile_m", 192), ("tile_n", 80)),
    ),
    Case("three stages, three slots", heads_q=3, seqlen_k=500, config=(*THREE_STAGES, ("stages", 3), ("q_stages", 1))),
    Case("with pingpong", heads_q=2, config=(("pingpong", True),)),
    Case("without pingpong", heads_q=2, causal=True, config=(("pingpong", False),)),
    Case("neither", heads_q=2, causal=True, config=(("overlap", False), ("speculative", False), ("pingpong", False))),
    Case("one CTA per tile", heads_q=2, config=(("scheduler", "one_tile"),)),
    *(
        Case(f"head by head, {name}", heads_q=2, causal=True, config=(("longest_first", False), ("scheduler", name)))
        for name in ("one_tile", "persistent", "dynamic")
    ),
    Case("exponentials on FMA units", heads_q=2, causal=True, config=(("exp2_fma", 2),)),
    Case("frame that stays", heads_q=2, causal=True, config=(("rescale_threshold", 8), *EXACT)),
    Case("without setmaxnreg", heads_q=2, config=(("setmaxnreg", False),)),
    Case("one stage of Q", heads_q=2, config=(("q_stages", 1),)),
    Case("short causal tile d64", heads_q=3, seqlen_q=384, seqlen_k=384, head_dim=64, causal=True),
    # Without warp specialization each tile has a CTA of its own.
    *(
        dataclasses.replace(case, why=f"unspecialized {case.why}", config=(*UNSPECIALIZED, *case.config))
        for case in (
            Case("full", heads_q=2),
            Case("causal", heads_q=2, causal=True, dtype="float16"),
            Case("full exact", heads_q=2, config=EXACT),
            Case("causal exact", heads_q=2, causal=True, dtype="float16", config=EXACT),
            Case("ragged both", seqlen_q=113, seqlen_k=203, dtype="float16"),
            Case("grouped heads", heads_q=6, heads_kv=2, seqlen_q=130, seqlen_k=130),
            Case("one key", seqlen_k=1),
            Case("two blocks", seqlen_q=128, seqlen_k=256, config=EXACT),
            Case("three rounds of the ring", seqlen_q=128, seqlen_k=768),
            Case("three rounds of the ring exact", seqlen_q=128, seqlen_k=768, config=EXACT),
            Case("three slots", seqlen_q=128, seqlen_k=1280, head_dim=64),
            Case("more slots than blocks", seqlen_k=200, head_dim=64, config=(("stages", 4),)),
            Case("three warpgroups", seqlen_q=200, seqlen_k=700, head_dim=64, config=(("tile_m", 192), ("tile_n", 96))),
            Case("one warpgroup", seqlen_q=100, seqlen_k=500, head_dim=64, config=(("tile_m", 64),)),
            Case("rows that see no key", seqlen_q=300, seqlen_k=100, causal=True),
            Case("d256 causal", seqlen_q=200, seqlen_k=300, head_dim=256, causal=True),
            Case("zero filled columns", seqlen_q=150, seqlen_k=350, head_dim=184),
            Case("negative scale", scale=-0.3, seqlen_q=130, seqlen_k=300, causal=True),
            Case("three batches", batch=3, seqlen_q=100, seqlen_k=260, layout="BHSD", heads_q=2, heads_kv=2),
        )
    ),
]


@functools.cache
def problem(case: Case) -> tuple[Any, ...]:
    """Inputs, reference output and LSE, and the plain algorithm's output."""
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[case.dtype]
    q = random_array((case.batch, case.seqlen_q, case.heads_q, case.head_dim), dtype, 1)
    k, v = (random_array((case.batch, case.seqlen_k, case.heads_kv, case.head_dim), dtype, seed) for seed in (2, 3))
    options = {"softmax_scale": case.scale, "causal": case.causal}
    reference, lse = dense.attention(q, k, v, **options)
    plain, _ = dense.same_precision(q, k, v, **options)
    return q, k, v, reference, lse, plain, score_magnitude(q, k, case.scale)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_right_and_clean(case: Case, backend: Any) -> None:
    q, k, v, reference, reference_lse, plain, magnitude = problem(case)
    if case.layout == "BHSD":
        q, k, v, reference, plain = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, reference, plain))
    out, lse = backend.attention(
        q, k, v, softmax_scale=case.scale, causal=case.causal, layout=case.layout, config=dict(case.config) or None
    )
    assert_close(out, reference, plain, context=case)
    assert_lse_close(lse, reference_lse, score_magnitude=magnitude, context=case)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["random", "fine", "pct"])
def test_seeds_change_the_schedule_and_not_the_result(policy: str, seed: int) -> None:
    case = Case("seeds", heads_q=2, causal=True)
    q, k, v, *_ = problem(case)
    results = [emulate.attention(q, k, v, causal=True, sms=1, policy=policy, seed=s) for s in (seed, seed, seed + 10)]
    same, again, other = results
    assert [r.run.verdict for r in results] == ["clean"] * 3
    assert same.run.statistics["instructions"] == again.run.statistics["instructions"]
    assert same.run.statistics["instructions"] != other.run.statistics["instructions"]
    assert np.array_equal(same.out.view(np.uint16), other.out.view(np.uint16))
    assert np.array_equal(same.lse.view(np.uint32), other.lse.view(np.uint32))


def test_empty_problem_is_not_launched() -> None:
    q = np.ones((1, 5, 1, 64), np.float16)
    k = np.ones((1, 0, 1, 64), np.float16)
    out, lse, run = emulate.attention(q, k, k)
    assert run.verdict == "clean"
    assert not out.any()
    assert np.all(lse == -np.inf)
