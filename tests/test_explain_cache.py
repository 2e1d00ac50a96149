"""What `explain_kvcache` says, without a GPU, and which kernels `warmup` takes from shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nvrtc_tools import import_nvrtc

import cupyfa
from cupyfa import explain_kvcache
from cupyfa.cache_shapes import specs_of_cache_call
from cupyfa.explain import Rung
from cupyfa.select import H200
from cupyfa.spec import AppendSpec, CombineSpec, DecodeSpec, DType


def arrays(batch: int = 1, capacity: int = 4096, heads_q: int = 8, queries: int = 1) -> tuple[Any, Any, Any]:
    cache = np.zeros((batch, capacity, 8, 128), np.float16)
    return np.zeros((batch, queries, heads_q, 128), np.float16), cache, cache.copy()


def test_numpy_arrays_run_on_the_cpu() -> None:
    explanation = explain_kvcache(*arrays(), cache_seqlens=7)
    assert explanation.selection is None
    assert explanation.kernels == ()
    assert str(explanation).splitlines() == [
        "attention over a cache float16: batch 1, seqlen 1 x up to 4096, heads 8/8, head_dim 128",
        "note    on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.kvcache",
    ]


def test_all_kernels_of_a_call_are_shown() -> None:
    new = np.zeros((1, 1, 8, 128), np.float16)
    explanation = explain_kvcache(*arrays(), cache_seqlens=7, k=new, v=new, arch="sm_90a")
    assert [type(kernel.spec) for kernel in explanation.kernels] == [AppendSpec, DecodeSpec, CombineSpec]
    assert explanation.selection is not None
    assert explanation.selection.splits == 16
    # 16 splits leave a part each: 8 rows of 128 columns and an lse, in float32.
    assert explanation.workspace_bytes == 16 * 8 * (128 + 1) * 4
    text = str(explanation)
    assert "splits  16: 8 tiles on 132 multiprocessors, at most 64 blocks of 64 keys" in text
    assert f"memory  {explanation.workspace_bytes} bytes of workspace" in text


def test_two_splits_are_a_cluster_and_need_no_memory() -> None:
    explanation = explain_kvcache(*arrays(), cache_seqlens=7, num_splits=2, arch="sm_90a")
    assert [type(kernel.spec) for kernel in explanation.kernels] == [DecodeSpec]
    assert explanation.workspace_bytes == 0
    assert "splits  2, merged by clusters of 2: num_splits 2" in str(explanation)


def test_kernels_are_compiled_where_the_compiler_is() -> None:
    import_nvrtc()
    explanation = explain_kvcache(*arrays(), cache_seqlens=7, arch="sm_90a")
    for kernel in explanation.kernels:
        assert kernel.rung in (Rung.SASS, Rung.EMULATED)
        assert kernel.ptxas is not None
        assert kernel.ptxas.spill_bytes == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sm_80"}, r"explain: arch is 'sm_80'; it must be 'sm_90a' or None"),
        ({"config": {"tile_n": 128}}, r"config has 'tile_n'; a cache has tile_m, stages, key_groups, residents"),
        ({"num_splits": 2, "split_size": 64}, "num_splits"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain_kvcache(*arrays(), cache_seqlens=7, **change)


def specs(**call: Any) -> tuple[Any, ...]:
    return specs_of_cache_call(0, {"dtype": "bfloat16", **call}, H200)


def test_warmup_takes_the_kernels_that_explain_shows() -> None:
    new = np.zeros((1, 1, 8, 128), np.float16)
    shown = explain_kvcache(*arrays(), cache_seqlens=7, k=new, v=new, arch="sm_90a")
    shapes = {"q": (1, 1, 8, 128), "k_cache": (1, 4096, 8, 128), "k": (1, 1, 8, 128)}
    assert specs(**shapes, dtype="float16") == tuple(kernel.spec for kernel in shown.kernels)


def test_warmup_of_pages_and_of_packed_queries() -> None:
    of_pages = specs(q=(2, 1, 8, 128), k_cache=(64, 16, 2, 128), page_table=(2, 32))
    assert [type(spec) for spec in of_pages] == [DecodeSpec, CombineSpec]  # 8 blocks in 4 splits
    packed = specs(q=(20, 8, 128), k_cache=(4, 1600, 2, 128), sequences=4, max_seqlen_q=9, num_splits=2, softcap=5.0)
    assert [spec.softcap for spec in packed] == [True]
    rows = specs(
        q=(3, 1, 8, 64), k_cache=(9, 64, 8, 64), cache_batch_idx=True, alibi_slopes=True, v_cache=(9, 64, 8, 32)
    )
    assert rows[0].alibi
    assert (rows[0].head_dim, rows[0].head_dim_v, rows[0].dtype) == (64, 32, DType.BFLOAT16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"q": (1, 1, 8, 128)}, r"warmup: call 0 has no k_cache; it needs the shapes q and k_cache, and a dtype"),
        ({"q": (1, 1, 8, 128), "k_cache": (1, 9, 8, 128), "colour": 1}, r"warmup: call 0: .*colour"),
    ],
)
def test_wrong_calls_of_warmup(call: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        specs(**call)


def test_they_are_public() -> None:
    assert {"explain_kvcache", "CacheExplanation"} <= set(cupyfa.__all__)
