"""Attention and its gradients from one set of options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cupyfa.attention import AttentionResult, attention
from cupyfa.backward import Gradients, attention_backward
from cupyfa.dispatch import Backend, VarlenPlan
from cupyfa.operand import Layout
from cupyfa.options import WindowSize, check_flag
from cupyfa.select import Config
from cupyfa.varlen import attention_varlen
from cupyfa.varlen_backward import attention_varlen_backward

__all__ = ["Pullback", "attention_vjp"]


@dataclasses.dataclass(frozen=True, repr=False)
class Pullback:
    """The way back of a call of :func:`attention_vjp`: from the gradients of its results to those of its inputs.

    Attributes
    ----------
    arrays : tuple of array
        q, k, v, out and lse of the call, and the offsets of packed sequences. They are kept, not copied: as they are
        when the pullback is called, they must be as they were.
    options : dict
        All options that the gradients depend on, as they were passed.
    packed : bool
        Whether the sequences are packed.
    """

    arrays: tuple[Any, ...]
    options: dict[str, Any]
    packed: bool

    def __call__(
        self,
        dout: Any,
        dlse: Any = None,
        *,
        deterministic: bool = False,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        dsink: Any = None,
        dbias: Any = None,
        workspace: Any = None,
        config: Mapping[str, Any] | None = None,
    ) -> Gradients:
        """Compute the gradients of the inputs; any number of times.

        Parameters
        ----------
        dout, dlse, deterministic, dq, dk, dv, dsink, dbias, workspace, config
            As for :func:`cupyfa.attention_backward`.

        Returns
        -------
        Gradients
            As of :func:`cupyfa.attention_backward`.
        """
        function = attention_varlen_backward if self.packed else attention_backward
        return function(
            dout,
            *self.arrays,
            **self.options,
            dlse=dlse,
            deterministic=deterministic,
            dq=dq,
            dk=dk,
            dv=dv,
            dsink=dsink,
            dbias=dbias,
            workspace=workspace,
            config=config,
        )


def attention_vjp(
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
    plan: VarlenPlan | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float | None = None,
    sink: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    layout: Layout = "BSHD",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    backend: Backend | None = None,
    config: Config | None = None,
) -> tuple[Any, Pullback]:
    """Compute attention, and return with it the function that computes its gradients.

    The options are passed once, so that those of the two calls cannot differ.

    Parameters
    ----------
    q, k, v : array
        As for :func:`cupyfa.attention`, or with offsets as for :func:`cupyfa.attention_varlen`.
    cu_seqlens_q, cu_seqlens_k : array, optional
        Of packed sequences, as for :func:`cupyfa.attention_varlen`.
    max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, plan
        Likewise.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias
        As for :func:`cupyfa.attention`.
    layout : {"BSHD", "BHSD"}
        As for :func:`cupyfa.attention`; not with packed sequences.
    return_lse : bool
        Also return the logarithm of the row sums. It is computed in any case.
    out, lse, workspace, backend, config
        As for :func:`cupyfa.attention`; ``backend`` is that of both calls, ``workspace`` and ``config`` are those of
        the forward one.

    Returns
    -------
    result : array or AttentionResult
        The output, or ``(out, lse)`` with ``return_lse``.
    pullback : Pullback
        ``pullback(dout, dlse=None, *, deterministic, dq, dk, dv, dsink, dbias, workspace, config)`` returns
        :class:`cupyfa.Gradients`. It keeps the arrays of the call, which must not be written to before.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, LaunchError, HazardError
        As for :func:`cupyfa.attention`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (rng.standard_normal((1, 4, 2, 8)).astype(np.float16) for _ in range(4))
    >>> out, pullback = attention_vjp(q, k, v, causal=True, softcap=20.0)
    >>> dq, dk, dv, dsink, dbias = pullback(dout)
    >>> dk.shape, dsink
    ((1, 4, 2, 8), None)
    """
    check_flag("return_lse", return_lse)
    packed_only = {
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "sink": sink,
        "alibi_slopes": alibi_slopes,
        "bias": bias,
        "backend": backend,
    }
    forward: dict[str, Any] = {"return_lse": True, "out": out, "lse": lse, "workspace": workspace, "config": config}
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        if layout != "BSHD":
            raise ValueError(f"attention: layout is {layout!r}; packed sequences have none, it must be 'BSHD'")
        options |= packed_only
        out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options, **forward, plan=plan)
        arrays: tuple[Any, ...] = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
    else:
        for name, value in (packed_only | {"plan": plan}).items():
            if value is not None:
                raise TypeError(f"attention: {name} is for packed sequences, which have cu_seqlens_q and cu_seqlens_k")
        options["layout"] = layout
        out, lse = attention(q, k, v, **options, **forward)
        arrays = (q, k, v, out, lse)
    pullback = Pullback(arrays, options | {"window_size": tuple(window_size)}, packed)
    return AttentionResult(out, lse) if return_lse else out, pullback
