"""Gradients of attention over packed sequences, one sequence at a time (0x0A, 0x0B)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import backward
from .backward import Gradients, dbias_shape
from .packed import bias_of, sequences

__all__ = ["attention_backward"]

Array = npt.NDArray[Any]
Lengths = npt.NDArray[np.int32]


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array | None,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    *,
    dlse: Array | None = None,
    seqused_q: Lengths | None = None,
    seqused_k: Lengths | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    of_sequence: Callable[..., Gradients] = backward.attention_backward,
    **options: Any,
) -> Gradients:
    """Compute the gradients of attention over packed sequences (0x0A).

    Parameters
    ----------
    dout : numpy.ndarray
        Shape ``(total_q, heads_q, head_dim_v)``.
    q, k, v : numpy.ndarray
        As for `cupyfa.oracles.packed.attention`.
    out, lse : numpy.ndarray or None
        Of the forward pass, ``lse`` of shape ``(heads_q, total_q)``; or neither, if `of_sequence` can do without.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k : numpy.ndarray
        As for `cupyfa.oracles.packed.sequences`.
    dlse : numpy.ndarray, optional
        Gradient of the lse, ``(heads_q, total_q)``.
    sink, alibi_slopes, bias : numpy.ndarray, optional
        As for `cupyfa.oracles.packed.attention`.
    of_sequence : callable, optional
        The oracle of a sequence, `cupyfa.oracles.backward.attention_backward` by default.
    **options
        For `of_sequence`.

    Returns
    -------
    Gradients
        The types that `of_sequence` gives. Rows and keys of no sequence have gradient 0, whatever dout holds there, and
        so has a bias behind the end of its sequence.

    Examples
    --------
    >>> x = np.ones((5, 1, 8), np.float16)
    >>> dq, dk, dv, *_ = attention_backward(x, x, x, x, None, None, np.int32([0, 2, 4]), np.int32([0, 2, 5]))
    >>> dv[:, 0, 0].round(2).tolist()  # two rows for two keys, and two for three
    [1.0, 1.0, 0.67, 0.67, 0.67]
    """

    def of_rows(rows: slice, keys: slice, of_bias: Array | None, slopes: Array | None) -> Gradients:
        # A bias of 16 bits is widened, so that its gradient is not rounded before all sequences have added to it.
        if of_bias is not None and of_bias.dtype.itemsize < 4:
            of_bias = of_bias.astype(np.float32)
        return of_sequence(
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            None if out is None else out[None, rows],
            None if lse is None else lse[None, :, rows],
            dlse=None if dlse is None else dlse[None, :, rows],
            sink=sink,
            alibi_slopes=slopes,
            bias=of_bias,
            **options,
        )

    nothing = of_rows(slice(0), slice(0), None, None)  # for the types
    dq, dk, dv = (np.zeros(x.shape, part.dtype) for x, part in zip((q, k, v), nothing[:3], strict=True))
    wide = dq.dtype == np.float64
    dsink = None if sink is None else np.zeros(sink.shape, np.float64 if wide else np.float32)
    dbias = None if bias is None else np.zeros(dbias_shape(bias), np.float64 if wide else np.float32)
    for i, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        lengths = (i, rows.stop - rows.start, keys.stop - keys.start)
        slopes = alibi_slopes[i] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        part = of_rows(rows, keys, None if bias is None else bias_of(bias, *lengths), slopes)
        dq[rows], dk[keys], dv[keys] = part.dq[0], part.dk[0], part.dv[0]
        if dsink is not None:
            dsink += part.dsink
        if dbias is not None:
            place = bias_of(dbias, *lengths)
            place += part.dbias
    if dbias is not None and bias is not None and not wide:
        dbias = dbias.astype(bias.dtype)
    return Gradients(dq, dk, dv, dsink, dbias)
