"""The gradients of attention in float64, in the five matrix products of the kernels (specification 0x0A).

With logits ``L`` made of the scores ``S = scale Q K'`` and the lse of the forward pass, for the gradients dO of the
output and dlse of the lse:

    P  = exp(L - lse)                    recomputed, nothing of size seqlen_q x seqlen_k is kept
    dV = P' dO             dP = dO V'
    dL = P (dP - delta)                  delta_i = sum_j P_ij dP_ij - dlse_i = dO_i . O_i - dlse_i
    dS = dL dL/dS
    dQ = scale dS K        dK = scale dS' Q

The row softmax has the Jacobian ``dp_j / ds_k = p_j ([j = k] - p_k)``, whose rows sum to zero; so does every row of dL
without a dlse. delta needs no matrix of that size either, which is why a kernel takes ``dO . O`` and the tests compare
the two. The lse has the derivatives P, so that dlse joins delta.

Of the options, a softcap c has the derivative ``1 - tanh(S / c)^2``, slopes and masks have none, a bias gets dL, summed
over the axes along which it repeats, and a sink, which is a logit whose probability ``exp(sink - lse)`` multiplies no
value, gets ``-exp(sink - lse) delta`` of each row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .dense import (
    SCORE_BUDGET,
    attention,
    check_shapes,
    check_softcap,
    head_groups,
    key_distance,
    per_head,
    per_score,
    resolve_scale,
    row_chunks,
)
from .dense import same_precision as attention_at_same_precision
from .jacobian import delta_from_output, softmax_backward
from .mask import Window, visible, weighted_sum, window_bounds
from .violations import ContractViolation, check_shape

__all__ = [
    "Gradients",
    "attention_backward",
    "check_result",
    "dbias_shape",
    "round_gradients",
    "same_precision",
    "tiled_backward",
]

Array = npt.NDArray[np.floating]
Float64Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


class Gradients(NamedTuple):
    """What `attention_backward` returns (0x0A).

    Attributes
    ----------
    dq, dk, dv : numpy.ndarray
        Shapes of q, k, v.
    dsink : numpy.ndarray or None
        ``(heads_q,)``; None without a sink.
    dbias : numpy.ndarray or None
        `dbias_shape`; None without a bias.
    """

    dq: Array
    dk: Array
    dv: Array
    dsink: Array | None = None
    dbias: Array | None = None


def dbias_shape(bias: Array) -> tuple[int, ...]:
    """Return the shape of the gradient of a bias: one index along an axis that a view repeats (0x0A).

    Parameters
    ----------
    bias : numpy.ndarray
        Broadcast to the scores, by itself or as a view.

    Returns
    -------
    tuple of int
        As many axes as the bias has.

    Examples
    --------
    >>> dbias_shape(np.zeros((4, 1, 5))), dbias_shape(np.broadcast_to(np.zeros(5), (4, 3, 5)))
    ((4, 1, 5), (1, 1, 5))
    """
    return tuple(1 if size > 1 and not stride else size for size, stride in zip(bias.shape, bias.strides, strict=True))


def check_result(dout: Array, q: Array, v: Array, out: Array | None, lse: Array | None, dlse: Array | None) -> None:
    """Raise unless the arrays of the result have the shapes that q and v give it (0x0A).

    Parameters
    ----------
    dout, out : numpy.ndarray
        ``(batch, seqlen_q, heads_q, head_dim_v)``.
    q, v : numpy.ndarray
        As for `attention_backward`.
    lse, dlse : numpy.ndarray or None
        ``(batch, heads_q, seqlen_q)``.

    Raises
    ------
    ValueError
        Naming the array and the shape that it must have.
    """
    of_rows = (q.shape[0], q.shape[2], q.shape[1])
    of_out = (*q.shape[:3], v.shape[3])
    arrays = (("dout", dout, of_out), ("out", out, of_out), ("lse", lse, of_rows), ("dlse", dlse, of_rows))
    for name, array, shape in arrays:
        if array is not None and array.shape != shape:
            raise ContractViolation(f"attention_backward: {name} has shape {array.shape}; it must be {shape}")
    if (out is None) != (lse is None):
        raise ContractViolation("attention_backward: out and lse belong together; pass both, or neither")


def round_gradients(wide: Gradients, q: Array, k: Array, v: Array, bias: Array | None) -> Gradients:
    """Round gradients to the types of what they belong to (0x0A).

    Parameters
    ----------
    wide : Gradients
        As they were accumulated.
    q, k, v, bias : numpy.ndarray
        For their types.

    Returns
    -------
    Gradients
        dsink is float32.

    Examples
    --------
    >>> x = np.ones(2, np.float16)
    >>> round_gradients(Gradients(*[np.float64([2049, 1])] * 3), x, x, x, None).dq.tolist()
    [2048.0, 1.0]
    """
    with np.errstate(over="ignore", invalid="ignore"):
        dsink = None if wide.dsink is None else wide.dsink.astype(np.float32)
        dbias = None if wide.dbias is None or bias is None else wide.dbias.astype(bias.dtype)
        dq, dk, dv = (x.astype(like.dtype) for x, like in ((wide.dq, q), (wide.dk, k), (wide.dv, v)))
    return Gradients(dq, dk, dv, dsink, dbias)


def _add_by_head(total: Array, b: Index, h: Index, part: Array) -> None:
    """Add ``(pairs, rows, columns)`` to ``total[b, h]`` one by one; several pairs may have one place there."""
    for place, of_pair in zip(zip(b, h, strict=True), part, strict=True):
        total[place] += of_pair


class _BiasGradient:
    """The sum of dL over the axes along which a bias repeats."""

    def __init__(self, bias: Array, dtype: type) -> None:
        self.total: Array = np.zeros(dbias_shape(bias), dtype)
        axes = self.total[(None,) * (4 - bias.ndim)]
        self._axes, self._own = axes, [size != 1 for size in axes.shape]

    def add(self, b: Index, h: Index, rows: slice, dL: Array) -> None:
        of_batch, of_head, of_row, of_key = self._own
        dL = dL if of_row else dL.sum(axis=1, keepdims=True)
        dL = dL if of_key else dL.sum(axis=2, keepdims=True)
        places = self._axes[:, :, rows if of_row else slice(1)]
        _add_by_head(places, b if of_batch else 0 * b, h if of_head else 0 * h, dL)


def _gradients(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    scale: float,
    window: Window,
    softcap: float | None,
    sink: Array | None,
    alibi_slopes: Array | None,
    bias: Array | None,
    *,
    dtype: type,
    operand: npt.DTypeLike | None,
) -> Gradients:
    """Compute in `dtype`, and round P and dS to `operand` where they enter a product."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, group = k.shape[1], heads_q // max(1, k.shape[2])
    slopes = per_head("alibi_slopes", alibi_slopes, batch, heads_q, dtype, of_batch=True)
    sinks = per_head("sink", sink, batch, heads_q, dtype)
    biases = per_score(bias, (batch, heads_q, seqlen_q, seqlen_k))
    totals: list[Array] = [np.zeros(x.shape, dtype) for x in (q, k, v)]
    dq, dk, dv = totals
    dsink: Array | None = None if sinks is None else np.zeros(heads_q, dtype)
    dbias = None if bias is None else _BiasGradient(bias, dtype)
    factor, one = dtype(scale), dtype(1)

    def rounded(x: Array) -> Array:
        return x if operand is None else x.astype(operand).astype(dtype)

    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for b, h, Q, K, V in head_groups(q, k, v, dtype, SCORE_BUDGET):
            for rows in row_chunks(seqlen_q, len(b) * max(1, seqlen_k)):
                dO: Array = dout[b, rows, h].astype(dtype)
                delta = delta_from_output(dO, out[b, rows, h].astype(dtype))
                if dlse is not None:
                    delta = delta - dlse[b, h, rows].astype(dtype)
                # A row that sees no key: exp(L - inf) is 0 for every L, where exp(-inf + inf) is NaN.
                reference: Array = lse[b, h, rows].astype(dtype)
                reference = np.where(np.isneginf(reference), dtype(np.inf), reference)
                if sinks is not None and dsink is not None:
                    np.subtract.at(dsink, h, (np.exp(sinks[b, h][:, None] - reference) * delta).sum(axis=1))
                if not seqlen_k:
                    continue
                seen = visible(seqlen_q, seqlen_k, False, rows, window) if window != (None, None) else None
                L = np.matmul(Q[:, rows], K.swapaxes(1, 2)) * factor
                if softcap is not None:
                    tanh = np.tanh(L / dtype(softcap))
                    L = dtype(softcap) * tanh
                if slopes is not None:
                    L -= slopes[b, h][:, None, None] * key_distance(seqlen_q, seqlen_k, rows).astype(dtype)
                if biases is not None:
                    L += biases[b, h, rows].astype(dtype)
                P = np.exp(L - reference[..., None])
                if seen is not None:
                    P = np.where(seen, P, dtype(0))
                dL = softmax_backward(P, np.matmul(dO, V.swapaxes(1, 2)), delta)
                if dbias is not None:
                    dbias.add(b, h, rows, dL)
                # Where P is 0 the score may be anything, NaN included.
                dS = dL if softcap is None else np.where(dL == 0, dtype(0), dL * (one - tanh * tanh))
                P, dS = rounded(P), rounded(dS)
                seen_by = None if seen is None else seen.T
                dq[b, rows, h] = factor * weighted_sum(dS, K, seen)
                keys_of_head = h // group
                _add_by_head(dv.swapaxes(1, 2), b, keys_of_head, weighted_sum(P.swapaxes(1, 2), dO, seen_by))
                _add_by_head(dk.swapaxes(1, 2), b, keys_of_head, weighted_sum(dS.swapaxes(1, 2), Q[:, rows], seen_by))
    return Gradients(dq, factor * dk, dv, dsink, None if dbias is None else dbias.total)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    lse: Array | None = None,
    *,
    dlse: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
) -> Gradients:
    """Compute the gradients of attention in float64, the reference of every backward test, and the CPU backend.

    Parameters
    ----------
    dout : numpy.ndarray
        Gradient of the output, shape ``(batch, seqlen_q, heads_q, head_dim_v)``.
    q : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim)``, any float type; widened, never rounded.
    k : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim)``.
    v : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim_v)``.
    out, lse : numpy.ndarray, optional
        Of the forward pass with the same options; ``lse`` is ``(batch, heads_q, seqlen_q)``. Without them they are
        computed in float64.
    dlse : numpy.ndarray, optional
        Gradient of the lse, 0 by default.
    softmax_scale : float, optional
        Factor on the scores, ``1 / sqrt(head_dim)`` by default.
    causal : bool, optional
        Bottom-right aligned causal mask.
    window_size, softcap, sink, alibi_slopes, bias : optional
        As for `cupyfa.oracles.dense.attention`.

    Returns
    -------
    Gradients
        float64. A key/value head gets the sum over the query heads that share it. Rows that see no key, and keys that
        no row sees, have gradient 0.

    Raises
    ------
    ValueError
        If the shapes do not fit each other, or an option is none.

    Notes
    -----
    Keys behind the mask contribute nothing, NaN and infinite ones included; likewise a row contributes nothing to keys
    that it does not see. Specification 0x0A; arXiv 2603.05451, section 3.2.

    Probabilities are relative to the lse, so a row is as exact as its lse is: in rows whose logits are all so large
    that lse and logits are one number, a bias of -3e38 for one, each key counts as if it were alone.

    Examples
    --------
    >>> x = np.ones((1, 3, 1, 4))
    >>> dq, dk, dv, *_ = attention_backward(x, x, x, x)
    >>> float(np.abs(dq).max()), dv[0, :, 0, 0].round(12).tolist()
    (0.0, [1.0, 1.0, 1.0])
    """
    check_shapes(q, k, v)
    check_softcap(softcap)
    check_result(dout, q, v, out, lse, dlse)
    scale, window = resolve_scale(softmax_scale, q.shape[3]), window_bounds(causal, window_size)
    options: dict[str, Any] = {"softcap": softcap, "sink": sink, "alibi_slopes": alibi_slopes, "bias": bias}
    if out is None or lse is None:
        out, lse = attention(q, k, v, softmax_scale=scale, window_size=window, **options)
    return _gradients(dout, q, k, v, out, lse, dlse, scale, window, **options, dtype=np.float64, operand=None)


def same_precision(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    lse: Array | None = None,
    *,
    dlse: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
) -> Gradients:
    """Compute the plain gradients at the kernel's precision: the yardstick of unavoidable error (0x0A).

    The inputs are as they are, out among them; scores, P, dP, delta and dL are float32. P and dS are rounded to the
    input type as operands of their products and nowhere else, products accumulate in float32, and each gradient is
    rounded once. There are no tiles, so the error is that of the number formats and not that of a schedule.

    Parameters
    ----------
    dout, q, k, v : numpy.ndarray
        As for `attention_backward`; float16 or bfloat16 (float32 works and rounds nothing on the way).
    out, lse : numpy.ndarray, optional
        As for `attention_backward`; by default those of `cupyfa.oracles.dense.same_precision`.
    dlse, softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias : optional
        As for `attention_backward`.

    Returns
    -------
    Gradients
        Types of q, k and v; dsink is float32, and dbias has the type of the bias.

    Raises
    ------
    ValueError
        If the shapes do not fit each other, or an option is none.

    Examples
    --------
    >>> x = np.ones((1, 3, 1, 8), dtype=np.float16)
    >>> dq, dk, dv, *_ = same_precision(x, x, x, x)
    >>> dv.dtype, dv[0, :, 0, 0].tolist()
    (dtype('float16'), [1.0, 1.0, 1.0])
    """
    check_shapes(q, k, v)
    check_softcap(softcap)
    check_result(dout, q, v, out, lse, dlse)
    scale, window = resolve_scale(softmax_scale, q.shape[3]), window_bounds(causal, window_size)
    options: dict[str, Any] = {"softcap": softcap, "sink": sink, "alibi_slopes": alibi_slopes, "bias": bias}
    if out is None or lse is None:
        out, lse = attention_at_same_precision(q, k, v, softmax_scale=scale, window_size=window, **options)
    wide = _gradients(dout, q, k, v, out, lse, dlse, scale, window, **options, dtype=np.float32, operand=q.dtype)
    return round_gradients(wide, q, k, v, bias)


def tiled_backward(
    Q: Float64Array,
    K: Float64Array,
    V: Float64Array,
    dO: Float64Array,
    *,
    scale: float,
    tile_m: int,
    tile_n: int,
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Compute the gradients of one head tile by tile: the five products with their accumulation order (0x0A).

    Parameters
    ----------
    Q, dO : numpy.ndarray
        ``(seqlen_q, head_dim)`` and ``(seqlen_q, head_dim_v)``.
    K, V : numpy.ndarray
        ``(seqlen_k, head_dim)`` and ``(seqlen_k, head_dim_v)``.
    scale : float
        Factor on the scores.
    tile_m, tile_n : int
        Query rows and keys of a tile. For each key tile (outer loop) dK and dV stay on chip; dQ gets one addition per
        key tile.

    Returns
    -------
    dQ, dK, dV : numpy.ndarray
        float64, shapes of Q, K, V.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V, dO = (rng.standard_normal((8, 4)) for _ in range(4))
    >>> small = tiled_backward(Q, K, V, dO, scale=0.5, tile_m=2, tile_n=3)
    >>> whole = tiled_backward(Q, K, V, dO, scale=0.5, tile_m=8, tile_n=8)
    >>> max(float(np.abs(x - y).max()) for x, y in zip(small, whole)) < 1e-14
    True
    """
    if tile_m < 1 or tile_n < 1:
        raise ValueError(f"tiled_backward: tiles of {tile_m} x {tile_n}; both must be at least 1")
    check_shape("tiled_backward", ("rows", "dims"), Q=Q, K=K, V=V, dO=dO)
    check_shape("tiled_backward", (len(Q), V.shape[1]), dO=dO)
    out, lse = (x[0] for x in attention(*(x[None, :, None, :] for x in (Q, K, V)), softmax_scale=scale))
    delta, lse = delta_from_output(dO, out[:, 0]), lse[0]
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for n in range(0, len(K), tile_n):
        keys = slice(n, n + tile_n)
        for m in range(0, len(Q), tile_m):
            rows = slice(m, m + tile_m)
            S = scale * Q[rows] @ K[keys].T
            P = np.exp(S - lse[rows, None])
            dP = dO[rows] @ V[keys].T
            dS = softmax_backward(P, dP, delta[rows])
            dV[keys] += P.T @ dO[rows]
            dK[keys] += scale * dS.T @ Q[rows]
            dQ[rows] += scale * dS @ K[keys]
    return dQ, dK, dV
