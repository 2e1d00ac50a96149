"""How much memory a call needs beside its arguments."""

from __future__ import annotations

from typing import Any

from cupyfa.backward_dispatch import prepare_backward_there
from cupyfa.backward_problem import BackwardArrays
from cupyfa.dispatch import prepare_there
from cupyfa.operand import Arrays, Layout
from cupyfa.options import WindowSize, check_flag, check_options, with_max_seqlen
from cupyfa.select import Config

__all__ = ["backward_workspace_size", "workspace_size"]


def workspace_size(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float | None = None,
    sink: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    layout: Layout = "BSHD",
    out: Any = None,
    config: Config | None = None,
) -> int:
    """Return how many bytes a call of :func:`cupyfa.attention` or :func:`cupyfa.attention_varlen` needs.

    Parameters
    ----------
    q, k, v : array
        CuPy arrays as for the call. Their data do not matter; their strides and addresses do, because what TMA cannot
        read in place is copied into the workspace.
    cu_seqlens_q, cu_seqlens_k : array, optional
        Of packed sequences; without them, the call is one of ``attention``.
    max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        As for the call.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias, layout
        As for the call.
    out : array, optional
        As for the call, if it is passed there; a new one needs no copy.
    config
        As for the call.

    Returns
    -------
    int
        The size of ``workspace``; 0 where a call needs none. A call of ``attention`` needs some only for copies.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As for the call.

    Examples
    --------
    >>> size = workspace_size(q, k, v, offsets, offsets, causal=True)  # doctest: +SKIP
    >>> workspace = cupy.empty(size, cupy.uint8)  # doctest: +SKIP
    >>> columns = cupy.zeros((1, 64, 8, 65), cupy.float16)[..., :64]  # doctest: +SKIP
    >>> workspace_size(columns, columns, columns)  # 3 copies of 64 KiB # doctest: +SKIP
    196608
    """
    options = check_options(softmax_scale, causal, window_size, softcap, layout)
    options = with_max_seqlen(options, max_seqlen_q, max_seqlen_k, bias is not None)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = Arrays(q, k, v, out, None, sink, alibi_slopes, bias, *lengths)
    return prepare_there(arrays, options, config).workspace_bytes


def backward_workspace_size(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float | None = None,
    sink: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    layout: Layout = "BSHD",
    dlse: Any = None,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsink: Any = None,
    dbias: Any = None,
    config: Config | None = None,
) -> int:
    """Return how many bytes a call of :func:`cupyfa.attention_backward` or its packed sibling needs.

    Parameters
    ----------
    dout, q, k, v, out, lse : array
        CuPy arrays as for the call. Their data do not matter, their strides and addresses do.
    cu_seqlens_q, cu_seqlens_k : array, optional
        Of packed sequences; without them, the call is one of ``attention_backward``.
    max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        As for the call.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias, layout, dlse, deterministic
        As for the call.
    dq, dk, dv, dsink, dbias : array, optional
        As for the call, if they are passed there; new ones need no copies.
    config
        As for the call.

    Returns
    -------
    int
        The size of ``workspace``: a float32 sum of dq, which is twice as large as dq and padded to whole tiles, of each
        packed sequence by itself, two numbers for each row, and copies of what TMA cannot take where it is. 0 if there
        is no row, or no key.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As for the call.

    Examples
    --------
    >>> size = backward_workspace_size(dout, q, k, v, out, lse, causal=True)  # doctest: +SKIP
    >>> workspace = cupy.empty(size, cupy.uint8)  # doctest: +SKIP
    >>> given = {"dq": dq, "dk": dk, "dv": dv, "workspace": workspace}  # doctest: +SKIP
    >>> attention_backward(dout, q, k, v, out, lse, causal=True, **given)  # allocates nothing # doctest: +SKIP
    """
    deterministic = check_flag("deterministic", deterministic)
    options = check_options(softmax_scale, causal, window_size, softcap, layout)
    options = with_max_seqlen(options, max_seqlen_q, max_seqlen_k, bias is not None)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = BackwardArrays(
        dout, q, k, v, out, lse, dlse, sink, alibi_slopes, bias, dq, dk, dv, dsink, dbias, *lengths
    )  # fmt: skip
    return prepare_backward_there(arrays, options, deterministic, config).workspace_bytes
