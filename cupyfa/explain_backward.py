"""What a call for gradients would run, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupyfa.backward_dispatch import prepare_backward_there
from cupyfa.backward_launches import BackwardPlan
from cupyfa.backward_plan import backward_specs, plan_with_copies
from cupyfa.backward_problem import BackwardArrays, BackwardProblem
from cupyfa.backward_select import BWD_CANDIDATES, BackwardSelection, backward_config, select_backward
from cupyfa.copies import Copy
from cupyfa.errors import type_name
from cupyfa.explain import describe
from cupyfa.explained import ExplainedKernel, explain_loaded, explain_offline
from cupyfa.operand import Layout, Operand
from cupyfa.options import WindowSize, check_flag, check_options, with_max_seqlen
from cupyfa.select import H200, Config

__all__ = ["BackwardExplanation", "explain_backward"]

_REQUIRED = ("dout", "q", "k", "v", "out", "lse")
_NOTHING = "nothing to launch: an axis is empty"


@dataclasses.dataclass(frozen=True)
class BackwardExplanation:
    """What :func:`cupyfa.attention_backward` or its packed sibling would do with the same arguments.

    Attributes
    ----------
    problem : BackwardProblem
        The checked problem.
    selection : BackwardSelection or None
        The kernel of the main loop, why the other rows of the table are not it, and how query heads are shared among
        CTAs; None on the CPU.
    kernels : tuple of ExplainedKernel
        All that are launched, in their order.
    copied : tuple of str
        The matrices that TMA cannot take where they are.
    workspace : tuple of (str, int)
        What the workspace holds, and the bytes of each part. Empty where a kernel that says how much it needs was not
        compiled.
    workspace_bytes : int or None
        All of it, with what lies between, as :func:`cupyfa.backward_workspace_size` returns it; None if it is unknown
        for that reason.
    note : str
        Why something is missing.
    """

    problem: BackwardProblem
    selection: BackwardSelection | None = None
    kernels: tuple[ExplainedKernel, ...] = ()
    copied: tuple[str, ...] = ()
    workspace: tuple[tuple[str, int], ...] = ()
    workspace_bytes: int | None = 0
    note: str = ""

    @property
    def order(self) -> str:
        """In which order key tiles add to dq."""
        forward = self.problem.forward
        if self.selection is None:
            return "that of the oracle: the same bits each time"
        if self.problem.deterministic:
            return "from the last key tile to the first: the same bits each time"
        if forward.packed is None and forward.seqlen_k <= self.selection.spec.tile_n:
            return "there is one key tile: the same bits each time"
        return "that in which the CTAs of key tiles come: the last bits may differ from run to run"

    def __str__(self) -> str:
        """Return the explanation as text."""
        p = self.problem
        flags = [name for name, there in (("dlse", p.dlse is not None), ("deterministic", p.deterministic)) if there]
        lines = [", ".join([f"gradients {describe(p.forward)}", *flags])]
        if self.selection is None:
            return "\n".join([*lines, f"runs    {self.note}"])
        lines += self._rows(self.selection)
        if self.kernels:
            lines += [self._sharing(self.selection), f"order   in which key tiles add to dq: {self.order}"]
        for kernel in self.kernels:
            lines += kernel.lines()
        if self.workspace_bytes:
            lines.append(f"space   {self.workspace_bytes} bytes of workspace")
            lines += [f"        {size} for {name}" for name, size in self.workspace]
        if self.copied:
            lines.append(f"copied  {', '.join(self.copied)}: TMA does not take that where it is")
        return "\n".join([*lines, f"note    {self.note}"] if self.note else lines)

    @staticmethod
    def _rows(selection: BackwardSelection) -> list[str]:
        """Return the fate of each row of the table, a line for each."""
        lines = []
        for row, objection in zip(BWD_CANDIDATES, selection.objections, strict=True):
            mark, reason = ("chosen", row.reason) if row is selection.candidate else ("lost  ", objection)
            tiles = f"{row.tile_m}x{row.tile_n:<3} stages {row.q_stages}, {row.dout_stages}"
            lines.append(f"{mark}  up to {row.widest:<8} {tiles}  {reason or 'the row that is chosen comes before it'}")
        return lines

    def _sharing(self, selection: BackwardSelection) -> str:
        """Return who walks the query heads of a key head."""
        forward = self.problem.forward
        group = forward.heads_q // forward.heads_kv
        heads = f"{group} query head{'s' * (group > 1)} of a key head"
        if selection.parts == 1:
            return f"parts   1: a CTA walks {'all ' * (group > 1)}{heads}, and writes dk and dv"
        walks = f"a CTA walks {selection.heads_per_part} of {heads}, to give more multiprocessors one"
        return f"parts   {selection.parts}: {walks}; dk and dv are the sums of the parts, the first one first"


def explain_backward(
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
    arch: str | None = None,
) -> BackwardExplanation:
    """Tell what :func:`cupyfa.attention_backward` or its packed sibling would run, and why, without running it.

    Parameters
    ----------
    dout, q, k, v, out, lse : array
        As for the call; only their geometry is read, and with CuPy arrays their addresses.
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
    arch : {"sm_90a"}, optional
        Explain the kernels that CuPy arrays of this geometry would get on an H200, whatever the arrays are and whatever
        GPU is here, as :func:`cupyfa.explain` does.

    Returns
    -------
    BackwardExplanation
        Printable: the fate of each row of the table of kernels, how many CTAs share the query heads of a key head, in
        which order key tiles add to dq, the kernels with the evidence about each, and what the workspace holds.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As the call would.

    Examples
    --------
    >>> import numpy as np
    >>> x, lse = np.zeros((1, 64, 2, 128), np.float16), np.zeros((1, 2, 64), np.float32)
    >>> print(explain_backward(x, x, x, x, x, lse, causal=True))
    gradients float16: batch 1, seqlen 64 x 64, heads 2/2, head_dim 128, causal
    runs    on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.backward
    >>> explanation = explain_backward(x, x, x, x, x, lse, causal=True, arch="sm_90a")
    >>> explanation.selection.parts, explanation.order
    (1, 'there is one key tile: the same bits each time')
    """
    if arch not in (None, "sm_90a"):
        raise ValueError(f"explain: arch is {arch!r}; it must be 'sm_90a' or None")
    deterministic = check_flag("deterministic", deterministic)
    options = check_options(softmax_scale, causal, window_size, softcap, layout)
    options = with_max_seqlen(options, max_seqlen_q, max_seqlen_k, bias is not None)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = BackwardArrays(
        dout, q, k, v, out, lse, dlse, sink, alibi_slopes, bias, dq, dk, dv, dsink, dbias, *lengths
    )  # fmt: skip
    if arch is None and not isinstance(q, np.ndarray):
        prepared = prepare_backward_there(arrays, options, deterministic, config)
        return _explanation(
            prepared.problem, prepared.selection, prepared.plan, explain_loaded(prepared.kernels), prepared.copies
        )
    for name, x in zip(arrays._fields, arrays, strict=True):
        if not hasattr(x, "strides") and not (x is None and name not in _REQUIRED):
            raise TypeError(f"explain: {name} is a {type_name(type(x))}; it must be a numpy.ndarray or a cupy.ndarray")
    items = backward_config(config)
    device = None if arch is None else 0  # with an arch, the rules for arrays on a GPU
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, device))
    problem = BackwardProblem.of(operands, options, deterministic=deterministic, current_device=device)
    if arch is None:
        oracle = "backward" if problem.forward.packed is None else "packed_backward"
        note = f"on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.{oracle}"
        return BackwardExplanation(problem, note=note)
    selection = select_backward(problem, H200, items)
    if problem.is_empty:
        return _explanation(problem, selection, None, (), ())
    offline = explain_offline(backward_specs(problem, selection))
    if offline.note:  # how the rows of a preprocess kernel are divided among its CTAs decides about the workspace
        return BackwardExplanation(problem, selection, offline.kernels, workspace_bytes=None, note=offline.note)
    plan, copies = plan_with_copies(problem, selection, offline.traits, H200, options.layout, ())
    return _explanation(problem, selection, plan, offline.kernels, copies)


def _explanation(
    problem: BackwardProblem,
    selection: BackwardSelection,
    plan: BackwardPlan | None,
    kernels: tuple[ExplainedKernel, ...],
    copies: tuple[Copy, ...],
) -> BackwardExplanation:
    """Return the explanation of kernels that are compiled; none if there is no plan."""
    if plan is None:
        return BackwardExplanation(problem, selection, note=_NOTHING)
    workspace = (*((f"a copy of {copy.name}", copy.size) for copy in copies), *plan.parts.items())
    copied = tuple(copy.name for copy in copies)
    return BackwardExplanation(problem, selection, kernels, copied, workspace, plan.workspace_bytes)
