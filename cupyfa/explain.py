"""What a call would run, and why."""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any

import numpy as np

from cupyfa._launch import unpack_traits
from cupyfa.compiler import PtxasReport, compile_offline
from cupyfa.copies import Copy, plan_copies
from cupyfa.dispatch import prepare_there
from cupyfa.errors import CompileError, type_name
from cupyfa.operand import Arrays, Layout, Operand
from cupyfa.options import Options, WindowSize, check_options, with_max_seqlen
from cupyfa.packing import Packing, packed_tiles
from cupyfa.problem import Problem
from cupyfa.select import H200, Config, Selection, config_items, select
from cupyfa.spec import PlanSpec, Spec

__all__ = ["Explanation", "Rung", "compiled_rung", "describe", "explain"]


class Rung(enum.Enum):
    """How far the evidence about a kernel reaches."""

    SOURCE = "source: selected, not compiled here"
    SASS = "SASS: compiled to machine code, not run in this process"
    EMULATED = "emulated: compiled to machine code; its PTX ran under the emulator in this process, clean"
    RUN = "run: launched on this GPU in this process"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :func:`cupyfa.attention` or :func:`cupyfa.attention_varlen` would do with the same arguments.

    Attributes
    ----------
    backend : str
        ``"cuda"`` or ``"numpy"``.
    problem : Problem
        The checked problem.
    selection : Selection or None
        The spec and the fate of each candidate; None on the CPU.
    ptxas : PtxasReport or None
        Registers, spills and advisories; None if nothing was compiled.
    traits : dict or None
        Threads, shared memory and tiles; None if nothing was compiled.
    rung : Rung or None
        What has been shown about the kernel; None on the CPU.
    copied : tuple of str
        The matrices that the kernel cannot take where they are.
    planner : PlanSpec or None
        The kernel that plans sequences whose lengths are arrays; None if they are not.
    workspace_bytes : int
        What the plan and the copies need, as :func:`cupyfa.workspace_size` returns it.
    note : str
        Why something is missing.
    """

    backend: str
    problem: Problem
    selection: Selection | None = None
    ptxas: PtxasReport | None = None
    traits: dict[str, int] | None = None
    rung: Rung | None = None
    copied: tuple[str, ...] = ()
    planner: PlanSpec | None = None
    workspace_bytes: int = 0
    note: str = ""

    def __str__(self) -> str:
        """Return the explanation as text."""
        p = self.problem
        lines = [f"attention {describe(p)}"]
        if self.selection is None:
            return "\n".join([*lines, f"runs    {self.note}"])
        lines.append(f"kernel  {self.selection.spec}")
        if self.selection.overrides:
            values = (f"{name}={getattr(value, 'value', value)}" for name, value in self.selection.overrides.items())
            lines.append(f"config  {', '.join(values)}")
        for verdict in self.selection.verdicts:
            c = verdict.candidate
            mark = "chosen" if verdict.chosen else "lost  "
            lines.append(f"{mark}  {c.name:<8} {c.tile_m}x{c.tile_n:<3}  {verdict.reason}")
        if self.traits is not None:
            t = self.traits
            roles = f"{t['producer_registers']} producer, {t['consumer_registers']} consumer"
            moved = roles if t["consumer_registers"] else "not moved"
            registers = f"{self.ptxas.registers} at launch, " if self.ptxas else ""
            spills = f"{self.ptxas.spill_bytes} bytes" if self.ptxas else "unknown (the compiler's report is lost)"
            lines += [
                f"threads {t['threads']}, registers {registers}{moved}; spills {spills}",
                f"shared  {t['shared_bytes']} bytes of a CTA",
            ]
        lines += [f"ptxas   {advisory}" for advisory in (self.ptxas.advisories if self.ptxas else ())]
        if self.planner is not None:
            tiles = packed_tiles(p, self.selection.spec.tile_m)
            lines.append(f"plan    {self.planner}: one CTA before the kernel; at most {tiles} query tiles of a head")
        if self.workspace_bytes:
            lines.append(f"space   {self.workspace_bytes} bytes of workspace")
        if self.copied:
            lines.append(f"copied  {', '.join(self.copied)}: TMA does not take that where it is")
        if self.rung is not None:
            lines.append(f"rung    {self.rung.value}")
        return "\n".join([*lines, f"note    {self.note}"] if self.note else lines)


def explain(
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
    config: Config | None = None,
    arch: str | None = None,
) -> Explanation:
    """Tell what :func:`cupyfa.attention` or :func:`cupyfa.attention_varlen` would run, and why, without running it.

    Parameters
    ----------
    q, k, v : array
        As for the call; only their geometry is read, and with CuPy arrays their addresses.
    cu_seqlens_q, cu_seqlens_k : array, optional
        Of packed sequences; without them, the call is one of ``attention``.
    max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        As for the call.
    softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias, layout, config
        As for the call.
    arch : {"sm_90a"}, optional
        Explain the kernel that CuPy arrays of this geometry would get on an H200, whatever the arrays are and whatever
        GPU is here. It is compiled without a GPU if NVRTC and cuda-bindings are installed
        (``pip install 'cupyfa[compile]'``); otherwise the rung is ``source``. After a clean run of the same kernel
        under :mod:`cupyfa.emulate` in this process it is ``emulated``.

    Returns
    -------
    Explanation
        Printable.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        As the call would.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((1, 64, 2, 128), np.float16)
    >>> print(explain(x, x, x))
    attention float16: batch 1, seqlen 64 x 64, heads 2/2, head_dim 128
    runs    on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.online
    """
    if arch not in (None, "sm_90a"):
        raise ValueError(f"explain: arch is {arch!r}; it must be 'sm_90a' or None")
    options = check_options(softmax_scale, causal, window_size, softcap, layout)
    options = with_max_seqlen(options, max_seqlen_q, max_seqlen_k, bias is not None)
    arrays = Arrays(q, k, v, None, None, sink, alibi_slopes, bias, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if arch is None and not isinstance(q, np.ndarray):
        return _explain_gpu(arrays, options, config)
    if config is not None:
        config_items(config)
    device = None if arch is None else 0  # with an arch, the rules for arrays on a GPU
    for name, x in zip(arrays._fields, arrays, strict=True):
        if not hasattr(x, "strides") and not (x is None and name not in ("q", "k", "v")):
            raise TypeError(f"explain: {name} is a {type_name(type(x))}; it must be a numpy.ndarray or a cupy.ndarray")
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, device))
    problem = Problem.from_operands(operands, options, want_lse=False, current_device=device)
    if arch is None:
        oracle = "packed" if problem.planned else "online"
        return Explanation(
            "numpy", problem, note=f"on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.{oracle}"
        )
    selection = select(problem, H200, config)
    if problem.is_empty:
        return Explanation("cuda", problem, selection, note="nothing to launch: an axis is empty")
    planner, size = None, 0
    if problem.planned:
        planner, size = PlanSpec(), Packing.of(problem, selection, H200).plan_bytes
    copies = plan_copies(problem, layout, (), size)
    beside: dict[str, Any] = {
        "copied": _names(copies),
        "planner": planner,
        "workspace_bytes": copies[-1].end if copies else size,
    }
    try:
        compiled = compile_offline(selection.spec)
    except CompileError as error:
        if error.spec is not None:  # the kernel is at fault, not the installation
            raise
        return Explanation("cuda", problem, selection, rung=Rung.SOURCE, note=str(error), **beside)
    traits = unpack_traits(compiled.traits_bytes)
    return Explanation("cuda", problem, selection, compiled.report, traits, compiled_rung(selection.spec), **beside)


def compiled_rung(spec: Spec) -> Rung:
    """Return the rung of a kernel that no GPU has run; whoever has emulated it has imported the emulator.

    Parameters
    ----------
    spec : Spec
        Its compile key.

    Returns
    -------
    Rung
        Emulated or SASS.
    """
    stages = sys.modules.get("cupyfa.emulate_stage")
    return Rung.EMULATED if stages is not None and stages.ran_clean(spec) else Rung.SASS


def _explain_gpu(arrays: Arrays[Any], options: Options, config: Config | None) -> Explanation:
    problem, selection, kernel, _, planner, copies, size = prepare_there(arrays, options, config)
    if kernel is None:
        return Explanation("cuda", problem, selection, note="nothing to launch: an axis is empty")
    rung = Rung.RUN if kernel.function.launched else compiled_rung(selection.spec)
    return Explanation(
        "cuda",
        problem,
        selection,
        kernel.ptxas,
        kernel.traits,
        rung,
        copied=_names(copies),
        planner=None if planner is None else PlanSpec(),
        workspace_bytes=size,
    )


def _names(copies: tuple[Copy, ...]) -> tuple[str, ...]:
    return tuple(copy.name for copy in copies)


def describe(problem: Problem) -> str:
    """Return a problem on one line.

    Parameters
    ----------
    problem : Problem
        Checked.

    Returns
    -------
    str
        Type, sizes and options.
    """
    p, packed = problem, problem.packed is not None
    lengths = f"{p.seqlen_q} x {p.seqlen_k} rows" if packed else f"seqlen {p.seqlen_q} x {p.seqlen_k}"
    wide = f"/{p.head_dim_v}" if p.head_dim_v != p.head_dim else ""
    return (
        f"{p.dtype.value}: {'packed sequences' if packed else 'batch'} {p.batch}, {lengths}, "
        f"heads {p.heads_q}/{p.heads_kv}, head_dim {p.head_dim}{wide}{_options_of(p)}"
    )


def _options_of(problem: Problem) -> str:
    """Return what the problem has beside plain attention."""
    left, right = problem.left, problem.right
    parts = []
    if (left, right) == (None, 0):
        parts.append("causal")
    elif problem.left is not None or problem.right is not None:
        parts.append(f"window ({left}, {right})")
    if problem.softcap is not None:
        parts.append(f"softcap {problem.softcap:g}")
    parts += [name for name in ("seqused_q", "seqused_k") if getattr(problem.used, name, None) is not None]
    parts += [name for name in ("sink", "alibi_slopes") if getattr(problem, name) is not None]
    if problem.bias is not None:
        parts.append(f"bias {problem.bias.dtype}")
    return "".join(f", {part}" for part in parts)
