"""Attention over packed sequences of different lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyfa.attention import AttentionResult
from cupyfa.dispatch import Backend, VarlenPlan, attend, make_plan
from cupyfa.operand import Arrays
from cupyfa.options import WindowSize, check_flag, check_options, with_max_seqlen
from cupyfa.select import Config

__all__ = ["attention_varlen", "plan_varlen"]


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    plan: VarlenPlan | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float | None = None,
    sink: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    backend: Backend | None = None,
    config: Config | None = None,
) -> Any:
    """Attention over sequences that lie one behind the other in one array, each with itself alone.

    The lengths stay on the GPU: no call waits for it, and a captured call takes the lengths of each replay. Sequences
    may be empty, on either side, and there may be any number of them. The longest are computed first.

    Parameters
    ----------
    q : array, (total_q, heads_q, head_dim)
        As for :func:`cupyfa.attention`.
    k : array, (total_k, heads_kv, head_dim)
        As for :func:`cupyfa.attention`.
    v : array, (total_k, heads_kv, head_dim_v)
        As for :func:`cupyfa.attention`.
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,)
        int32, contiguous. Sequence ``i`` has the rows from ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]`` of q, and
        likewise those of k and v. Ascending, from 0 to the length of the arrays, which may be longer. If they are not,
        no sequence is computed: all of ``out`` is 0. With ``CUPYFA_DEBUG=1`` in the environment that is a ValueError
        that names the index, at the price of a wait for the GPU in each call; NumPy arrays are always checked.
    max_seqlen_q, max_seqlen_k : int, optional
        The length of the longest sequence, or what is expected of it. The first helps to choose a kernel; neither
        changes the result, whatever it is. A ``bias`` has to have as many rows and keys.
    seqused_q, seqused_k : array, (batch,), optional
        int32, contiguous. Only so many of the first rows of each sequence are used. A negative number counts as 0, one
        beyond the length as the length.
    plan : VarlenPlan, optional
        From :func:`plan_varlen` with the same shapes, lengths and options: then no plan is made, and the lengths are
        those of the plan.
    softmax_scale, causal, window_size, softcap, sink
        As for :func:`cupyfa.attention`, by sequence.
    alibi_slopes : array, optional, (heads_q,) or (batch, heads_q)
        As for :func:`cupyfa.attention`.
    bias : array, optional, broadcast to (batch, heads_q, max_seqlen_q, max_seqlen_k)
        As for :func:`cupyfa.attention`; rows and keys are counted from the beginning of their sequence. It may have
        more of them than the longest sequence uses. If it has fewer, it is 0 behind its end; where the lengths are
        checked, see ``cu_seqlens_q``, that is a ValueError.
    return_lse : bool
        Also return the logarithm of the row sums.
    out : array, optional
        (total_q, heads_q, head_dim_v), dtype of ``q``, written in place and returned.
    lse : array, optional
        float32, (heads_q, total_q), written in place.
    workspace : array, optional
        uint8, at least :func:`cupyfa.workspace_size` bytes, instead of new memory: where the plan goes, and behind it
        copies (see the Notes). No memory in common with other arguments; ``plan`` may have been made in the same one.
    backend, config
        As for :func:`cupyfa.attention`.

    Returns
    -------
    array or AttentionResult
        The output, or ``(out, lse)`` with ``return_lse``. Rows that see no key, and those of no sequence, have output 0
        and lse -inf, with a sink the sink.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, LaunchError, HazardError
        As for :func:`cupyfa.attention`.

    Notes
    -----
    Keys and values behind the end of a sequence are not read, and neither are those of its neighbours: a NaN there does
    no harm.

    What is copied, and when, is as for :func:`cupyfa.attention`, but that the stride from row to row is below 2^34.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((9, 2, 8)).astype(np.float16) for _ in range(3))
    >>> offsets = np.array([0, 4, 4, 9], np.int32)  # sequences of 4, 0 and 5 rows
    >>> out, lse = attention_varlen(q, k, v, offsets, offsets, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((9, 2, 8), (2, 9))
    >>> bool(np.all(out[4] == v[4]))  # the first row of the third sequence sees only its first key
    True
    """
    check_flag("return_lse", return_lse)
    options = check_options(softmax_scale, causal, window_size, softcap)
    options = with_max_seqlen(options, max_seqlen_q, max_seqlen_k, bias is not None)
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = Arrays(q, k, v, out, lse, sink, alibi_slopes, bias, *lengths)
    out, lse = attend(arrays, options, return_lse, backend, config, plan, workspace)
    return AttentionResult(out, lse) if return_lse else out


def plan_varlen(
    q: Any,
    k: Any,
    v: Any,
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
    workspace: Any = None,
    config: Config | None = None,
) -> VarlenPlan:
    """Plan the tiles of packed sequences, for calls of :func:`attention_varlen` that have the same lengths.

    Parameters
    ----------
    q, k, v : array
        As for :func:`attention_varlen`: CuPy arrays, of which only the geometry matters.
    cu_seqlens_q, cu_seqlens_k : array
        As for :func:`attention_varlen`; the plan keeps what they hold when the stream comes there.
    max_seqlen_q, max_seqlen_k : int, optional
        As for :func:`attention_varlen`.
    seqused_q, seqused_k : array, optional
        Like the offsets.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias
        As for :func:`attention_varlen`.
    workspace : array, optional
        uint8, at least :func:`cupyfa.workspace_size` bytes: where the plan goes, instead of new memory.
    config
        As for :func:`attention_varlen`.

    Returns
    -------
    VarlenPlan
        To be passed as ``plan``. It can be made under capture, and is made anew by each replay.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, LaunchError
        As for :func:`attention_varlen`.

    Examples
    --------
    >>> plan = plan_varlen(q, k, v, offsets, offsets, causal=True)  # doctest: +SKIP
    >>> for layer in layers:  # doctest: +SKIP
    ...     q, k, v = layer.project(x)
    ...     x = layer.finish(attention_varlen(q, k, v, offsets, offsets, causal=True, plan=plan))
    """
    options = check_options(softmax_scale, causal, window_size, softcap)
    options = with_max_seqlen(options, max_seqlen_q, max_seqlen_k, bias is not None)
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if isinstance(q, np.ndarray):
        raise TypeError("attention: q is a numpy.ndarray; a plan is made on the GPU, for CuPy arrays")
    arrays = Arrays(q, k, v, None, None, sink, alibi_slopes, bias, *lengths)
    return make_plan(arrays, options, config, workspace)


def _lengths(cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any) -> tuple[Any, Any, Any, Any]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(f"attention: {name} is None; it must be an array of int32 with batch + 1 entries")
    return cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
