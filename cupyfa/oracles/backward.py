"""The gradients of attention in float64, in the five matrix products of the kernels (specification 0x0A).

With ``S = scale Q K'`` and the lse of the forward pass, for the gradient dO of the output:

    P  = exp(S - lse)                    recomputed, nothing of size seqlen_q x seqlen_k is kept
    dV = P' dO             dP = dO V'
    dS = P (dP - delta)                  delta_i = sum_j P_ij dP_ij = dO_i . O_i
    dQ = scale dS K        dK = scale dS' Q

The row softmax has the Jacobian ``dp_j / ds_k = p_j ([j = k] - p_k)``, whose rows sum to zero; so does every row of dS.
delta needs no matrix of that size either, which is why a kernel takes ``dO . O`` and the tests compare the two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .dense import SCORE_BUDGET, attention, check_shapes, head_groups, resolve_scale, row_chunks
from .mask import visible, weighted_sum
from .violations import ContractViolation, check_shape

__all__ = ["attention_backward", "delta_from_output", "delta_from_probabilities", "softmax_backward", "tiled_backward"]

Array = npt.NDArray[np.floating]
Float64Array = npt.NDArray[np.float64]


def _check_rows(where: str, **arrays: Array) -> None:
    """Raise unless the arrays have one shape, rows of something: a row must not be taken for all rows."""
    first = next(iter(arrays.values())).shape
    if not first or any(x.shape != first for x in arrays.values()):
        shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        raise ContractViolation(f"{where}: {shapes} do not fit each other; they must be equal and have rows")


def delta_from_probabilities(P: Array, dP: Array) -> Array:
    """Return the row scalar as its definition says, ``delta_i = sum_j P_ij dP_ij`` (0x0A).

    Parameters
    ----------
    P, dP : numpy.ndarray
        ``(..., rows, keys)``.

    Returns
    -------
    numpy.ndarray
        ``(..., rows)``.

    Examples
    --------
    >>> delta_from_probabilities(np.array([[0.25, 0.75]]), np.array([[4.0, 8.0]]))
    array([7.])
    """
    _check_rows("delta_from_probabilities", P=P, dP=dP)
    delta: Array = (P * dP).sum(axis=-1)
    return delta


def delta_from_output(dO: Array, O: Array) -> Array:
    """Return the row scalar as kernels compute it, ``delta_i = dO_i . O_i`` (0x0A).

    Parameters
    ----------
    dO, O : numpy.ndarray
        ``(..., rows, head_dim_v)``.

    Returns
    -------
    numpy.ndarray
        ``(..., rows)``; equal to `delta_from_probabilities` because ``O = P V`` and ``dP = dO V'``.

    Examples
    --------
    >>> delta_from_output(np.array([[1.0, 2.0]]), np.array([[3.0, 2.0]]))
    array([7.])
    """
    _check_rows("delta_from_output", dO=dO, O=O)
    delta: Array = (dO * O).sum(axis=-1)
    return delta


def softmax_backward(P: Array, dP: Array, delta: Array) -> Array:
    """Return ``dS = P (dP - delta)``, the row Jacobian of the softmax applied to dP (0x0A).

    Parameters
    ----------
    P, dP : numpy.ndarray
        ``(..., rows, keys)``; P is 0 for unseen keys, where dS is 0 whatever dP holds.
    delta : numpy.ndarray
        ``(..., rows)``.

    Returns
    -------
    numpy.ndarray
        ``(..., rows, keys)``. Rows sum to zero as far as delta is that of P and dP.

    Examples
    --------
    >>> P, dP = np.array([[0.25, 0.75, 0.0]]), np.array([[4.0, 8.0, np.nan]])
    >>> softmax_backward(P, dP, np.array([7.0]))
    array([[-0.75,  0.75,  0.  ]])
    """
    if not P.ndim or P.shape != dP.shape or delta.shape != P.shape[:-1]:
        raise ValueError(f"softmax_backward: P {P.shape}, dP {dP.shape}, delta {delta.shape} do not fit each other")
    with np.errstate(invalid="ignore"):
        return np.where(P == 0, P.dtype.type(0), P * (dP - delta[..., None]))


def _add_heads(total: Float64Array, b: npt.NDArray[np.intp], h_kv: npt.NDArray[np.intp], part: Array) -> None:
    """Add ``(pairs, seqlen_k, dims)`` to the key/value heads; several query heads may share one."""
    np.add.at(total.swapaxes(1, 2), (b, h_kv), part)


def attention_backward(
    q: Array, k: Array, v: Array, dout: Array, *, softmax_scale: float | None = None, causal: bool = False
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Compute the gradients of attention in float64, the reference of every backward test.

    Parameters
    ----------
    q : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim)``, any float type; widened, never rounded.
    k : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim)``.
    v : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim_v)``.
    dout : numpy.ndarray
        Gradient of the output, shape ``(batch, seqlen_q, heads_q, head_dim_v)``.
    softmax_scale : float, optional
        Factor on the scores, ``1 / sqrt(head_dim)`` by default.
    causal : bool, optional
        Bottom-right aligned causal mask.

    Returns
    -------
    dq, dk, dv : numpy.ndarray
        float64, shapes of q, k, v. A key/value head gets the sum over the query heads that share it. Rows that see no
        key, and keys that no row sees, have gradient 0.

    Raises
    ------
    ValueError
        If the shapes do not fit each other.

    Notes
    -----
    Keys behind the mask contribute nothing, NaN and infinite ones included; likewise a row contributes nothing to keys
    that it does not see. Specification 0x0A; arXiv 2603.05451, section 3.2.

    Examples
    --------
    >>> x = np.ones((1, 3, 1, 4))
    >>> dq, dk, dv = attention_backward(x, x, x, x)
    >>> float(np.abs(dq).max()), dv[0, :, 0, 0].round(12).tolist()
    (0.0, [1.0, 1.0, 1.0])
    """
    check_shapes(q, k, v)
    if dout.shape != (*q.shape[:3], v.shape[3]):
        raise ValueError(f"attention_backward: dout has shape {dout.shape}; it must be {(*q.shape[:3], v.shape[3])}")
    scale = resolve_scale(softmax_scale, q.shape[3])
    dq, dk, dv = (np.zeros(x.shape, dtype=np.float64) for x in (q, k, v))
    if k.shape[1] == 0:
        return dq, dk, dv
    out, lse = attention(q, k, v, softmax_scale=scale, causal=causal)
    with np.errstate(invalid="ignore", over="ignore"):
        for b, h, Q, K, V in head_groups(q, k, v, np.float64, SCORE_BUDGET):
            h_kv = h // (q.shape[2] // k.shape[2])
            for rows in row_chunks(q.shape[1], len(b) * k.shape[1]):
                seen = visible(q.shape[1], k.shape[1], causal, rows) if causal else None
                dO = dout[b, rows, h].astype(np.float64)
                row_lse = lse[b, h, rows][..., None]
                S = np.matmul(Q[:, rows], K.swapaxes(1, 2)) * scale
                P = np.where(np.isneginf(row_lse), 0.0, np.exp(S - np.where(np.isneginf(row_lse), 0.0, row_lse)))
                if seen is not None:
                    P = np.where(seen, P, 0.0)
                dP = np.matmul(dO, V.swapaxes(1, 2))
                dS = softmax_backward(P, dP, delta_from_output(dO, out[b, rows, h]))
                dq[b, rows, h] = scale * weighted_sum(dS, K, seen)
                seen_by = None if seen is None else seen.T
                _add_heads(dv, b, h_kv, weighted_sum(P.swapaxes(1, 2), dO, seen_by))
                _add_heads(dk, b, h_kv, scale * weighted_sum(dS.swapaxes(1, 2), Q[:, rows], seen_by))
    return dq, dk, dv


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
