"""The gradients of attention over packed sequences of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyfa.backward import Gradients
from cupyfa.backward_dispatch import differentiate
from cupyfa.backward_problem import BackwardArrays
from cupyfa.dispatch import Backend
from cupyfa.options import WindowSize, check_flag, check_options, with_max_seqlen

__all__ = ["attention_varlen_backward"]


def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
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
    dlse: Any = None,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsink: Any = None,
    dbias: Any = None,
    workspace: Any = None,
    backend: Backend | None = None,
    config: Mapping[str, Any] | None = None,
) -> Gradients:
    """Compute the gradients of :func:`cupyfa.attention_varlen`.

    The lengths stay on the GPU, as there: no call waits for it, and a captured call takes the lengths of each replay.

    Parameters
    ----------
    dout : array, (total_q, heads_q, head_dim_v)
        As for :func:`cupyfa.attention_backward`.
    q, k, v : array
        As for :func:`cupyfa.attention_varlen`.
    out : array, (total_q, heads_q, head_dim_v)
        Output of the forward call.
    lse : array, (heads_q, total_q)
        float32; of the forward call.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        As for :func:`cupyfa.attention_varlen`.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias
        As for :func:`cupyfa.attention_varlen`.
    dlse : array, optional, (heads_q, total_q)
        As for :func:`cupyfa.attention_backward`.
    deterministic, dq, dk, dv, dsink, dbias, workspace, backend, config
        As for :func:`cupyfa.attention_backward`.

    Returns
    -------
    Gradients
        As of :func:`cupyfa.attention_backward`. Rows and keys of no sequence have gradients of 0, whatever the arrays
        hold there, and so has a bias behind the end of all sequences.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, LaunchError, HazardError
        As for :func:`cupyfa.attention_varlen`. Nothing was written.

    Notes
    -----
    On the GPU a call launches four or five kernels, of which the first one plans. No two thread blocks add to the same
    dk or dv, so that their bits depend on nothing but the arguments, as those of dq do with ``deterministic``.

    Examples
    --------
    >>> import cupyfa, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (rng.standard_normal((9, 2, 8)).astype(np.float16) for _ in range(4))
    >>> offsets = np.array([0, 4, 4, 8], np.int32)  # sequences of 4, 0 and 4 rows, and a row of none
    >>> out, lse = cupyfa.attention_varlen(q, k, v, offsets, offsets, return_lse=True)
    >>> dq, dk, dv, *_ = attention_varlen_backward(dout, q, k, v, out, lse, offsets, offsets)
    >>> dk.shape, bool(np.any(dk[:8])), bool(np.any(dk[8]))
    ((9, 2, 8), True, False)
    """
    deterministic = check_flag("deterministic", deterministic)
    options = check_options(softmax_scale, causal, window_size, softcap)
    options = with_max_seqlen(options, max_seqlen_q, max_seqlen_k, bias is not None)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None:
            raise TypeError(f"attention: {name} is None; it must be an array of int32 with batch + 1 entries")
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = BackwardArrays(
        dout, q, k, v, out, lse, dlse, sink, alibi_slopes, bias, dq, dk, dv, dsink, dbias, *lengths
    )  # fmt: skip
    done = differentiate(arrays, options, deterministic, backend, config, workspace)
    return Gradients(done.dq, done.dk, done.dv, done.dsink, done.dbias)
