"""Attention problems without arrays: geometry as if it were on GPU 0."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupyfa.operand import Layout, Operand
from cupyfa.problem import Problem


def make_problem(
    *,
    batch: int = 2,
    seqlen_q: int = 300,
    seqlen_k: int = 500,
    heads_q: int = 6,
    heads_kv: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: Any = np.float16,
    causal: bool = False,
    scale: float | None = None,
    layout: Layout = "BSHD",
    padding: int = 0,
    lse: Operand | None = None,
    want_lse: bool = True,
) -> Problem:
    """A problem with contiguous arrays, or with `padding` unused elements behind each head."""

    def operand(name: str, seqlen: int, heads: int, columns: int = head_dim) -> Operand:
        middle = (seqlen, heads) if layout == "BSHD" else (heads, seqlen)
        padded = Operand.contiguous(name, (batch, *middle, columns + padding), dtype, 0)
        return dataclasses.replace(padded, shape=(batch, *middle, columns))

    return Problem.from_operands(
        operand("q", seqlen_q, heads_q),
        operand("k", seqlen_k, heads_kv),
        operand("v", seqlen_k, heads_kv, head_dim_v or head_dim),
        None,
        lse,
        softmax_scale=scale,
        causal=causal,
        layout=layout,
        want_lse=want_lse,
        current_device=0,
    )
