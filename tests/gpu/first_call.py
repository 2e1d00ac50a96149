"""A process of its own: how long the first call takes, imports and context creation excluded. Prints JSON."""

from __future__ import annotations

import json
import time

import cupy
import ml_dtypes

import cupyfa

q = cupy.zeros((1, 300, 4, 128), ml_dtypes.bfloat16)
k = cupy.zeros((1, 500, 2, 128), ml_dtypes.bfloat16)
cupy.cuda.get_current_stream().synchronize()

begin = time.perf_counter()
out = cupyfa.attention(q, k, k, causal=True)
cupy.cuda.get_current_stream().synchronize()
seconds = time.perf_counter() - begin

explanation = cupyfa.explain(q, k, k, causal=True)
assert explanation.rung is not None
print(
    json.dumps(
        {
            "seconds": seconds,
            "rung": explanation.rung.name,
            "registers": explanation.ptxas and explanation.ptxas.registers,
            "sum": float(abs(out.get().astype("f4")).sum()),
        }
    )
)
