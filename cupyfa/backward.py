"""The gradients of attention over sequences of one length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cupyfa.backward_dispatch import differentiate
from cupyfa.backward_problem import BackwardArrays
from cupyfa.dispatch import Backend
from cupyfa.operand import Layout
from cupyfa.options import WindowSize, check_flag, check_options

__all__ = ["Gradients", "attention_backward"]


class Gradients(NamedTuple):
    """What a loss changes by when the inputs of attention do.

    Attributes
    ----------
    dq, dk, dv : numpy.ndarray or cupy.ndarray
        Shapes and dtypes of q, k, v.
    dsink : numpy.ndarray or cupy.ndarray or None
        float32, (heads_q,); None if there was no sink.
    dbias : numpy.ndarray or cupy.ndarray or None
        Shape and dtype of the bias, but one index along an axis that a view repeats (a stride of 0); None if there was
        no bias.
    """

    dq: Any
    dk: Any
    dv: Any
    dsink: Any = None
    dbias: Any = None


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
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
    workspace: Any = None,
    backend: Backend | None = None,
    config: Mapping[str, Any] | None = None,
) -> Gradients:
    """Compute the gradients of :func:`cupyfa.attention` from its inputs, its results and the gradients of these.

    The options must be those of the forward call; :func:`cupyfa.attention_vjp` makes both calls with the same ones.
    NumPy arrays are computed by the oracle on the CPU, CuPy arrays by kernels on Hopper: in float16 and bfloat16, with
    a head_dim of up to 256, and with all options. `UnsupportedError` names what has no kernel.

    Parameters
    ----------
    dout : array, (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of the output, dtype of ``q``. Any strides will do, here and below.
    q, k, v : array
        As for :func:`cupyfa.attention`.
    out : array, (batch, seqlen_q, heads_q, head_dim_v)
        Output of the forward call, dtype of ``q``.
    lse : array, (batch, heads_q, seqlen_q)
        float32; of the forward call.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias, layout
        As for :func:`cupyfa.attention`.
    dlse : array, optional, (batch, heads_q, seqlen_q)
        float32: gradient of the lse, 0 by default. What it holds for a row that sees no key does not matter, except to
        a sink, which is the lse of that row.
    deterministic : bool
        Add up in one order, so that equal arguments give equal bits. On the CPU it always is so. On the GPU only dq
        depends on it, and no sum of a bias: without it, CTAs add to dq in the order in which they come.
    dq, dk, dv : array, optional
        Shapes and dtypes of q, k, v; written in place and returned. No memory in common with other arguments.
    dsink, dbias : array, optional
        As :class:`Gradients` describes them; likewise.
    workspace : array, optional
        uint8, at least :func:`cupyfa.backward_workspace_size` bytes: memory for intermediate results on the GPU; new
        memory by default. What it holds does not matter. No two calls may use it at the same time.
    backend, config
        As for :func:`cupyfa.attention`.

    Returns
    -------
    Gradients
        ``(dq, dk, dv, dsink, dbias)``. A key head gets the sum over the query heads that share it, and a bias that over
        the axes along which it repeats. Rows that see no key, and keys that no row sees, have gradients of exactly 0.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, LaunchError, HazardError
        As for :func:`cupyfa.attention`. Nothing was written.

    Notes
    -----
    With the logits L of a row, ``P = exp(L - lse)``, ``dL = P (dout V' - delta)`` and ``delta = dout . out - dlse``:
    nothing of size seqlen_q * seqlen_k is kept between the calls (arXiv 2307.08691, 2407.08608). A row is as exact as
    its float32 lse: logits of a magnitude of 10^4 leave probabilities three digits, and a row whose logits are all near
    the end of float32 none, a bias of -3e38 for one; hide keys by -inf or a mask.

    ALiBi slopes get no gradient.

    A call launches three to seven kernels on the current stream, and does not wait for them. A warm one can be captured
    in a graph, with all gradients and ``workspace`` given; replays of the graph share them, and must not overlap.

    On the GPU a bias with rows and columns is copied to ``workspace`` where TMA cannot take it: where it does not begin
    at a multiple of 16 bytes, where its rows do not, or where neighbouring keys are not neighbours in memory. Its
    gradient is computed by another kernel, of scores that it computes once more: in float32, in one order, and rounded
    once; sums need no memory. One that is the sum over most axes is computed by few CTAs.

    On the GPU P and dS are rounded to the dtype of q as operands of their products; sums are float32. Where key tiles
    are too few to fill the GPU, CTAs share the query heads of a key head, and dk and dv are the sums of their parts,
    in a fixed order; how many parts follows from the shapes and the GPU.

    Examples
    --------
    >>> import cupyfa, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (rng.standard_normal((1, 4, 2, 8)).astype(np.float16) for _ in range(4))
    >>> out, lse = cupyfa.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv, _, _ = attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> dq.shape, dq.dtype
    ((1, 4, 2, 8), dtype('float16'))
    >>> bool(np.all(dv[:, 3] == 0)), bool(np.all(abs(dq[:, 0]) < 1e-3))  # the first row sees one key
    (False, True)
    """
    deterministic = check_flag("deterministic", deterministic)
    options = check_options(softmax_scale, causal, window_size, softcap, layout)
    arrays = BackwardArrays(
        dout, q, k, v, out, lse, dlse, sink, alibi_slopes, bias, dq, dk, dv, dsink, dbias
    )  # fmt: skip
    done = differentiate(arrays, options, deterministic, backend, config, workspace)
    return Gradients(done.dq, done.dk, done.dv, done.dsink, done.dbias)
