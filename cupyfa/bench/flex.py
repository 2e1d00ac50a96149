"""torch's compiled flex_attention: the peer that takes windows, a softcap, slopes and a bias.

The block mask is made outside of the timing, and so is the compilation: the check of the result is the first call.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

from cupyfa.bench.harness import Contestant
from cupyfa.bench.peers import Peer
from cupyfa.bench.problems import Cell, Inputs
from cupyfa.bench.torch_arrays import from_torch, tensors, to_torch

__all__ = ["FLEX", "mask_mod", "score_mod"]

Modifier = Callable[..., Any]


def mask_mod(cell: Cell) -> Modifier | None:
    """Return the mask of a problem as a function of indices.

    Parameters
    ----------
    cell : Cell
        The problem.

    Returns
    -------
    callable or None
        Takes batch, head, query and key; None where every query sees every key.
    """
    left, right = cell.bounds
    if left is None and right is None:
        return None

    def mask(b: Any, h: Any, row: Any, key: Any) -> Any:
        # The sides are constants of the closure: the compiler drops the one that is None.
        if left is None:
            return key <= row + right
        if right is None:
            return key >= row - left
        return (key >= row - left) & (key <= row + right)

    return mask


def score_mod(cell: Cell, tanh: Callable[[Any], Any], slopes: Any, bias: Any) -> Modifier | None:
    """Return what a problem does to its scaled scores.

    Parameters
    ----------
    cell : Cell
        The problem.
    tanh : callable
        The hyperbolic tangent.
    slopes : array or None
        (heads,), float32.
    bias : array or None
        (batch, heads, seqlen, seqlen), with 1 for an axis along which it is the same.

    Returns
    -------
    callable or None
        Takes score, batch, head, query and key; None where scores stay as they are.
    """
    cap = cell.softcap
    if cap is None and slopes is None and bias is None:
        return None
    has_b, has_h, has_q, has_k = (axis in cell.bias for axis in "bhqk")

    def modify(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        if cap is not None:
            score = cap * tanh(score / cap)
        if slopes is not None:
            score = score - slopes[h] * abs(row - key)
        if bias is not None:
            score = score + bias[b if has_b else 0, h if has_h else 0, row if has_q else 0, key if has_k else 0]
        return score

    return modify


def _prepare(inputs: Inputs) -> Contestant:
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    cell = inputs.cell
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(inputs))
    mask = mask_mod(cell)
    blocks = None
    if mask is not None:
        lengths = {"Q_LEN": cell.seqlen, "KV_LEN": cell.seqlen}
        blocks = flex.create_block_mask(mask, B=None, H=None, **lengths, device=q.device)
    slopes = None if inputs.alibi_slopes is None else to_torch(inputs.alibi_slopes)
    bias = None if inputs.bias is None else to_torch(inputs.bias)
    modify, grouped = score_mod(cell, torch.tanh, slopes, bias), cell.heads_kv is not None

    def attention(q: Any, k: Any, v: Any) -> Any:
        return flex.flex_attention(q, k, v, score_mod=modify, block_mask=blocks, enable_gqa=grouped)

    # torch caches by code object, and compiles only so many variants of one: each problem gets a copy of its own. With
    # fullgraph what cannot be compiled is an error, and no slow computation that keeps all scores in memory.
    own = types.FunctionType(
        attention.__code__.replace(), attention.__globals__, "attention", None, attention.__closure__
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=False)
    return Contestant(
        "flex", call=lambda: compiled(q, k, v), convert=lambda out: from_torch(out.transpose(1, 2), inputs.q.dtype)
    )


#: As the others are in :data:`cupyfa.bench.peers.PEERS`.
FLEX = Peer(
    "flex",
    "torch flex_attention, compiled",
    ("torch.nn.attention.flex_attention", "torch"),
    ("torch",),
    _prepare,
    takes=frozenset({"window", "softcap", "alibi", "bias"}),
)
