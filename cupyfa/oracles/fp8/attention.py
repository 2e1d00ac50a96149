"""Attention with FP8 operands: twin of FlashAttention-3's FP8 consumer loop (specification 0x06).

The loop of `cupyfa.oracles.online`, with four differences. Scores take the descales of Q and K. The probabilities are
raised by ``2**offset`` before they are rounded to FP8, because E4M3 ends at ``2**-9`` below and at 448 above, and
``exp`` fills only [0, 1] of that. The row sum takes the unrounded probabilities and so carries the same factor, which
cancels in ``O / l`` and is subtracted from the lse. The output takes the descales of V.

    u_ij = 2**offset * exp(S_ij - m_i)        P8 = round(u)        l_i = sum_j u_ij
    out  = sum_j dV_j (P8_ij @ V8_j) / l_i    lse = m_i + log(l_i) - offset * log(2)

What the twin leaves out: the tensor cores of Hopper add FP8 products with fewer bits than float32 has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..dense import check_shapes, resolve_scale
from ..formats import BFLOAT16, Format
from ..mask import TileMask, visible
from ..violations import ContractViolation, check_range, check_shape
from .operands import DescaleAxisMismatch, Float8

__all__ = ["OFFSET", "Counters", "attention", "lse_of", "raised_probabilities", "same_precision"]

Array = npt.NDArray[np.floating]

OFFSET = 8
"""Exponent of the factor on the probabilities in FlashAttention-3: P lies in [0, 256], below the 448 of E4M3FN."""


@dataclass
class Counters:
    """What the conversion of P to FP8 did: the counters that tell a healthy run from one that lost its range (0x06).

    Attributes
    ----------
    total : int
        Probabilities converted.
    saturated : int
        Above the largest finite value.
    flushed : int
        Greater than zero, but rounded to zero.
    codes : numpy.ndarray
        How often each of the 256 codes came out, int64.
    """

    total: int = 0
    saturated: int = 0
    flushed: int = 0
    codes: npt.NDArray[np.int64] | None = None

    def record(self, u: Array, codes: npt.NDArray[np.integer], format: Format) -> None:
        """Count one tile: probabilities `u` and the codes that they became."""
        check_shape("fp8 counters", u.shape, codes=codes)
        if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < 256:
            raise ContractViolation(f"fp8 counters: codes {codes.min()} .. {codes.max()} must be in 0 .. 255")
        self.total += u.size
        self.saturated += int((u > format.max).sum())
        self.flushed += int(((u > 0) & (codes == 0)).sum())
        counts = np.bincount(codes.ravel(), minlength=256)
        self.codes = counts if self.codes is None else self.codes + counts


def raised_probabilities(scores_log2: Array, m: Array, offset: int) -> Array:
    """Compute ``u = 2**(scores_log2 - (m - offset))``, the form in which a kernel spends no extra instruction.

    Parameters
    ----------
    scores_log2 : numpy.ndarray
        Scores times ``log2(e)``, shape ``(rows, keys)``.
    m : numpy.ndarray
        The reference of each row in the same units, shape ``(rows, 1)``; -inf if the row has seen no key.
    offset : int
        Exponent of the factor.

    Returns
    -------
    numpy.ndarray
        Type of `scores_log2`; at most ``2**offset`` if `m` is the maximum (specification 0x06).

    Examples
    --------
    >>> raised_probabilities(np.array([[0.0, -1.0, -9.0]]), np.array([[0.0]]), 8)
    array([[256. , 128. ,   0.5]])
    """
    check_shape("raised_probabilities", (*scores_log2.shape[:-1], 1), m=m)
    reference = np.where(np.isneginf(m), scores_log2.dtype.type(0), m) - scores_log2.dtype.type(offset)
    result: Array = np.exp2(scores_log2 - reference)
    return result


def lse_of(m: Array, l: Array, offset: int) -> Array:
    """Return the natural logarithm of the sum of exponentials: ``(m + log2(l) - offset) * log(2)`` (0x06).

    Parameters
    ----------
    m, l : numpy.ndarray
        Row reference in base 2, and row sum that carries ``2**offset``.
    offset : int
        What has to be taken out again.

    Returns
    -------
    numpy.ndarray
        Shape of `m`; -inf where `l` is 0.

    Examples
    --------
    >>> lse_of(np.array([0.0]), np.array([512.0]), 8) == np.log(2)
    array([ True])
    """
    check_shape("lse_of", m.shape, l=l)
    with np.errstate(divide="ignore"):
        result: Array = (m + np.log2(l) - m.dtype.type(offset)) * m.dtype.type(math.log(2))
    return result


def attention(
    q: Float8,
    k: Float8,
    v: Float8,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    offset: int = OFFSET,
    round_p: bool = True,
    round_out: bool = True,
    tile_m: int = 128,
    tile_n: int = 128,
    counters: Counters | None = None,
) -> tuple[Array, Array]:
    """Compute attention from FP8 operands, block by block as the kernel does (0x06).

    Parameters
    ----------
    q, k, v : Float8
        ``(batch, seqlen_q, heads_q, head_dim)`` and twice ``(batch, seqlen_k, heads_kv, head_dim or head_dim_v)``.
        The arithmetic has the type of ``q.descale``.
    softmax_scale : float, optional
        Factor on the scores, ``1 / sqrt(head_dim)`` by default.
    causal : bool, optional
        Bottom-right aligned causal mask.
    offset : int, optional
        The probabilities are multiplied by ``2**offset``.
    round_p : bool, optional
        If false P stays unrounded: then all is exact up to the arithmetic type.
    round_out : bool, optional
        Round the output to bfloat16, as the public call does.
    tile_m, tile_n : int, optional
        Query rows per tile and keys per block.
    counters : Counters, optional
        Filled in.

    Returns
    -------
    out : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim_v)``; 0 in rows that see no key.
    lse : numpy.ndarray
        Shape ``(batch, heads_q, seqlen_q)``, natural logarithm; -inf in rows that see no key.

    Raises
    ------
    ValueError
        If the shapes do not fit each other.
    DescaleAxisMismatch
        If a V descale would change inside a key block: one instruction sums over keys and has no factor for each.

    Examples
    --------
    >>> from cupyfa.oracles.fp8.operands import quantize
    >>> x = quantize(np.ones((1, 300, 2, 16), np.float32))
    >>> out, lse = attention(x, x, x)
    >>> float(out.min()), bool(abs(lse[0, 0, 0] - (4 + math.log(300))) < 1e-5)
    (1.0, True)
    """
    check_shapes(q.values(), k.values(), v.values())
    check_range("fp8 attention", 1, tile_m=tile_m, tile_n=tile_n)
    (batch, seqlen_q, heads_q, head_dim), seqlen_k = q.codes.shape, k.codes.shape[1]
    if v.granularity == "block" and v.block % tile_n:
        raise DescaleAxisMismatch(f"fp8: v has a descale per {v.block} keys, which is no multiple of {tile_n} per tile")
    dtype = q.descale.dtype.type
    out = np.zeros((batch, seqlen_q, heads_q, v.codes.shape[3]), dtype)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf, dtype)
    scale = dtype(resolve_scale(softmax_scale, head_dim) * math.log2(math.e))
    operands = [(x.values().astype(dtype), x.row_descales().astype(dtype)) for x in (q, k, v)]
    group = heads_q // k.codes.shape[2] if heads_q else 1
    rounding, blockwise = ((v.format, counters) if round_p else None), v.granularity == "block"
    for b, h in np.ndindex(batch, heads_q):
        (Q, dQ), (K, dK), (V, dV) = (
            (x[b, :, g], d[b, :, g]) for (x, d), g in zip(operands, (h, h // group, h // group), strict=True)
        )
        for row in range(0, seqlen_q if seqlen_k else 0, tile_m):
            rows = slice(row, min(row + tile_m, seqlen_q))
            mask = TileMask(rows.start, rows.stop, seqlen_q, seqlen_k, tile_n, causal)
            inner = dV if blockwise else None
            O, lse[b, h, rows] = _tile(Q[rows], dQ[rows] * scale, K, dK, V, inner, mask, offset, rounding)
            out[b, rows, h] = O if blockwise else O * dV[0]
    return (BFLOAT16.round(out).astype(dtype) if round_out else out), lse


def same_precision(
    q: Float8,
    k: Float8,
    v: Float8,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    offset: int = OFFSET,
    round_out: bool = True,
) -> tuple[Array, Array]:
    """Compute the plain algorithm from FP8 operands: the yardstick of unavoidable error.

    No blocks and no running maximum: ``P8 = round(2**offset * exp(S - max(S)))`` over whole rows, then
    ``P8 @ (dV * V8) / l``. This is the method of the specification's table of errors (0x06). A V descale may change
    from key to key here, since V is multiplied by it first; an FP8 matrix instruction could not do that.

    Parameters
    ----------
    q, k, v, softmax_scale, causal, offset, round_out
        As for `attention`.

    Returns
    -------
    out : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim_v)``; 0 in rows that see no key.
    lse : numpy.ndarray
        Shape ``(batch, heads_q, seqlen_q)``, natural logarithm; -inf in rows that see no key.

    Raises
    ------
    ValueError
        If the shapes do not fit each other.

    Examples
    --------
    >>> from cupyfa.oracles.fp8.operands import quantize
    >>> x = quantize(np.ones((1, 3, 1, 16), np.float32))
    >>> float(same_precision(x, x, x)[0].max())
    1.0
    """
    Q, K, V = (x.dequantize().astype(q.descale.dtype) for x in (q, k, v))
    check_shapes(Q, K, V)
    (batch, seqlen_q, heads_q, head_dim), seqlen_k = q.codes.shape, k.codes.shape[1]
    dtype = q.descale.dtype.type
    out = np.zeros((batch, seqlen_q, heads_q, v.codes.shape[3]), dtype)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf, dtype)
    if not out.size or not seqlen_k:
        return out, lse
    group = heads_q // k.codes.shape[2]
    scale = dtype(resolve_scale(softmax_scale, head_dim) * math.log2(math.e))
    Q, K, V = (x.swapaxes(1, 2) for x in (Q, K, V))
    S = (Q @ np.repeat(K, group, axis=1).swapaxes(2, 3)) * scale
    if causal:
        S = np.where(visible(seqlen_q, seqlen_k, True, slice(0, seqlen_q)), S, dtype(-np.inf))
    m = S.max(axis=-1, keepdims=True)
    u = raised_probabilities(S, m, offset)
    l = u.sum(axis=-1, keepdims=True)
    P = v.format.codebook().astype(dtype)[v.format.encode(u)]
    out[...] = (P @ np.repeat(V, group, axis=1) / np.where(l == 0, dtype(1), l)).swapaxes(1, 2)
    return (BFLOAT16.round(out).astype(dtype) if round_out else out), lse_of(m, l, offset)[..., 0]


def _tile(
    Q: Array,
    dQ_scaled: Array,
    K: Array,
    dK: Array,
    V: Array,
    dV: Array | None,
    mask: TileMask,
    offset: int,
    rounding: tuple[Format, Counters | None] | None,
) -> tuple[Array, Array]:
    """Run the mainloop of one query tile. Operands are ``(rows, d)`` without descales; descales are per row.

    `dV` is None if V has one descale: then the caller applies it to the result.
    """
    m = np.full((len(Q), 1), -np.inf, Q.dtype)
    l = np.zeros((len(Q), 1), Q.dtype)
    O = np.zeros((len(Q), V.shape[1]), Q.dtype)
    for j in reversed(range(mask.blocks.first, mask.blocks.end)):
        keys = slice(j * mask.tile_n, min((j + 1) * mask.tile_n, len(K)))
        scores = mask.apply((Q @ K[keys].T) * dQ_scaled[:, None] * dK[keys], j)
        m_new = np.maximum(m, scores.max(axis=1, keepdims=True))
        reference = np.where(np.isneginf(m_new), Q.dtype.type(0), m_new)
        shrink = np.exp2(m - reference)
        m = m_new
        P = raised_probabilities(scores, m, offset)
        l = l * shrink + P.sum(axis=1, keepdims=True)
        if rounding is not None:
            codes = rounding[0].encode(P)
            if rounding[1] is not None:
                rounding[1].record(P, codes, rounding[0])
            P = rounding[0].codebook().astype(Q.dtype)[codes]
        contribution = P @ V[keys]
        O = O * shrink + (contribution if dV is None else contribution * dV[keys.start])
    return O / np.where(l == 0, Q.dtype.type(1), l), lse_of(m, l, offset)[:, 0]
