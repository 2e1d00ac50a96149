"""What a call of attention over a cache would run, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupyfa.cache_options import CacheArrays, check_cache_length, check_cache_options
from cupyfa.cache_problem import CacheProblem
from cupyfa.decode_dispatch import prepare_cache
from cupyfa.decode_plan import decode_specs, plan_decode
from cupyfa.decode_select import DecodeSelection, decode_config, select_decode
from cupyfa.errors import type_name
from cupyfa.explained import ExplainedKernel, explain_loaded, explain_offline
from cupyfa.operand import Operand
from cupyfa.options import WindowSize
from cupyfa.select import H200, Config

__all__ = ["CacheExplanation", "explain_kvcache"]


@dataclasses.dataclass(frozen=True)
class CacheExplanation:
    """What :func:`cupyfa.attention_with_kvcache` would do with the same arguments.

    Attributes
    ----------
    problem : CacheProblem
        The checked problem.
    selection : DecodeSelection or None
        The kernel that computes, the splits and why so many; None on the CPU.
    kernels : tuple of ExplainedKernel
        All that are launched, in their order.
    workspace_bytes : int
        The size of ``workspace``.
    note : str
        Why something is missing.
    """

    problem: CacheProblem
    selection: DecodeSelection | None = None
    kernels: tuple[ExplainedKernel, ...] = ()
    workspace_bytes: int = 0
    note: str = ""

    def __str__(self) -> str:
        """Return the explanation as text."""
        p = self.problem
        pages = "" if p.page_size is None else f", pages of {p.page_size}"
        wide = "" if p.head_dim_v == p.head_dim else f"/{p.head_dim_v}"
        lines = [
            f"attention over a cache {p.dtype.value}: batch {p.batch}, seqlen {p.seqlen_q} x up to {p.capacity}{pages}"
            f", heads {p.heads_q}/{p.heads_kv}, head_dim {p.head_dim}{wide}"
        ]
        if self.selection is not None:
            s = self.selection
            clusters = f", merged by clusters of {s.cluster}" if s.cluster > 1 else ""
            lines.append(f"splits  {s.splits}{clusters}: {s.reason}")
        for kernel in self.kernels:
            lines += kernel.lines()
        if self.workspace_bytes:
            lines.append(f"memory  {self.workspace_bytes} bytes of workspace, for the parts of splits")
        return "\n".join([*lines, f"note    {self.note}"] if self.note else lines)


def explain_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float | None = None,
    sink: Any = None,
    alibi_slopes: Any = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    config: Config | None = None,
    arch: str | None = None,
) -> CacheExplanation:
    """Tell what :func:`cupyfa.attention_with_kvcache` would run with these arguments, without running it.

    Parameters
    ----------
    q, k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, k, v : array
        As for the call; only their geometry is read.
    rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_q, max_seqlen_q
        As for the call.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, num_splits, split_size, config
        As for the call.
    arch : {"sm_90a"}, optional
        Explain the kernels that CuPy arrays of this geometry would get on an H200, whatever the arrays are.

    Returns
    -------
    CacheExplanation
        Printable. Its ``workspace_bytes`` is the size of ``workspace``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As the call would.

    Examples
    --------
    >>> import numpy as np
    >>> q, cache = np.zeros((1, 1, 8, 128), np.float16), np.zeros((1, 4096, 8, 128), np.float16)
    >>> explanation = explain_kvcache(q, cache, cache, cache_seqlens=4000, arch="sm_90a")
    >>> explanation.selection.splits, explanation.workspace_bytes
    (16, 66048)
    """
    if arch not in (None, "sm_90a"):
        raise ValueError(f"explain: arch is {arch!r}; it must be 'sm_90a' or None")
    options = check_cache_options(
        softmax_scale, causal, window_size, softcap,
        max_seqlen_q=max_seqlen_q, rotary_interleaved=rotary_interleaved, num_splits=num_splits, split_size=split_size,
    )  # fmt: skip
    length = check_cache_length(cache_seqlens)
    arrays = CacheArrays(
        q, k_cache, v_cache, None, None, k, v, sink, alibi_slopes, rotary_cos, rotary_sin,
        cache_seqlens if length is None else None, page_table, cache_batch_idx, cu_seqlens_q,
    )  # fmt: skip
    if arch is None and not isinstance(q, np.ndarray):
        prepared = prepare_cache(arrays, options, False, config)
        size = 0 if prepared.plan is None else prepared.plan.workspace_bytes
        return CacheExplanation(prepared.problem, prepared.selection, explain_loaded(prepared.kernels), size)
    for name, x in zip(arrays._fields, arrays, strict=True):
        if not hasattr(x, "strides") and not (x is None and name not in ("q", "k_cache", "v_cache")):
            raise TypeError(f"explain: {name} is a {type_name(type(x))}; it must be a numpy.ndarray or a cupy.ndarray")
    device = None if arch is None else 0  # with an arch, the rules for arrays on a GPU
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, device))
    problem = CacheProblem.of(operands, options, want_lse=False, current_device=device)
    items = decode_config(config)
    if arch is None:
        note = "on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.kvcache"
        return CacheExplanation(problem, note=note)
    selection = select_decode(problem, H200, items)
    offline = explain_offline(decode_specs(problem, selection))
    plan = plan_decode(problem, selection, offline.traits)
    return CacheExplanation(problem, selection, offline.kernels, plan.workspace_bytes, offline.note)
