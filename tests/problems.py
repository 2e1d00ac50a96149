"""Attention problems without arrays: geometry as if it were on GPU 0."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupyfa.operand import Arrays, Layout, Operand
from cupyfa.options import check_options
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
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    sink: bool | Operand = False,
    alibi: bool | Operand = False,
    bias: tuple[int, ...] | Operand | None = None,
    bias_dtype: Any = np.float32,
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

    def of_heads(name: str, given: bool | Operand) -> Operand | None:
        if given is True:
            return Operand.contiguous(name, (heads_q,), np.float32, 0)
        return given or None

    if isinstance(bias, tuple):
        bias = Operand.contiguous("bias", bias, bias_dtype, 0)
    operands = Arrays(
        operand("q", seqlen_q, heads_q),
        operand("k", seqlen_k, heads_kv),
        operand("v", seqlen_k, heads_kv, head_dim_v or head_dim),
        lse=lse,
        sink=of_heads("sink", sink),
        alibi_slopes=of_heads("alibi_slopes", alibi),
        bias=bias,
    )
    options = check_options(scale, causal, window_size, softcap, layout)
    return Problem.from_operands(operands, options, want_lse=want_lse, current_device=0)
