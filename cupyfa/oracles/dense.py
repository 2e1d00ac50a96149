"""Dense attention: the float64 reference, and the plain algorithm at the kernel's precision.

Every tolerance in the tests is stated with these two: a kernel may be at most a little worse against `attention` than
`same_precision` is. Both are the textbook form (specification 0x01), with no tiling and no running state, so that they
share no idea with the kernels beyond the equation itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .mask import Window, visible, weighted_sum, window_bounds
from .violations import ContractViolation, check_range

__all__ = [
    "SCORE_BUDGET",
    "attention",
    "check_shapes",
    "check_softcap",
    "head_groups",
    "key_distance",
    "per_head",
    "per_score",
    "resolve_scale",
    "row_chunks",
    "same_precision",
]

Array = npt.NDArray[np.floating]
Index = npt.NDArray[np.intp]
_LOG2_E = math.log2(math.e)

# Scores held at a time (elements). 2**22 float64 scores are 32 MiB: small beside any input worth testing.
SCORE_BUDGET = 2**22


def resolve_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Return the scale of the scores: the given one, or ``1 / sqrt(head_dim)`` (0x01).

    Parameters
    ----------
    softmax_scale : float or None
        Any finite number; 0 and negative ones are legitimate.
    head_dim : int
        Elements per query vector.

    Returns
    -------
    float
        The scale.

    Examples
    --------
    >>> resolve_scale(None, 64), resolve_scale(-2.0, 64)
    (0.125, -2.0)
    """
    if softmax_scale is None:
        check_range("attention", 1, head_dim=head_dim)
    return 1.0 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale)


def check_shapes(q: Array, k: Array, v: Array) -> None:
    """Raise ValueError unless the three arrays form one attention problem (0x01).

    Parameters
    ----------
    q : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim)``.
    k, v : numpy.ndarray
        Shapes ``(batch, seqlen_k, heads_kv, head_dim)`` and ``(batch, seqlen_k, heads_kv, head_dim_v)``.

    Raises
    ------
    ValueError
        If ranks, batch sizes, lengths, head counts or head dimensions do not fit each other.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"attention: {name} has {array.ndim} axes; it needs (batch, seqlen, heads, head_dim)")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"attention: k has shape {k.shape} but v has {v.shape}; only the last axis may differ")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"attention: k has batch {k.shape[0]} but q has {q.shape[0]}; they must be equal")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: k has head_dim {k.shape[3]} but q has {q.shape[3]}; they must be equal")
    heads_q, heads_kv = q.shape[2], k.shape[2]
    if heads_q and (not heads_kv or heads_q % heads_kv):
        raise ValueError(f"attention: q has {heads_q} heads, which is no multiple of the {heads_kv} heads of k")


def check_softcap(softcap: float | None) -> None:
    """Raise ValueError unless the scores can be capped so (0x01).

    Parameters
    ----------
    softcap : float or None
        Positive and finite, or None for no cap.

    Raises
    ------
    ValueError
        If it is neither.
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ContractViolation(f"attention: softcap is {softcap}; it must be positive and finite, or None")


def per_head(
    name: str, values: Array | None, batch: int, heads: int, dtype: type, *, of_batch: bool = False
) -> Array | None:
    """Return a value for each batch and head (0x01).

    Parameters
    ----------
    name : str
        Of the argument, for the message.
    values : numpy.ndarray or None
        Shape ``(heads,)``, or with `of_batch` also ``(batch, heads)``.
    batch, heads : int
        Numbers of the problem.
    dtype : type
        Type of the result.
    of_batch : bool, optional
        Whether batches may differ.

    Returns
    -------
    numpy.ndarray or None
        A view of shape ``(batch, heads)``; None if there are no values.

    Raises
    ------
    ValueError
        If the shape is another one.

    Examples
    --------
    >>> per_head("sink", np.array([1.0, 2.0]), 3, 2, np.float32).shape
    (3, 2)
    """
    if values is None:
        return None
    shapes = [(heads,), (batch, heads)][: 1 + of_batch]
    if values.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ContractViolation(f"attention: {name} has shape {values.shape}; it must be {wanted}")
    return np.broadcast_to(values.astype(dtype), (batch, heads))


def per_score(bias: Array | None, shape: tuple[int, int, int, int]) -> Array | None:
    """Return an additive bias with a number for each score (0x01).

    Parameters
    ----------
    bias : numpy.ndarray or None
        Of a shape that broadcasts to `shape`.
    shape : tuple of int
        ``(batch, heads_q, seqlen_q, seqlen_k)``.

    Returns
    -------
    numpy.ndarray or None
        A view of that shape; None if there is no bias.

    Raises
    ------
    ValueError
        If the shape does not broadcast.

    Examples
    --------
    >>> per_score(np.zeros((1, 1, 5)), (2, 3, 4, 5)).shape
    (2, 3, 4, 5)
    """
    if bias is None:
        return None
    try:
        return np.broadcast_to(bias, shape)
    except ValueError:
        raise ContractViolation(f"attention: bias has shape {bias.shape}; it must broadcast to {shape}") from None


def key_distance(seqlen_q: int, seqlen_k: int, rows: slice) -> npt.NDArray[np.intp]:
    """Return how far each key is from the key that is aligned with the row (0x01).

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        Number of queries and keys.
    rows : slice
        Only these queries.

    Returns
    -------
    numpy.ndarray
        Integers, shape ``(rows, seqlen_k)``.

    Examples
    --------
    >>> key_distance(2, 3, slice(None))
    array([[1, 0, 1],
           [2, 1, 0]])
    """
    diagonal = np.arange(seqlen_q)[rows] + (seqlen_k - seqlen_q)
    distance: npt.NDArray[np.intp] = np.abs(diagonal[:, None] - np.arange(seqlen_k))
    return distance


def head_groups(
    q: Array, k: Array, v: Array, dtype: type, elements: int
) -> Iterator[tuple[Index, Index, Array, Array, Array]]:
    """Walk over all (batch, head) pairs, several small ones at a time, upcast once (0x01).

    One pair at a time would be the clearest, but far too slow for a batch of 65,537 one-token sequences.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        The problem, ``(batch, seqlen, heads, head_dim)``.
    dtype : type
        Type of the arrays that are handed out.
    elements : int
        About how many scores one group may have. A group is never smaller than one pair.

    Yields
    ------
    tuple
        ``(batch_index, head_index, Q, K, V)``: the indices select the pairs; the arrays have shape
        ``(pairs, seqlen, head_dim)``, with the key/value head that belongs to each query head.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    per_pair = max(1, seqlen_q * seqlen_k, seqlen_q * q.shape[3], seqlen_k * (k.shape[3] + v.shape[3]))
    step = max(1, elements // per_pair)
    for begin in range(0, batch * heads_q, step):
        pair = np.arange(begin, min(begin + step, batch * heads_q))
        b, h = np.divmod(pair, heads_q)
        h_kv = h // (heads_q // heads_kv)
        yield b, h, q[b, :, h].astype(dtype), k[b, :, h_kv].astype(dtype), v[b, :, h_kv].astype(dtype)


def row_chunks(seqlen_q: int, elements_per_row: int) -> Iterator[slice]:
    """Cut the query rows so that no chunk has many more than ``SCORE_BUDGET`` scores (0x01).

    Parameters
    ----------
    seqlen_q : int
        Number of query rows.
    elements_per_row : int
        Scores of one row, over all pairs that are worked on together.

    Yields
    ------
    slice
        Consecutive rows; together all of them.

    Examples
    --------
    >>> list(row_chunks(5, SCORE_BUDGET // 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, SCORE_BUDGET // max(1, elements_per_row))
    for begin in range(0, seqlen_q, step):
        yield slice(begin, min(begin + step, seqlen_q))


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Compute attention in float64, the reference of every test.

    ``out = softmax(softmax_scale * q @ k.T + mask) @ v`` and ``lse = log(sum(exp(softmax_scale * q @ k.T + mask)))``
    (specification 0x01; arXiv 2407.08608, section 2.1). The options act in this order: softcap, ALiBi and bias, mask,
    sink.

    Parameters
    ----------
    q : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim)``, any float type; it is widened, never rounded.
    k : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim)``.
    v : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim_v)``.
    softmax_scale : float, optional
        Factor on the scores, ``1 / sqrt(head_dim)`` by default. May be 0 or negative.
    causal : bool, optional
        Bottom-right aligned causal mask.
    window_size : tuple of int or None, optional
        How many keys left and right of its diagonal a query sees, see `cupyfa.oracles.mask.window_bounds`.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``; they are already scaled.
    sink : numpy.ndarray, optional
        Shape ``(heads_q,)``: a further logit of each row, which has no value; finite, or -inf for none.
    alibi_slopes : numpy.ndarray, optional
        Shape ``(heads_q,)`` or ``(batch, heads_q)``: scores lose so much for every key that lies between theirs and
        the diagonal, after the cap.
    bias : numpy.ndarray, optional
        Broadcast to ``(batch, heads_q, seqlen_q, seqlen_k)``: is added to the scores after the cap.

    Returns
    -------
    out : numpy.ndarray
        float64, shape ``(batch, seqlen_q, heads_q, head_dim_v)``; 0 in rows that see no key.
    lse : numpy.ndarray
        float64, shape ``(batch, heads_q, seqlen_q)``, natural logarithm; in rows that see no key the sink, or -inf.

    Raises
    ------
    ValueError
        If the shapes do not fit each other, or an option is none.

    Notes
    -----
    A NaN score, or one of +inf, makes its whole row NaN, the lse included; a softcap makes infinite scores finite. A
    row whose scores are all -inf counts as one that sees no key. Keys behind the mask never contribute, NaN and
    infinite ones included.

    Examples
    --------
    >>> q, k = np.zeros((1, 1, 1, 8)), np.zeros((1, 2, 1, 8))
    >>> v = np.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    >>> out, lse = attention(q, k, v)
    >>> out.item(), lse.item() == math.log(2)
    (0.5, True)
    >>> out, lse = attention(q, k, v, sink=np.zeros(1))
    >>> round(out.item(), 3), lse.item() == math.log(3)
    (0.333, True)
    """
    check_shapes(q, k, v)
    check_softcap(softcap)
    scale = resolve_scale(softmax_scale, q.shape[3])
    slopes = per_head("alibi_slopes", alibi_slopes, q.shape[0], q.shape[2], np.float64, of_batch=True)
    sinks = per_head("sink", sink, q.shape[0], q.shape[2], np.float64)
    bias = per_score(bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    out = np.zeros((*q.shape[:3], v.shape[3]), dtype=np.float64)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, dtype=np.float64)
    bounds = window_bounds(causal, window_size)
    if k.shape[1] == 0:
        return out, lse if sinks is None else np.maximum(lse, sinks[..., None])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for b, h, Q, K, V in head_groups(q, k, v, np.float64, SCORE_BUDGET):
            for rows in row_chunks(q.shape[1], len(b) * k.shape[1]):
                seen = None
                if bounds != (None, None):
                    seen = visible(q.shape[1], k.shape[1], causal, rows, window_size)
                S = np.matmul(Q[:, rows], K.swapaxes(1, 2)) * scale
                if softcap is not None:
                    S = softcap * np.tanh(S / softcap)
                if slopes is not None:
                    S -= slopes[b, h][:, None, None] * key_distance(q.shape[1], k.shape[1], rows)
                if bias is not None:
                    S += bias[b, h, rows].astype(np.float64)
                if seen is not None:
                    S = np.where(seen, S, -np.inf)
                m = S.max(axis=-1, keepdims=True)
                if sinks is not None:
                    m = np.maximum(m, sinks[b, h][:, None, None])
                # A row without any finite score: subtract 0, so that exp gives 0 and not exp(-inf + inf) = NaN.
                reference = np.where(np.isneginf(m), 0.0, m)
                P = np.exp(S - reference)
                total = P.sum(axis=-1, keepdims=True)
                if sinks is not None:
                    total += np.exp(sinks[b, h][:, None, None] - reference)
                out[b, rows, h] = weighted_sum(P, V, seen) / np.where(total == 0, 1.0, total)
                lse[b, h, rows] = (m + np.log(total))[..., 0]
    return out, lse


def same_precision(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, npt.NDArray[np.float32]]:
    """Compute the plain algorithm at the kernel's precision: the yardstick of unavoidable error (0x01).

    Scores are float32 products of the inputs as they are; the maximum is the exact one of the full row;
    ``P = exp2(scores - max)`` is float32, summed unrounded, and rounded to the input type only as an operand of
    ``P @ v``; accumulation is float32; the quotient is rounded once to the input type. It has no blocks and no running
    maximum, so its error is that of the number formats and not that of a schedule.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        As for `attention`; float16 or bfloat16 (float32 works and rounds nothing on the way).
    softmax_scale : float, optional
        Factor on the scores, ``1 / sqrt(head_dim)`` by default. Enters as ``float32(softmax_scale * log2(e))``, and as
        ``float32(softmax_scale)`` with a bias: logits are natural ones then, which a bias near the end of float32 may
        not overflow.
    causal : bool, optional
        Bottom-right aligned causal mask.
    window_size, softcap, sink, alibi_slopes, bias : optional
        As for `attention`. ``P`` is relative to the largest score of a key: relative to a larger sink, float16 would
        lose what float32 keeps.

    Returns
    -------
    out : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim_v)``, type of `q`.
    lse : numpy.ndarray
        float32, shape ``(batch, heads_q, seqlen_q)``, natural logarithm.

    Raises
    ------
    ValueError
        If the shapes do not fit each other, or an option is none.

    Examples
    --------
    >>> x = np.ones((1, 3, 1, 8), dtype=np.float16)
    >>> out, lse = same_precision(x, x, x)
    >>> out.dtype, lse.dtype, float(out.max())
    (dtype('float16'), dtype('float32'), 1.0)
    """
    check_shapes(q, k, v)
    check_softcap(softcap)
    dtype = q.dtype
    scale = resolve_scale(softmax_scale, q.shape[3])
    base = _LOG2_E if bias is None else 1.0  # of natural logits, in the base of ours
    # With a softcap the argument of tanh, else a logit.
    factor = np.float32(scale * base if softcap is None else scale / softcap)
    slopes = per_head("alibi_slopes", alibi_slopes, q.shape[0], q.shape[2], np.float32, of_batch=True)
    sinks = per_head("sink", sink, q.shape[0], q.shape[2], np.float32)
    bias = per_score(bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    zero, one, of_natural = np.float32(0), np.float32(1), np.float32(base)
    to_base_2, ln2 = np.float32(_LOG2_E / base), np.float32(math.log(2))
    out = np.zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, dtype=np.float32)
    bounds = window_bounds(causal, window_size)
    if k.shape[1] == 0:
        return out, lse if sinks is None else np.maximum(lse, sinks[..., None])
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        for b, h, Q, K, V in head_groups(q, k, v, np.float32, SCORE_BUDGET):
            for rows in row_chunks(q.shape[1], len(b) * k.shape[1]):
                seen = None
                if bounds != (None, None):
                    seen = visible(q.shape[1], k.shape[1], causal, rows, window_size)
                S = np.matmul(Q[:, rows], K.swapaxes(1, 2)) * factor
                if softcap is not None:
                    S = np.float32(softcap * base) * np.tanh(S)
                if slopes is not None:
                    distance = key_distance(q.shape[1], k.shape[1], rows).astype(np.float32)
                    S -= (slopes[b, h] * of_natural)[:, None, None] * distance
                if bias is not None:
                    S += bias[b, h, rows].astype(np.float32)
                if seen is not None:
                    S = np.where(seen, S, np.float32(-np.inf))
                m = S.max(axis=-1, keepdims=True)
                P = np.exp2((S - np.where(np.isneginf(m), zero, m)) * to_base_2)
                total = P.sum(axis=-1, keepdims=True)
                O = weighted_sum(P.astype(dtype).astype(np.float32), V, seen)
                if sinks is not None:
                    # The larger one of maximum and sink is what the sum is relative to from here on.
                    of_head = (sinks[b, h] * of_natural)[:, None, None]
                    top = np.maximum(m, of_head)
                    reference = np.where(np.isneginf(top), zero, top)
                    shrink = np.exp2((m - reference) * to_base_2)
                    O, total = O * shrink, total * shrink + np.exp2((of_head - reference) * to_base_2)
                    m = top
                out[b, rows, h] = (O / np.where(total == 0, one, total)).astype(dtype)
                if bias is None:
                    lse[b, h, rows] = ((m + np.log2(total)) * ln2)[..., 0]
                else:
                    lse[b, h, rows] = (m + np.log2(total) * ln2)[..., 0]
    return out, lse
