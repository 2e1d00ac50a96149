"""Launches of a sample of shapes, to be run under compute-sanitizer: ``make gpu-sanitize``.

Instrumented kernels can hang on setmaxnreg, so the default is a spec without it; ``--setmaxnreg`` takes the shipped
specs. A hang is *not run*, never *clean*. ``--only`` takes the kernels of one kind.
"""

from __future__ import annotations

import argparse
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cupyfa
from cupyfa.testing import BACKWARD_CASES, CACHE_CASES, BackwardCase, CacheCase, random_array

# (batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim): one element, a tile and one more or less, GQA, many tiles,
# padded head_dim.
SHAPES = [
    (1, 1, 1, 1, 1, 64),
    (2, 127, 129, 2, 1, 64),
    (1, 239, 113, 4, 2, 72),
    (1, 256, 384, 2, 2, 128),
    (3, 193, 65, 2, 1, 128),
    (1, 130, 300, 2, 1, 200),
    (40, 100, 90, 8, 4, 40),
]
OPTIONS: list[dict[str, Any]] = [{}, {"causal": True}, {"window_size": (40, 9)}, {"softcap": 20.0}]
WITHOUT_SETMAXNREG = {"setmaxnreg": False, "pingpong": False, "tile_m": 64, "tile_n": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setmaxnreg", action="store_true")
    parser.add_argument("--only", choices=("forward", "caches", "gradients"))
    options = parser.parse_args()
    cupy.cuda.set_allocator(None)  # one cudaMalloc for each array: the sanitizer sees where it ends
    if options.only in (None, "forward"):
        forward(None if options.setmaxnreg else WITHOUT_SETMAXNREG)
    if options.only in (None, "caches"):
        caches(options.setmaxnreg)
    if options.only in (None, "gradients"):
        gradients()


def forward(config: dict[str, Any] | None) -> None:
    launches = 0
    for dtype in (ml_dtypes.bfloat16, np.float16):
        for batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim in SHAPES:
            # Large scores take a speculative softmax out of its range, so that both of its ways are run.
            amplitude = 50.0 if dtype is np.float16 else 1.0
            shape = (batch, seqlen_q, heads_q, head_dim)
            q: Any = cupy.asarray(random_array(shape, dtype, 1, amplitude=amplitude))
            k, v = (cupy.asarray(random_array((batch, seqlen_k, heads_kv, head_dim), dtype, seed)) for seed in (2, 3))
            of_heads = cupy.linspace(-1, 1, heads_q, dtype=np.float32)
            # Of float32 and as q, copied by TMA or gathered, as seqlen_k has it.
            biases = [
                {"causal": True, "bias": cupy.asarray(random_array(of_scores, kind, 4))}
                for of_scores in ((heads_q, seqlen_q, seqlen_k), (batch, 1, 1, seqlen_k))
                for kind in (dtype, np.float32)
            ]
            for options in (*OPTIONS, *biases, {"causal": True, "sink": of_heads, "alibi_slopes": of_heads}):
                cupyfa.attention(q, k, v, return_lse=True, config=config, **options)
                cupy.cuda.Device().synchronize()
                launches += 1
    print(f"{launches} launches with config={config}")


def caches(setmaxnreg: bool) -> None:
    """All cases of the table. A tile of 64 rows moves no registers, nor does any where the caller cuts the keys."""
    for case in CACHE_CASES:
        attend(case, None if setmaxnreg or case.splits else {"tile_m": 64})
    print(f"{len(CACHE_CASES)} calls on caches")


def attend(case: CacheCase, config: dict[str, Any] | None) -> None:
    arrays = case.make_arrays() | {name: x for name, x in case.options.items() if isinstance(x, np.ndarray)}
    on_gpu = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    cupyfa.attention_with_kvcache(**(case.options | case.splits | on_gpu), return_lse=True, config=config)
    cupy.cuda.Device().synchronize()


def gradients() -> None:
    """Every third case of the table that is small and has a kernel: instrumented, one takes a hundred times as long."""
    cases = [case for case in BACKWARD_CASES if not (case.large or (case.packed and case.forward.bias))][::3]
    for case in cases:
        differentiate(case)
    print(f"gradients of {len(cases)} calls")


def differentiate(case: BackwardCase) -> None:
    """With the shipped kernel: without setmaxnreg it has so few registers that the compiler serialises its products."""
    function = cupyfa.attention_varlen_backward if case.packed else cupyfa.attention_backward
    arrays = case.make_arrays() | case.call_options
    on_gpu = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    function(**on_gpu)
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
