"""How much memory a call needs beside its arguments."""

from __future__ import annotations

from typing import Any

from cupyfa.dispatch import prepare_there
from cupyfa.operand import Arrays, Layout
from cupyfa.options import WindowSize, check_options, with_max_seqlen
from cupyfa.select import Config

__all__ = ["workspace_size"]


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
