"""The gradients tile by tile, as the kernel computes them: twin of the backward mainloop (specification 0x0A).

A key tile visits its query tiles from the first to the last and keeps ``dK`` and ``dV`` in float32; to ``dQ`` it adds
one product per query tile. So several key tiles, the writers, add to the same rows of dQ, and the order in which they
do decides about the last bits: a deterministic kernel declares one, which is ``writer_order`` here. Query heads that
share a key/value head visit it one after another.

The logits in base 2 are ``fma(S, scale_log2, -lse_log2)``, and with the options what the forward pass makes of them
(`cupyfa.oracles.score_mod`). P and dS are rounded to the input type as operands of their products; dS is made of the
unrounded P. The scale is applied to dQ and dK once, at the end, before they are rounded.

What still differs from the kernel is what differs in `cupyfa.oracles.online`: the order of additions inside a product,
approximate exponentials, subnormal numbers, and values of keys that a row does not see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .backward import Gradients, check_result, dbias_shape, round_gradients
from .dense import check_shapes, check_softcap, per_head, per_score, resolve_scale
from .jacobian import delta_from_output, softmax_backward
from .mask import TileMask, Window, weighted_sum, window_bounds
from .online import round_to
from .query_blocks import query_range
from .score_mod import ScoreMod, fma
from .violations import ContractViolation, check_range

__all__ = ["attention_backward", "preprocess"]

Array = npt.NDArray[np.floating]
Float32Array = npt.NDArray[np.float32]

_LOG2_E = np.float32(math.log2(math.e))


def preprocess(
    dout: Array, out: Array, lse: Array, dlse: Array | None = None, *, shift: float = 0.0, natural: bool = False
) -> tuple[Float32Array, Float32Array]:
    """Compute what a row needs in every tile: its delta, and its lse in the base of the exponentials (0x0A).

    Parameters
    ----------
    dout, out : numpy.ndarray
        ``(batch, seqlen_q, heads_q, head_dim_v)``.
    lse, dlse : numpy.ndarray
        ``(batch, heads_q, seqlen_q)``, natural.
    shift : float, optional
        By how much the logits are too small, see `cupyfa.oracles.score_mod.ScoreMod.shift`.
    natural : bool, optional
        Whether exponents are made of natural logits, as with a bias.

    Returns
    -------
    delta, reference : numpy.ndarray
        float32, ``(batch, heads_q, seqlen_q)``: ``dO . O - dlse``, and the lse, in base 2 unless it is natural. A row
        that sees no key has the reference +inf, so that all its probabilities are 0.

    Examples
    --------
    >>> x, lse = np.ones((1, 2, 1, 4), np.float32), np.float32([[[0.0, -np.inf]]])
    >>> preprocess(x, x, lse)
    (array([[[4., 4.]]], dtype=float32), array([[[ 0., inf]]], dtype=float32))
    """
    delta = delta_from_output(dout.astype(np.float32), out.astype(np.float32)).swapaxes(1, 2)
    if dlse is not None:
        delta = delta - dlse.astype(np.float32)
    shifted = lse.astype(np.float32) - np.float32(shift)
    reference = shifted if natural else shifted * _LOG2_E
    return delta, np.where(np.isneginf(reference), np.float32(np.inf), reference)


def _sink_gradient(sink: Array, lse: Array, delta: Float32Array) -> Float32Array:
    """Return what a sink gets of all rows of its head: it is a logit whose probability multiplies no value."""
    reference = np.where(np.isneginf(lse), np.float32(np.inf), lse.astype(np.float32))
    P = np.exp2((sink.astype(np.float32)[:, None] - reference) * _LOG2_E)
    result: Float32Array = -(P * delta).sum(axis=(0, 2))
    return result


@dataclass(frozen=True)
class _QueryHeads:
    """One query head of each key/value head, over all batches; matrices are (batch * heads_kv, seqlen, head_dim)."""

    Q: Float32Array
    dO: Float32Array
    delta: Float32Array
    reference: Float32Array
    score_mod: ScoreMod
    dQ: Float32Array
    dbias: Float32Array | None  # (batch, heads_kv, seqlen_q, seqlen_k), with one index along axes that the bias repeats

    def scores(self, rows: slice, K: Float32Array) -> Float32Array:
        """Return the raw scores of a tile; a negative scale has its sign in Q."""
        Q = -self.Q[:, rows] if self.score_mod.scale < 0 else self.Q[:, rows]
        scores: Float32Array = Q @ K.swapaxes(1, 2)
        return scores

    def probabilities(self, logits: Float32Array, rows: slice) -> Float32Array:
        """Return P of what the softmax of the forward pass would get."""
        scale, reference = self.score_mod.scale_of_softmax, self.reference[:, rows, None]
        exponent = (logits - reference) * _LOG2_E if scale is None else fma(scale, logits, -reference)
        result: Float32Array = np.exp2(exponent)
        return result

    def add_dbias(self, dS: Float32Array, pairs: tuple[int, int], rows: slice, keys: slice) -> None:
        """Add the gradients of the logits of a tile, summed along the axes that the bias repeats."""
        if self.dbias is None:
            return
        repeats = [size == 1 for size in self.dbias.shape]
        part = dS.reshape(*pairs, *dS.shape[1:]).sum(axis=tuple(np.flatnonzero(repeats)), keepdims=True)
        self.dbias[:, :, slice(1) if repeats[2] else rows, slice(1) if repeats[3] else keys] += part


@dataclass(frozen=True)
class _KeyTile:
    """A key tile of all key/value heads, with what it accumulates."""

    n: int
    keys: slice
    K: Float32Array
    V: Float32Array
    dK: Float32Array
    dV: Float32Array

    def visit(
        self, heads: _QueryHeads, mask: TileMask, whole: bool, pairs: tuple[int, int], dtype: npt.DTypeLike
    ) -> None:
        """Add what a query tile gives to this tile, and what this tile gives to it."""
        rows, K, V = slice(mask.row_begin, mask.row_end), self.K, self.V
        seen = None if whole else mask.block(self.n)
        S = heads.score_mod.cap(heads.scores(rows, K))
        P = heads.probabilities(heads.score_mod.apply(S, mask, self.n), rows)
        if seen is not None:
            P = np.where(seen, P, np.float32(0))
        dP = heads.dO[:, rows] @ V.swapaxes(1, 2)
        dS = softmax_backward(P, dP, heads.delta[:, rows])
        heads.add_dbias(dS, pairs, rows, self.keys)
        if heads.score_mod.softcap is not None:
            dS = np.where(dS == 0, np.float32(0), dS * heads.score_mod.derivative(S))
        P, dS = round_to(P, dtype), round_to(dS, dtype)
        seen_by = None if seen is None else seen.T
        self.dV[...] += weighted_sum(P.swapaxes(1, 2), heads.dO[:, rows], seen_by)
        heads.dQ[:, rows] += weighted_sum(dS, K, seen)
        self.dK[...] += weighted_sum(dS.swapaxes(1, 2), heads.Q[:, rows], seen_by)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    tile_m: int = 64,
    tile_n: int = 128,
    writer_order: Sequence[int] | None = None,
) -> Gradients:
    """Compute the gradients as the kernel does, tile by tile (0x0A).

    Parameters
    ----------
    dout : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim_v)``, type of `q`.
    q : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim)``; float16, bfloat16 or float32.
    k, v : numpy.ndarray
        Shapes ``(batch, seqlen_k, heads_kv, head_dim)`` and ``(batch, seqlen_k, heads_kv, head_dim_v)``, type of `q`.
    out, lse : numpy.ndarray
        Of the forward pass with the same options.
    dlse : numpy.ndarray, optional
        Gradient of the lse, 0 by default.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias : optional
        As for `cupyfa.oracles.dense.attention`.
    tile_m, tile_n : int, optional
        Query rows and keys of a tile. They change rounding, never meaning.
    writer_order : sequence of int, optional
        The key tiles in the order in which they add to dQ; rising by default, which is the declared order of a
        deterministic kernel.

    Returns
    -------
    Gradients
        Types of q, k and v; dsink is float32, and dbias has the type of the bias.

    Raises
    ------
    ValueError
        If the shapes do not fit each other, an option is none, or the order does not name each key tile once.

    Examples
    --------
    >>> from cupyfa.oracles import online
    >>> x = np.ones((1, 300, 1, 16), dtype=np.float16)
    >>> out, lse = online.attention(x, x, x)
    >>> dq, dk, dv, *_ = attention_backward(x, x, x, x, out, lse)
    >>> float(np.abs(dq).max()), float(dv.min()), float(dv.max())
    (0.0, 1.0, 1.0)
    """
    check_shapes(q, k, v)
    check_softcap(softcap)
    check_result(dout, q, v, out, lse, dlse)
    check_range("attention_backward", 1, tile_m=tile_m, tile_n=tile_n)
    window, scale = window_bounds(causal, window_size), resolve_scale(softmax_scale, q.shape[3])
    (batch, seqlen_q, heads_q, _), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    group = heads_q // max(1, heads_kv)
    order = _order(writer_order, -(-seqlen_k // tile_n))
    slopes = per_head("alibi_slopes", alibi_slopes, batch, heads_q, np.float32, of_batch=True)
    biases = per_score(bias, (batch, heads_q, seqlen_q, seqlen_k))
    dbias = None if bias is None else np.zeros(dbias_shape(bias), np.float32)

    def of_heads(x: Array, place: int) -> Array:
        """Return ``(batch * heads_kv, ...)`` of ``(batch, heads_q, ...)``, for one place in the groups."""
        return x[:, place::group].reshape(batch * heads_kv, *x.shape[2:])

    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        shift = 0.0 if softcap is None else softcap
        delta, reference = preprocess(dout, out, lse, dlse, shift=shift, natural=bias is not None)
        Q, dO, K, V = (x.astype(np.float32).swapaxes(1, 2) for x in (q, dout, k, v))
        K, V = (x.reshape(batch * heads_kv, *x.shape[2:]) for x in (K, V))
        dK, dV = np.zeros(K.shape, np.float32), np.zeros(V.shape, np.float32)
        members = [
            _QueryHeads(
                Q=of_heads(Q, place),
                dO=of_heads(dO, place),
                delta=of_heads(delta, place),
                reference=of_heads(reference, place),
                score_mod=ScoreMod(
                    scale,
                    softcap,
                    None if slopes is None else of_heads(slopes, place)[:, None, None],
                    None if biases is None else of_heads(biases, place),
                ),
                dQ=np.zeros((batch * heads_kv, *Q.shape[2:]), np.float32),
                dbias=None if dbias is None else _of_members(dbias[(None,) * (4 - dbias.ndim)], place, group),
            )
            for place in range(group)
        ]
        starts = range(0, seqlen_q, tile_m)
        masks = [TileMask(m, min(m + tile_m, seqlen_q), seqlen_q, seqlen_k, tile_n, False, window) for m in starts]
        for n in order:
            keys = slice(n * tile_n, min((n + 1) * tile_n, seqlen_k))
            tile = _KeyTile(n, keys, *(x[:, keys] for x in (K, V, dK, dV)))
            visited = query_range(keys.start, keys.stop, seqlen_q, seqlen_k, tile_m, False, window)
            for heads in members:
                for m in range(visited.first, visited.end):
                    tile.visit(heads, masks[m], visited.low <= m < visited.full, (batch, heads_kv), q.dtype)
        factor, dq = np.float32(scale), np.zeros(q.shape, np.float32)
        for place, heads in enumerate(members):
            dq[:, :, place::group] = (factor * heads.dQ).reshape(batch, heads_kv, *Q.shape[2:]).swapaxes(1, 2)
        dk, dv = (x.reshape(batch, heads_kv, *x.shape[1:]).swapaxes(1, 2) for x in (factor * dK, dV))
        dsink = None if sink is None else _sink_gradient(sink, lse, delta)
        return round_gradients(Gradients(dq, dk, dv, dsink, dbias), q, k, v, bias)


def _order(writer_order: Sequence[int] | None, tiles: int) -> Sequence[int]:
    """Return the key tiles in the order in which they add; raise unless each is there once."""
    if writer_order is None:
        return range(tiles)
    if sorted(writer_order) != [*range(tiles)]:
        raise ContractViolation(
            f"attention_backward: writer_order is {[*writer_order]}; it must have each of the {tiles} key tiles once"
        )
    return writer_order


def _of_members(dbias: Float32Array, place: int, group: int) -> Float32Array:
    """Return the gradients of the bias of one query head of each group; those of all, if it has one for all heads."""
    return dbias if dbias.shape[1] == 1 else dbias[:, place::group]
