"""Attention over sequences of one length."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

from cupyfa.dispatch import Backend, attend
from cupyfa.operand import Arrays, Layout
from cupyfa.options import WindowSize, check_flag, check_options
from cupyfa.select import Config

__all__ = ["AttentionResult", "attention"]


class AttentionResult(NamedTuple):
    """Output and logarithm of the row sums.

    Attributes
    ----------
    out : numpy.ndarray or cupy.ndarray
        Shape and dtype of ``q``, but for the last axis, which is as long as that of ``v``.
    lse : numpy.ndarray or cupy.ndarray
        float32, (batch, heads_q, seqlen_q), natural logarithm.
    """

    out: Any
    lse: Any


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: WindowSize = ...,
    softcap: float | None = ...,
    sink: Any = ...,
    alibi_slopes: Any = ...,
    bias: Any = ...,
    seqused_q: Any = ...,
    seqused_k: Any = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    out: Any = ...,
    lse: Any = ...,
    workspace: Any = ...,
    backend: Backend | None = ...,
    config: Config | None = ...,
) -> Any: ...


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: WindowSize = ...,
    softcap: float | None = ...,
    sink: Any = ...,
    alibi_slopes: Any = ...,
    bias: Any = ...,
    seqused_q: Any = ...,
    seqused_k: Any = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
    out: Any = ...,
    lse: Any = ...,
    workspace: Any = ...,
    backend: Backend | None = ...,
    config: Config | None = ...,
) -> AttentionResult: ...


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float | None = None,
    sink: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    layout: Layout = "BSHD",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    backend: Backend | None = None,
    config: Config | None = None,
) -> Any:
    """Compute softmax(softmax_scale * Q K') V for every head, with the usual masks and score modifiers.

    CuPy arrays are computed by a CUDA kernel on the current stream, NumPy arrays by the oracle on the CPU.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        float16 or ``ml_dtypes.bfloat16``. head_dim is a multiple of 8, at most 256. Any strides will do; the Notes say
        which cost a copy.
    k : array, (batch, seqlen_k, heads_kv, head_dim)
        Same dtype and place; query head ``h`` uses head ``h // (heads_q // heads_kv)``.
    v : array, (batch, seqlen_k, heads_kv, head_dim_v)
        Same dtype and place; head_dim_v is a multiple of 8, at most 256, and may differ from head_dim.
    softmax_scale : float, optional
        Factor of the scores, 1/sqrt(head_dim) by default. 0 and negative factors are fine.
    causal : bool
        Row ``i`` sees the keys ``j <= i + seqlen_k - seqlen_q`` (aligned bottom-right).
    window_size : tuple of int or None, (left, right)
        Row ``i`` sees the keys from ``i + seqlen_k - seqlen_q - left`` to ``i + seqlen_k - seqlen_q + right``, both
        included; None or -1 for no bound. With ``causal`` the right side is 0. Keys outside cost nothing.
    softcap : float, optional
        At most 1000. Scaled scores become ``softcap * tanh(score / softcap)``.
    sink : array, optional, (heads_q,)
        float32; a magnitude below 1e38, or -inf. One more logit of each row, which takes part in the softmax and has no
        value.
    alibi_slopes : array, optional, (heads_q,) or (batch, heads_q)
        float32. ``slope * |i + seqlen_k - seqlen_q - j|`` is taken from the scaled (and capped) score of row ``i`` and
        key ``j``.
    bias : array, optional, broadcast to (batch, heads_q, seqlen_q, seqlen_k)
        float32 or the dtype of ``q``; 2 to 4 axes. Is added to the scaled (and capped) score, before the mask; -inf
        hides a key. On the GPU it is read in place: fast where the last axis is contiguous, and the address and the
        other strides are multiples of 16 bytes, none of them negative.
    seqused_q, seqused_k : array, optional, (batch,)
        int32, contiguous. Only so many of the first rows, and of the first keys, of each sequence are used: masks are
        aligned to these lengths, keys behind them are never looked at, and rows behind them see no key. On the GPU they
        stay there, and a captured call takes those of each replay; a negative number counts as 0, one beyond the length
        as the length. With ``CUPYFA_DEBUG=1`` in the environment such a number is a ValueError, at the price of a wait
        for the GPU in each call; NumPy arrays are always checked.
    layout : {"BSHD", "BHSD"}
        ``"BHSD"``: q, k, v and out are (batch, heads, seqlen, head_dim).
    return_lse : bool
        Also return the logarithm of the row sums.
    out : array, optional
        (batch, seqlen_q, heads_q, head_dim_v), dtype of ``q``, written in place and returned; no memory in common with
        other arguments.
    lse : array, optional
        float32, (batch, heads_q, seqlen_q), written in place, whatever ``return_lse`` is.
    workspace : array, optional
        uint8, at least :func:`cupyfa.workspace_size` bytes, for copies (see the Notes), and for the plan that lengths
        need; new memory by default. No memory in common with other arguments.
    backend : {"emulator"}, optional
        ``"emulator"`` runs the kernel that CuPy arrays would get on an H200, instruction by instruction, on NumPy
        arrays (it needs ``pip install 'cupyfa[compile]'``); the rules for arrays on a GPU hold. :mod:`cupyfa.emulate`
        offers schedules, seeds and reports.
    config : Mapping, optional
        Fields of :class:`cupyfa.spec.FwdSpec` to override, for experiments: ``{"pingpong": False}``. Without effect on
        NumPy arrays, except under the emulator.

    Returns
    -------
    array or AttentionResult
        The output, or ``(out, lse)`` with ``return_lse``. A row that sees no key, or is not used, has output 0 and lse
        -inf, with a sink the sink.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; the message names it, what it is and what it must be. Nothing was launched.
    UnsupportedError
        No kernel fits.
    CompileError, LaunchError
        The compiler or the driver failed.
    HazardError
        The emulator found a hazard in the kernel.

    Notes
    -----
    The algorithm is FlashAttention-3's (arXiv 2407.08608). Scores and sums are float32; the probabilities are rounded
    to the input dtype before they multiply V. Scaled scores up to a magnitude of 2^22 are meaningful: beyond, the
    rounding of a float32 product is no longer small against 1, and from about 2^27 on a row may come out as NaN.
    A scale of 0 stands for the smallest normal float32, which vanishes against scores up to 1e36.

    On the GPU, q, k, v and ``out`` are read and written where they are if their address is a multiple of 16 bytes, the
    last axis is contiguous, and the other strides are multiples of 16 bytes from 0 to 2^40: views of heads, rows,
    batches, the layout, arrays that were broadcast. Any other is copied as a whole before the kernel (``out`` behind
    it), which costs its memory and about the time to read and write it once: where the last axis was sliced to a width
    or from a place that is no multiple of 8, is reversed or has steps; where an axis runs backwards; with lengths also
    where the next batch begins in the middle of a row, as in (seqlen, batch, heads, head_dim), or behind other numbers
    of rows in k and in v. Then :func:`cupyfa.workspace_size` is not 0, and :func:`cupyfa.explain` names the copies.
    They are made by CuPy, whose kernels are loaded by the first such call: make it before a capture. All other arrays
    are read and written in place; their strides and addresses are multiples of the size of their numbers.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 4, 2, 8)).astype(np.float16) for _ in range(3))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, out.dtype, lse.shape
    ((1, 4, 2, 8), dtype('float16'), (1, 2, 4))
    >>> bool(np.all(out[:, 0] == v[:, 0]))  # the first row sees only the first key
    True
    """
    check_flag("return_lse", return_lse)
    options = check_options(softmax_scale, causal, window_size, softcap, layout)
    arrays = Arrays(q, k, v, out, lse, sink, alibi_slopes, bias, None, None, seqused_q, seqused_k)
    out, lse = attend(arrays, options, return_lse, backend, config, None, workspace)
    return AttentionResult(out, lse) if return_lse else out
