"""How wrong FP8 attention is, and when the transform helps: fixtures, variants, tables (specification 0x06).

One run with one seed proves nothing about a lossy format: whether a transform helps depends on the data. So everything
here is made to be repeated over seeds and to come with a confidence interval. Four variants of the operands:

    tensor             one descale per tensor
    block              one descale per block of rows
    tensor+hadamard    Q and K transformed first
    block+hadamard     both: the method of FlashAttention-3 (arXiv 2407.08608, sections 3.3 and 4.3)

The error is the root mean square of ``out - reference``, the reference being float64 attention of the inputs before any
rounding. No number here is a measurement of a GPU.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from scipy import stats

from .. import dense
from ..formats import FLOAT16
from ..violations import ContractViolation, check_indices, check_range, check_shape
from . import attention
from .hadamard import random_signs, transform
from .operands import quantize

__all__ = [
    "FIXTURE_SEED",
    "PAPER_TABLE_3",
    "VARIANTS",
    "Estimate",
    "estimate",
    "fixture",
    "geometric_estimate",
    "half_precision_rmse",
    "outlier_normal",
    "persistent_fixture",
    "reference",
    "rmse",
    "variant_rmse",
]

Array = npt.NDArray[np.floating]
Triple = tuple[Array, Array, Array]

VARIANTS = ("tensor", "block", "tensor+hadamard", "block+hadamard")
"""Names of the variants, from the plainest to FlashAttention-3's."""

FIXTURE_SEED = 3406
"""Seed of the specification's fixture."""

PAPER_TABLE_3 = MappingProxyType(
    {
        "baseline float16": 3.2e-4,
        "flash float16": 1.9e-4,
        "tensor": 2.4e-2,
        "block+hadamard": 9.1e-3,
        "tensor+hadamard": 9.3e-3,
        "block": 2.4e-2,
    }
)
"""Errors that the paper reports (arXiv 2407.08608, table 3), to compare with: nothing here computes them.

The two FlashAttention rows in float16 are equal there, and so they are one entry.
"""

_OUTLIER_RATE = 0.001
_OUTLIER_SIGMA = 10.0


def outlier_normal(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw from the paper's distribution, ``N(0, 1) + N(0, 100) * Bernoulli(0.001)`` (0x06).

    One entry in a thousand gets a second term of standard deviation 10 (arXiv 2407.08608, section 4.3).

    Parameters
    ----------
    shape : tuple of int
        Shape of the result.
    rng : numpy.random.Generator
        Source of randomness.

    Returns
    -------
    numpy.ndarray
        float64; variance ``1 + 0.1``.

    Examples
    --------
    >>> x = outlier_normal((1000, 1000), np.random.default_rng(0))
    >>> bool(abs(x.var() - 1.1) < 0.03), bool(abs(x).max() > 30)
    (True, True)
    """
    check_range("outlier_normal", 0, axis=min(shape, default=0))
    noise = rng.standard_normal(shape)
    return noise + _OUTLIER_SIGMA * rng.standard_normal(shape) * (rng.random(shape) < _OUTLIER_RATE)


def fixture(seed: int = FIXTURE_SEED, size: int = 32) -> Triple:
    """Make the Q, K and V of the specification's table, from Python's generator (0x06).

    Entries are drawn one after the other: ``gauss(0, 1)``, then ``random() < 0.001`` decides whether ``gauss(0, 10)``
    is added. With the default seed each tensor gets exactly one outlier.

    Parameters
    ----------
    seed : int, optional
        Seed of ``random.Random``.
    size : int, optional
        Rows and columns of each matrix.

    Returns
    -------
    tuple of numpy.ndarray
        float64, each ``(size, size)``.

    Examples
    --------
    >>> [x.shape for x in fixture(size=4)]
    [(4, 4), (4, 4), (4, 4)]
    """
    check_range("fixture", 1, size=size)
    rng = random.Random(seed)

    def entry() -> float:
        """Draw one entry: a normal value, and rarely an outlier on top."""
        x = rng.gauss(0.0, 1.0)
        return x + rng.gauss(0.0, _OUTLIER_SIGMA) if rng.random() < _OUTLIER_RATE else x

    q, k, v = (np.array([entry() for _ in range(size * size)]).reshape(size, size) for _ in range(3))
    return q, k, v


def persistent_fixture(seed: int = FIXTURE_SEED + 2, size: int = 32, excursion: float = 10.0) -> Triple:
    """Make inputs in which channel 0 of Q and of K is large in every row (0x06).

    ``N(0, 1)`` plus ``+-excursion`` in channel 0: positive in the even rows of Q, and in every third row of K. This is
    the geometry for which the transform was made: the channels that are large in Q are large in K.

    Parameters
    ----------
    seed : int, optional
        Seed of ``random.Random``.
    size : int, optional
        Rows and columns of each matrix.
    excursion : float, optional
        Size of the excursion.

    Returns
    -------
    tuple of numpy.ndarray
        float64, each ``(size, size)``.

    Examples
    --------
    >>> q, k, v = persistent_fixture()
    >>> bool(abs(q[:, 0]).min() > 7), bool(abs(q[:, 1:]).max() < 5)
    (True, True)
    """
    check_range("persistent_fixture", 1, size=size)
    rng = random.Random(seed)
    q, k, v = (np.array([rng.gauss(0.0, 1.0) for _ in range(size * size)]).reshape(size, size) for _ in range(3))
    row = np.arange(size)
    q[:, 0] += np.where(row % 2 == 0, excursion, -excursion)
    k[:, 0] += np.where(row % 3 == 0, excursion, -excursion)
    return q, k, v


def _bshd(x: Array) -> Array:
    return x[None, :, None, :]


def reference(q: Array, k: Array, v: Array, *, softmax_scale: float | None = None) -> npt.NDArray[np.float64]:
    """Compute one head's attention in float64 (0x06).

    Parameters
    ----------
    q, k, v : numpy.ndarray
        Shapes ``(seqlen_q, d)``, ``(seqlen_k, d)`` and ``(seqlen_k, d_v)``.
    softmax_scale : float, optional
        ``1 / sqrt(d)`` by default.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(seqlen_q, d_v)``.
    """
    check_shape("fp8 reference", ("rows", "dims"), q=q, k=k, v=v)
    out, _ = dense.attention(_bshd(q), _bshd(k), _bshd(v), softmax_scale=softmax_scale)
    return out[0, :, 0]


def rmse(got: Array, want: Array) -> float:
    """Return the root mean square difference (0x06).

    Parameters
    ----------
    got, want : numpy.ndarray
        Same shape.

    Returns
    -------
    float
        ``sqrt(mean((got - want)**2))``.

    Examples
    --------
    >>> rmse(np.array([3.0, 0.0]), np.array([0.0, 0.0])) == math.sqrt(4.5)
    True
    """
    check_shape("rmse", want.shape, got=got)
    check_range("rmse", 1, size=got.size)
    return math.sqrt(float(np.square(got.astype(np.float64) - want).mean()))


def variant_rmse(
    q: Array,
    k: Array,
    v: Array,
    variant: str,
    *,
    signs: npt.NDArray[np.float64] | None = None,
    rows: npt.NDArray[np.intp] | None = None,
    want: Array | None = None,
    softmax_scale: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
    dtype: npt.DTypeLike = np.float32,
) -> float:
    """Quantize one head's Q, K and V as `variant` says, and return the error of FP8 attention (0x06).

    Attention is `cupyfa.oracles.fp8.attention.same_precision`, with P in E4M3FN, offset 8 and an unrounded output.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        Shapes ``(seqlen_q, d)``, ``(seqlen_k, d)`` and ``(seqlen_k, d_v)``. Descales come from all of them, whatever
        `rows` says.
    variant : str
        One of `VARIANTS`.
    signs : numpy.ndarray, optional
        Signs of the transform; drawn from ``FIXTURE_SEED + 1`` by default.
    rows : numpy.ndarray, optional
        Compute these query rows only.
    want : numpy.ndarray, optional
        The reference of those rows, if it is at hand.
    softmax_scale : float, optional
        ``1 / sqrt(d)`` by default.
    block_q, block_k : int, optional
        Rows per descale of Q, and of K and V, in the block variants.
    dtype : data-type, optional
        Type of everything that is not FP8.

    Returns
    -------
    float
        Root mean square error.

    Raises
    ------
    ValueError
        If the variant does not exist.

    Examples
    --------
    >>> x = np.zeros((16, 16))
    >>> variant_rmse(x, x, x + 1.0, "block")
    0.0
    """
    if variant not in VARIANTS:
        raise ValueError(f"fp8: variant {variant!r} is none of {', '.join(VARIANTS)}")
    check_shape("fp8 error", ("rows", "dims"), q=q, k=k, v=v)
    picked = np.arange(len(q)) if rows is None else rows
    check_indices("fp8 error: rows", picked, len(q))
    want = reference(q[picked], k, v, softmax_scale=softmax_scale) if want is None else want
    if variant.endswith("hadamard"):
        signs = random_signs(q.shape[1], FIXTURE_SEED + 1) if signs is None else signs
        q, k = transform(q, signs), transform(k, signs)
    granularity = variant.split("+", maxsplit=1)[0]
    rows_q, rows_k = (block_q, block_k) if granularity == "block" else (None, None)
    Q = quantize(_bshd(q), granularity, block=rows_q, dtype=dtype)
    K, V = (quantize(_bshd(x), granularity, block=rows_k, dtype=dtype) for x in (k, v))
    out, _ = attention.same_precision(Q.rows(picked), K, V, softmax_scale=softmax_scale, round_out=False)
    return rmse(out[0, :, 0], want)


def half_precision_rmse(
    q: Array, k: Array, v: Array, *, rows: npt.NDArray[np.intp], want: Array, keep_float32: bool
) -> float:
    """Return the error of float16 attention, with intermediate results in float32 or in float16 (0x06).

    FlashAttention keeps scores and softmax in float32. The paper's baseline stores both in float16, which is why it is
    the worse of the two (arXiv 2407.08608, table 3).

    Parameters
    ----------
    q, k, v : numpy.ndarray
        One head, ``(seqlen, d)``; rounded to float16 first.
    rows, want : numpy.ndarray
        Query rows to compute, and their reference.
    keep_float32 : bool
        True for FlashAttention, false for the baseline.

    Returns
    -------
    float
        Root mean square error.
    """
    check_shape("fp8 error", ("rows", "dims"), q=q, k=k, v=v)
    check_indices("fp8 error: rows", rows, len(q))
    q16, k16, v16 = (x.astype(np.float16) for x in (q[rows], k, v))
    if keep_float32:
        out, _ = dense.same_precision(_bshd(q16), _bshd(k16), _bshd(v16))
        return rmse(out[0, :, 0], want)
    scale = np.float32(1 / math.sqrt(q.shape[1]))
    S = FLOAT16.round(q16.astype(np.float32) @ k16.astype(np.float32).T * scale).astype(np.float32)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P = FLOAT16.round(P / P.sum(axis=1, keepdims=True)).astype(np.float32)
    return rmse(FLOAT16.round(P @ v16.astype(np.float32)), want)


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval; `n` is the number of seeds (0x06)."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def estimate(values: npt.ArrayLike, level: float = 0.95) -> Estimate:
    """Return the mean with Student's confidence interval (0x06).

    Parameters
    ----------
    values : array_like
        One value per seed, at least two.
    level : float, optional
        Confidence level.

    Returns
    -------
    Estimate
        Mean and interval.

    Raises
    ------
    ValueError
        If there are fewer than two values: one favourable seed is no result.

    Examples
    --------
    >>> estimate([1.0, 2.0, 3.0])
    Estimate(mean=2.0, low=-0.48..., high=4.48..., n=3)
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size < 2:
        raise ValueError("fp8: an interval needs at least two seeds")
    if not 0 < level < 1:
        raise ContractViolation(f"fp8: level is {level}; it must lie between 0 and 1")
    half = float(stats.t.ppf(0.5 + level / 2, x.size - 1)) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Estimate(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, x.size)


def geometric_estimate(ratios: npt.ArrayLike, level: float = 0.95) -> Estimate:
    """Return the geometric mean of ratios with its confidence interval: `estimate` of their logarithms (0x06).

    Parameters
    ----------
    ratios : array_like
        One positive ratio per seed, at least two; both errors of a ratio should come from the same inputs.
    level : float, optional
        Confidence level.

    Returns
    -------
    Estimate
        Mean and interval.

    Examples
    --------
    >>> round(geometric_estimate([1.0, 4.0, 2.0]).mean, 12)
    2.0
    """
    x = np.asarray(ratios, dtype=np.float64)
    if not (x > 0).all():
        raise ContractViolation("fp8: a ratio is not positive; the geometric mean needs positive ones")
    logs = estimate(np.log(x), level)
    return Estimate(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)
