"""Incoherent processing: one orthogonal transform of Q and K before they are quantized (specification 0x06).

``R = diag(signs) @ H / sqrt(n)`` with a Hadamard matrix ``H`` and random signs is orthogonal, so ``(Q R)(K R).T`` is
``Q K.T``: exact before quantization, and only before. After it the products differ, because rounding acts on other
numbers. The transform is a bet on geometry: it spreads what one coordinate holds over all of them. `coherence` says
how the bet stands, and `cupyfa.oracles.fp8.error` measures how it turns out (arXiv 2407.08608, section 3.3; the idea
is from QuIP, arXiv 2307.13304).

V takes no part in it. The permutation of P and V (`cupyfa.oracles.fp8.layout`) is another thing: it reindexes a sum.
"""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt
from scipy.linalg import hadamard

from ..violations import ContractViolation, check_range

__all__ = [
    "NotOrthogonal",
    "TransformMismatch",
    "block_size",
    "check_same_transform",
    "coherence",
    "random_signs",
    "signed_hadamard",
    "transform",
]

Array = npt.NDArray[np.floating]


class NotOrthogonal(ContractViolation):
    """A matrix that is used as a change of basis of Q and K is not orthogonal (0x06)."""


class TransformMismatch(ContractViolation):
    """Q and K are not transformed by the same matrix, so their products change before any quantization (0x06)."""


def block_size(head_dim: int) -> int:
    """Find the size of one Hadamard block: the largest power of two that divides `head_dim`.

    Hadamard matrices of Sylvester's kind exist for powers of two only. Any other head dimension is cut into equal
    blocks, each mixed by itself; the whole stays orthogonal (specification 0x06).

    Parameters
    ----------
    head_dim : int
        Elements per vector, at least 1.

    Returns
    -------
    int
        Elements per block; ``head_dim // block_size(head_dim)`` blocks.

    Raises
    ------
    ValueError
        If `head_dim` is not positive.

    Examples
    --------
    >>> [block_size(d) for d in (64, 96, 128, 192, 256)]  # 192 is three blocks of 64
    [64, 32, 128, 64, 256]
    """
    if head_dim < 1:
        raise ValueError(f"hadamard: head_dim is {head_dim}; it must be positive")
    return head_dim & -head_dim


def random_signs(head_dim: int, seed: int) -> npt.NDArray[np.float64]:
    """Draw the random diagonal of the transform (0x06).

    Parameters
    ----------
    head_dim : int
        Number of signs.
    seed : int
        Seed of Python's generator, whose ``choice`` draws each sign. Q and K of one attention need one seed.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(head_dim,)``, entries -1 and 1.

    Examples
    --------
    >>> random_signs(8, seed=3407)
    array([-1.,  1., -1.,  1., -1.,  1.,  1.,  1.])
    """
    check_range("hadamard", 1, head_dim=head_dim)
    rng = random.Random(seed)
    return np.array([rng.choice((-1.0, 1.0)) for _ in range(head_dim)])


def _check_signs(signs: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(signs, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.all(np.abs(array) == 1):
        raise NotOrthogonal("hadamard: signs must be one axis of -1 and 1; anything else is not orthogonal")
    return array


def signed_hadamard(signs: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Build the matrix ``R`` that multiplies Q and K from the right.

    ``R = diag(signs) @ blockdiag(H_n, ..., H_n) / sqrt(n)`` with ``n = block_size(head_dim)`` and ``H_n`` from
    `scipy.linalg.hadamard`; ``R @ R.T = I`` (specification 0x06).

    Parameters
    ----------
    signs : array_like
        Shape ``(head_dim,)``, entries -1 and 1.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(head_dim, head_dim)``.

    Raises
    ------
    NotOrthogonal
        If an entry of `signs` is not -1 or 1.

    Examples
    --------
    >>> R = signed_hadamard([1, -1, 1, -1])
    >>> R * 2
    array([[ 1.,  1.,  1.,  1.],
           [-1.,  1., -1.,  1.],
           [ 1.,  1., -1., -1.],
           [-1.,  1.,  1., -1.]])
    >>> np.array_equal(R @ R.T, np.eye(4))
    True
    """
    diagonal = _check_signs(signs)
    n = block_size(diagonal.size)
    blocks = np.kron(np.eye(diagonal.size // n), hadamard(n).astype(np.float64))
    return diagonal[:, None] * blocks / math.sqrt(n)


def transform(x: Array, signs: npt.ArrayLike) -> Array:
    """Compute ``x @ signed_hadamard(signs)`` with ``O(d log d)`` additions per vector (0x06).

    Each of the ``log2(n)`` passes replaces pairs ``(a, b)`` that lie ``h`` apart by ``(a + b, a - b)``.

    Parameters
    ----------
    x : numpy.ndarray
        Shape ``(..., head_dim)``, a float type, in which the passes are computed.
    signs : array_like
        Shape ``(head_dim,)``, entries -1 and 1.

    Returns
    -------
    numpy.ndarray
        Shape and type of `x`.

    Raises
    ------
    NotOrthogonal
        If an entry of `signs` is not -1 or 1.
    ValueError
        If `signs` has another length than the last axis of `x`.

    Examples
    --------
    >>> transform(np.array([8.0, 0.0, 0.0, 0.0]), [1, -1, 1, -1])  # one large coordinate becomes four smaller ones
    array([4., 4., 4., 4.])
    """
    diagonal = _check_signs(signs)
    if x.ndim < 1 or not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"hadamard: x is {x.dtype} {x.shape}; it must be (..., head_dim) of a float type")
    if x.shape[-1] != diagonal.size:
        raise ValueError(f"hadamard: x has {x.shape[-1]} elements per vector but there are {diagonal.size} signs")
    n = block_size(diagonal.size)
    y: Array = (x * diagonal.astype(x.dtype)).reshape(-1, n)
    h = 1
    while h < n:
        pairs = y.reshape(len(y), n // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = np.stack([a + b, a - b], axis=2).reshape(len(y), n)
        h *= 2
    return (y / x.dtype.type(math.sqrt(n))).reshape(x.shape)


def check_same_transform(R_q: Array, R_k: Array, tolerance: float = 1e-12) -> None:
    """Raise unless Q and K may be multiplied by these two matrices: ``R_q @ R_k.T = I`` (0x06).

    Parameters
    ----------
    R_q, R_k : numpy.ndarray
        Shape ``(head_dim, head_dim)``.
    tolerance : float, optional
        Largest deviation of an entry of ``R @ R.T`` from the identity.

    Raises
    ------
    NotOrthogonal
        If a matrix is not orthogonal.
    TransformMismatch
        If both are, but they are not the same change of basis.

    Examples
    --------
    >>> R = signed_hadamard([1, -1])
    >>> check_same_transform(R, R)
    >>> check_same_transform(R, signed_hadamard([1, 1]))
    Traceback (most recent call last):
    cupyfa.oracles.fp8.hadamard.TransformMismatch: ...
    """
    for name, R in (("Q", R_q), ("K", R_k)):
        if R.ndim != 2 or not len(R) or R.shape[0] != R.shape[1] or np.abs(R @ R.T - np.eye(len(R))).max() > tolerance:
            raise NotOrthogonal(f"hadamard: the transform of {name} is not orthogonal")
    if R_q.shape != R_k.shape or np.abs(R_q @ R_k.T - np.eye(len(R_q))).max() > tolerance:
        raise TransformMismatch("hadamard: Q and K are transformed by different matrices; R_q @ R_k.T is not I")


def coherence(q: Array, k: Array, weights: Array | None = None) -> float:
    """Predict what the transform does to the error of the scores.

    E4M3 rounds each element by a share of its own size, so the error of a score has a variance in proportion to
    ``sum_c q_c**2 k_c**2``. After the transform both vectors are spread evenly and it is about ``|q|**2 |k|**2 / d``.
    The quotient, over all pairs or weighted by how much each pair matters, is ::

        coherence = sum_ij w_ij * d * sum_c q_ic**2 k_jc**2  /  sum_ij w_ij * |q_i|**2 * |k_j|**2

    Above 1 the transform helps, below 1 it hurts: the root mean square error of the scores changes by about
    ``1 / sqrt(coherence)``. (Our own figure of merit for the question that specification 0x06 leaves to geometry.)

    Parameters
    ----------
    q, k : numpy.ndarray
        Shapes ``(seqlen_q, d)`` and ``(seqlen_k, d)``.
    weights : numpy.ndarray, optional
        Shape ``(seqlen_q, seqlen_k)``, such as the softmax probabilities; all equal by default.

    Returns
    -------
    float
        Between 0 and d. Independent coordinates give 1; one channel that is large in both gives up to d; a channel
        that is large in one and small in the other gives less than 1.

    Raises
    ------
    ValueError
        If the shapes do not fit, or if Q or K vanishes.

    Examples
    --------
    >>> e0, e1 = np.eye(4)[:1], np.eye(4)[1:2]
    >>> coherence(e0, e0), coherence(e0, e1), coherence(np.ones((1, 4)), e0)
    (4.0, 0.0, 1.0)
    """
    if q.ndim != 2 or k.ndim != 2 or q.shape[1] != k.shape[1]:
        raise ValueError(f"hadamard: q {q.shape} and k {k.shape} must be (rows, d) with one d")
    w = np.ones((len(q), len(k))) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != (len(q), len(k)):
        raise ValueError(f"hadamard: weights {w.shape} must be {(len(q), len(k))}")
    qq, kk = np.square(q, dtype=np.float64), np.square(k, dtype=np.float64)
    spread = float((w * qq.sum(axis=1)[:, None] * kk.sum(axis=1)).sum())
    if not spread > 0:
        raise ValueError("hadamard: the coherence of a zero vector is not defined")
    return float(q.shape[1] * (w * (qq @ kk.T)).sum() / spread)
