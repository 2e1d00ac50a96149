"""FP8 operands: codes with descales, and where a descale may enter attention (specification 0x06).

A tensor is stored as FP8 codes and positive descales, ``x ~ descale * value(code)``. One descale covers the whole
tensor, one key/value head, or one block of rows of one head. With ``alpha = softmax_scale`` the algebra is ::

    S_ij = alpha * dQ_i * dK_j * (Q8_i @ K8_j.T)         before the maximum, the exponential and the sum
    O_i  = sum_j dV_j * (P_ij @ V8_j) / l_i              V by blocks: with each contribution
    O_i  = dV * sum_j (P_ij @ V8_j) / l_i                one V descale per head: once, at the end, is as good

Softmax is not linear, so dQ and dK cannot wait until after it. dV can leave the sum over j only if it does not depend
on j. `check_application` knows this table; `cupyfa.oracles.fp8.attention` computes with it.

The paper (arXiv 2407.08608, section 3.3) scales by blocks of rows. FlashAttention-3's public call takes one descale per
(batch, key/value head) for each of Q, K and V, and 1 for a missing one: see `api_descale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..formats import E4M3FN, Format
from ..violations import ContractViolation, check_indices, check_range

__all__ = [
    "LEGAL_POINTS",
    "PRECISION",
    "DescaleAxisMismatch",
    "Float8",
    "InvalidDescale",
    "NotAdmitted",
    "ScaleAfterSoftmax",
    "ScaleOutsideSum",
    "ScaleOutsideTensor",
    "ValueOutOfRange",
    "api_descale",
    "check_admission",
    "check_application",
    "quantize",
]

Array = npt.NDArray[np.floating]


class InvalidDescale(ContractViolation):
    """A descale is zero, negative, NaN or infinite (0x06)."""


class DescaleAxisMismatch(ContractViolation):
    """The descales do not have the shape that their axis asks for (0x06)."""


class NotAdmitted(ContractViolation):
    """FlashAttention-3's public FP8 call does not take this problem (0x06)."""


class ScaleAfterSoftmax(ContractViolation):
    """A descale of Q or K is applied after the softmax, which is not linear (0x06)."""


class ScaleOutsideSum(ContractViolation):
    """A V descale that changes from block to block is pulled out of the sum over blocks (0x06)."""


class ScaleOutsideTensor(ContractViolation):
    """A V descale is applied to scores, which do not contain V (0x06)."""


class ValueOutOfRange(ContractViolation):
    """A value over its descale exceeds the largest finite value of the format: it would saturate (0x06)."""


PRECISION = MappingProxyType(
    {
        "Q, K, V": "float8_e4m3fn",
        "S": "float32",
        "m, l": "float32",
        "P": "float8_e4m3fn",
        "O": "float32",
        "out": "bfloat16",
    }
)
"""Format at each station of the forward pass (specification 0x06): FP8 is what enters the matrix units, no more."""

LEGAL_POINTS = MappingProxyType(
    {
        ("q", "tensor"): ("score",),
        ("q", "head"): ("score",),
        ("q", "block"): ("score",),
        ("k", "tensor"): ("score",),
        ("k", "head"): ("score",),
        ("k", "block"): ("score",),
        ("v", "tensor"): ("contribution", "finalize"),
        ("v", "head"): ("contribution", "finalize"),
        ("v", "block"): ("contribution",),
    }
)
"""Where the descale of a tensor with a granularity may be applied without changing attention.

``"score"``: to the scores, before the row maximum. ``"contribution"``: to each ``P_ij @ V_j`` before it is added up.
``"finalize"``: once, with the division by the row sum.
"""


def check_application(tensor: str, granularity: str, point: str) -> None:
    """Raise unless the descale of `tensor` may be applied at `point` (0x06).

    Parameters
    ----------
    tensor : {"q", "k", "v"}
        Whose descale.
    granularity : {"tensor", "head", "block"}
        What one descale covers.
    point : {"score", "contribution", "finalize"}
        Where it is applied, see `LEGAL_POINTS`.

    Raises
    ------
    ScaleAfterSoftmax, ScaleOutsideSum, ScaleOutsideTensor
        If that would change attention.
    ValueError
        If an argument is none of the words above.

    Examples
    --------
    >>> check_application("v", "head", "finalize")
    >>> check_application("v", "block", "finalize")
    Traceback (most recent call last):
    cupyfa.oracles.fp8.operands.ScaleOutsideSum: ...
    """
    if (tensor, granularity) not in LEGAL_POINTS or point not in ("score", "contribution", "finalize"):
        raise ValueError(f"fp8: no such application: {tensor!r}, {granularity!r}, {point!r}")
    if point in LEGAL_POINTS[tensor, granularity]:
        return
    if tensor != "v":
        raise ScaleAfterSoftmax(f"fp8: the descale of {tensor} must reach the scores before the softmax, not {point}")
    if point == "score":
        raise ScaleOutsideTensor("fp8: the descale of v must not touch the scores")
    raise ScaleOutsideSum("fp8: a v descale per block must be applied to each block's contribution, not at the end")


@dataclass(frozen=True)
class Float8:
    """A quantized tensor: codes and descales (0x06).

    Attributes
    ----------
    codes : numpy.ndarray
        uint8, shape ``(batch, seqlen, heads, head_dim)``.
    descale : numpy.ndarray
        float32 (float64 for studies of the algebra), shape ``(batch, scale_heads, blocks)``, finite and positive.
        Head ``h`` uses the descales of scale head ``h // (heads // scale_heads)``.
    block : int
        Rows that share a descale: row ``i`` uses block ``i // block``; ``blocks = max(1, ceil(seqlen / block))``.
    format : Format
        What the codes mean.

    Raises
    ------
    InvalidDescale
        If a descale is zero, negative, NaN or infinite.
    DescaleAxisMismatch
        If the shape of `descale` does not fit the codes.

    Examples
    --------
    >>> x = Float8(np.full((1, 3, 2, 16), 0x38, np.uint8), np.float32([[[1, 2], [3, 4]]]), block=2)
    >>> x.dequantize()[0, :, :, 0]
    array([[1., 3.],
           [1., 3.],
           [2., 4.]], dtype=float32)
    """

    codes: npt.NDArray[np.uint8]
    descale: Array
    block: int
    format: Format = E4M3FN

    def __post_init__(self) -> None:
        if self.codes.ndim != 4 or self.codes.dtype != np.uint8:
            raise ValueError(f"fp8: codes are {self.codes.dtype} {self.codes.shape}; they must be uint8 with four axes")
        batch, seqlen, heads, _ = self.codes.shape
        if self.block < 1:
            raise DescaleAxisMismatch(f"fp8: a block of {self.block} rows")
        blocks = max(1, -(-seqlen // self.block))
        scale_heads = self.descale.shape[1] if self.descale.ndim == 3 else 0
        if self.descale.shape != (batch, scale_heads, blocks) or not scale_heads or heads % scale_heads:
            raise DescaleAxisMismatch(
                f"fp8: descale has shape {self.descale.shape}; codes {self.codes.shape} in blocks of {self.block} rows "
                f"need (batch, scale_heads, blocks) = ({batch}, a divisor of {heads}, {blocks})"
            )
        if not (np.isfinite(self.descale).all() and (self.descale > 0).all()):
            raise InvalidDescale("fp8: every descale must be finite and greater than zero")

    @property
    def granularity(self) -> str:
        """``"block"`` if rows of one head have different descale blocks, else ``"head"``."""
        return "block" if self.descale.shape[2] > 1 else "head"

    def values(self) -> Array:
        """Return what the codes stand for, without descales: the type of `descale`, shape of `codes`."""
        return self.format.codebook().astype(self.descale.dtype)[self.codes]

    def row_descales(self) -> Array:
        """Return the descale of every row: shape ``(batch, seqlen, heads)``."""
        _, seqlen, heads, _ = self.codes.shape
        per_head = np.repeat(self.descale, heads // self.descale.shape[1], axis=1)
        return per_head[:, :, np.arange(seqlen) // self.block].swapaxes(1, 2)

    def dequantize(self) -> Array:
        """Return ``descale * value``: the type of `descale`, shape of `codes`."""
        return self.values() * self.row_descales()[..., None]

    def rows(self, index: npt.ArrayLike) -> Float8:
        """Take some rows, each with the descale that it has in the whole tensor.

        Parameters
        ----------
        index : array_like of int
            Row numbers, at least one.

        Returns
        -------
        Float8
            Blocks of one row.
        """
        check_indices("fp8: rows", picked := np.asarray(index, dtype=np.intp), self.codes.shape[1])
        return Float8(self.codes[:, picked], self.row_descales()[:, picked].swapaxes(1, 2), 1, self.format)


def quantize(
    x: Array,
    granularity: str = "head",
    *,
    block: int | None = None,
    scale_heads: int | None = None,
    descale: Array | None = None,
    format: Format = E4M3FN,
    dtype: npt.DTypeLike = np.float32,
) -> Float8:
    """Quantize: ``descale = max|x| / format.max`` over what shares it, ``code = encode(x / descale)`` (0x06).

    Parameters
    ----------
    x : numpy.ndarray
        Shape ``(batch, seqlen, heads, head_dim)``, finite.
    granularity : {"tensor", "head", "block"}
        What shares a descale: everything; each scale head of each batch; each block of rows of a scale head.
    block : int, optional
        Rows per block, for ``"block"`` only.
    scale_heads : int, optional
        Heads that have descales of their own, `heads` by default. For Q the public call of FlashAttention-3 has one per
        key/value head: pass ``heads_kv``.
    descale : numpy.ndarray, optional
        Use these, ``(batch, scale_heads, blocks)``, and refuse values that they drive out of range. Rows are then cut
        into ``ceil(seqlen / blocks)`` each, or `block`.
    format : Format, optional
        E4M3FN by default.
    dtype : data-type, optional
        float32 as on the machine; float64 for studies in which only the codes shall round.

    Returns
    -------
    Float8
        A block of zeros gets the descale 1.

    Raises
    ------
    ValueError
        If `x` is not finite, or an option does not fit.
    ValueOutOfRange
        If a given descale is too small for its block.

    Examples
    --------
    >>> x = np.array([1.0, 100.0, 0.5, 2.0]).reshape(1, 4, 1, 1)
    >>> quantize(x, "tensor").descale * np.float32(4.48), quantize(x, "block", block=2).descale.shape
    (array([[[1.]]], dtype=float32), (1, 1, 2))
    """
    if x.ndim != 4 or not np.isfinite(x).all():
        raise ValueError("fp8: x must have the axes (batch, seqlen, heads, head_dim) and finite values")
    if granularity not in ("tensor", "head", "block") or (granularity == "block") != (block is not None):
        raise ValueError(
            f"fp8: granularity {granularity!r} with block {block}; block goes with 'block', and only with it"
        )
    _, seqlen, heads, _ = x.shape
    scale_heads = heads if scale_heads is None else scale_heads
    if scale_heads < 1 or heads % scale_heads:
        raise ValueError(f"fp8: {scale_heads} scale heads do not divide {heads} heads")
    rows = max(1, seqlen) if block is None else block
    check_range("fp8", 1, block=rows)
    if descale is None:
        descale = _descales(x, granularity, rows, scale_heads, format).astype(dtype)
    result = Float8(np.zeros(x.shape, np.uint8), np.asarray(descale, dtype=dtype), rows, format)
    scaled = x.astype(dtype) / result.row_descales()[..., None]
    # A descale that was itself rounded may leave the largest value a rounding error above the limit; that is no fault.
    if scaled.size and np.abs(scaled).max() > format.max * (1 + 1e-6):
        raise ValueOutOfRange(
            f"fp8: max|x| / descale is {np.abs(scaled).max():g}, above {format.max:g}: it would saturate"
        )
    return Float8(format.encode(scaled).astype(np.uint8), result.descale, rows, format)


def _descales(x: Array, granularity: str, rows: int, scale_heads: int, format: Format) -> npt.NDArray[np.float64]:
    """Return ``max|x| / format.max`` per block, shape ``(batch, scale_heads, blocks)``; 1 where all is zero."""
    batch, seqlen, heads, _ = x.shape
    row_max = np.abs(x).max(axis=-1, initial=0).astype(np.float64)
    row_max = row_max.reshape(batch, seqlen, scale_heads, heads // scale_heads).max(axis=-1, initial=0)
    blocks = max(1, -(-seqlen // rows))
    padded = np.zeros((batch, blocks * rows, scale_heads))
    padded[:, :seqlen] = row_max
    largest = padded.reshape(batch, blocks, rows, scale_heads).max(axis=2).swapaxes(1, 2)
    if granularity == "tensor":
        largest = np.full_like(largest, largest.max(initial=0))
    return np.where(largest > 0, largest / format.max, 1.0)


def api_descale(descale: Array | None, batch: int, heads_kv: int) -> Array:
    """Bring a descale of the public call to the shape of `Float8.descale`.

    FlashAttention-3's C++ interface takes ``(batch, heads_kv)`` for Q, K and V alike, Q included, and 1 for a missing
    one; block descales as in the paper do not fit through it (specification 0x06).

    Parameters
    ----------
    descale : numpy.ndarray or None
        Shape ``(batch, heads_kv)``.
    batch, heads_kv : int
        Of the problem.

    Returns
    -------
    numpy.ndarray
        float32, shape ``(batch, heads_kv, 1)``.

    Raises
    ------
    DescaleAxisMismatch
        If the shape is another one.
    InvalidDescale
        If a descale is zero, negative, NaN or infinite.

    Examples
    --------
    >>> api_descale(None, 1, 2).tolist()
    [[[1.0], [1.0]]]
    """
    if descale is None:
        return np.ones((batch, heads_kv, 1), np.float32)
    if descale.shape != (batch, heads_kv):
        raise DescaleAxisMismatch(f"fp8: descale has shape {descale.shape}; it must be (batch, heads_kv)")
    if not (np.isfinite(descale).all() and (descale > 0).all()):
        raise InvalidDescale("fp8: every descale must be finite and greater than zero")
    return descale.astype(np.float32)[:, :, None]


def check_admission(format: Format, compute_capability: int, head_dim: int, last_axis_contiguous: bool = True) -> str:
    """Raise unless FlashAttention-3's public call takes such FP8 operands; return the format of its output.

    The template behind the call knows E5M2 too. The call does not offer it (specification 0x06).

    Parameters
    ----------
    format : Format
        Of Q, K and V.
    compute_capability : int
        90 for Hopper.
    head_dim : int
        Elements per vector.
    last_axis_contiguous : bool, optional
        Whether the elements of a vector are neighbours in memory.

    Returns
    -------
    str
        ``"bfloat16"``.

    Raises
    ------
    NotAdmitted
        If it does not.

    Examples
    --------
    >>> check_admission(E4M3FN, 90, 128)
    'bfloat16'
    """
    if format != E4M3FN:
        raise NotAdmitted(f"fp8: {format.name} operands; the public call takes {E4M3FN.name} only")
    if compute_capability < 90:
        raise NotAdmitted(f"fp8: compute capability {compute_capability}; 90 or higher is needed")
    if head_dim % 16 or head_dim < 16:
        raise NotAdmitted(f"fp8: head_dim {head_dim} is no multiple of 16")
    if not last_axis_contiguous:
        raise NotAdmitted("fp8: the last axis must be contiguous")
    return PRECISION["out"]
