"""Public calls under the emulator: the spec that ``select`` chooses, its PTX, the packed parameters, on NumPy arrays.

The emulated device is a GPU of a named architecture; nothing else differs from a launch: checks, selection, launch plan
and packing are those of the GPU path. Tensor maps alone are the emulator's own, because the driver's cannot be made
without a driver.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import numpy as np

from cupyfa._launch import ForwardLauncher, Function, unpack_traits
from cupyfa.compiler import compile_ptx
from cupyfa.copies import Copy, plan_copies, with_copies
from cupyfa.emulate_stage import Stage, check_numpy, launch_stages, tensor_maps
from cupyfa.emulator import EmulatedDevice, EmulatedKernel, Run
from cupyfa.operand import Addresses, Arrays, Layout, Operand, host_addresses
from cupyfa.options import Options, WindowSize, check_options
from cupyfa.packing import Packing
from cupyfa.plan import fill_without_keys, plan_forward
from cupyfa.problem import Problem, check_alignment, check_overlap
from cupyfa.select import H200, Config, Device, Selection, select
from cupyfa.spec import PlanSpec, Spec

__all__ = [
    "ARCHITECTURES",
    "EmulatedAttention",
    "is_aligned",
    "Prepared",
    "attention",
    "kernel_of",
    "prepare",
    "prepare_arrays",
]

#: Architecture -> the device that stands for it.
ARCHITECTURES: dict[str, Device] = {"sm_90a": H200}

_NAN = 0xFF  # each byte of one, in both formats: what the kernel leaves out of a copy shows


@functools.cache
def kernel_of(spec: Spec) -> tuple[EmulatedKernel, dict[str, int]]:
    """Return the kernel of a spec, compiled to PTX and decoded, and its traits.

    Parameters
    ----------
    spec : Spec
        The compile key.

    Returns
    -------
    tuple of EmulatedKernel and dict
        The kernel, on a device of its own; ``kernel.on(device)`` moves it.
    """
    compiled = compile_ptx(spec)
    kernel = EmulatedDevice(spec.arch).load(compiled.ptx).kernel(compiled.symbol)
    return kernel, unpack_traits(compiled.traits_bytes)


@dataclasses.dataclass(frozen=True)
class Planning:
    """The kernel that makes the plan of packed sequences, ready to run.

    Attributes
    ----------
    kernel : EmulatedKernel
        The kernel.
    threads : int
        Of its CTA.
    params : bytes
        The packed parameters.
    plan : ndarray
        uint8; where the plan goes.
    """

    kernel: EmulatedKernel
    threads: int
    params: bytes
    plan: np.ndarray[Any, Any]

    def launch(self, **options: Any) -> Run:
        """Make the plan.

        Parameters
        ----------
        **options
            As for :meth:`Prepared.launch`.

        Returns
        -------
        Run
            What was found.
        """
        return self.kernel.launch(grid=1, block=self.threads, cluster=1, shared=0, params=self.params, **options)


class Copied(NamedTuple):
    """A matrix that the kernel cannot take where it is, and the memory that it takes instead.

    Attributes
    ----------
    copy : Copy
        What the memory holds.
    matrix : ndarray
        The user's.
    memory : ndarray
        uint8.
    """

    copy: Copy
    matrix: np.ndarray[Any, Any]
    memory: np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call that is ready to run under any schedule.

    Attributes
    ----------
    problem, selection
        As on the GPU path.
    kernel : EmulatedKernel or None
        None: there is nothing to launch.
    launcher : ForwardLauncher or None
        Geometry and parameters.
    params : bytes
        The packed parameters.
    out, lse : ndarray
        Where the kernel writes.
    sink : ndarray or None
        As it was passed.
    counter : ndarray
        From which its CTAs draw tiles.
    planning : Planning or None
        Of packed sequences.
    copied : tuple of Copied
        Matrices that TMA cannot take; a launch copies them before and after.
    """

    problem: Problem
    selection: Selection
    kernel: EmulatedKernel | None
    launcher: ForwardLauncher | None
    params: bytes
    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any] | None
    sink: np.ndarray[Any, Any] | None
    counter: np.ndarray[Any, Any]
    planning: Planning | None = None
    copied: tuple[Copied, ...] = ()

    def launch(self, kernel: EmulatedKernel | None = None, **options: Any) -> Run:
        """Run the kernel.

        Parameters
        ----------
        kernel : EmulatedKernel, optional
            Another one in its place: a mutant.
        **options
            As for :meth:`cupyfa.emulate_stage.Stage.launch`: ``policy``, ``seed`` and others.

        Returns
        -------
        Run
            What was found.
        """
        if self.kernel is None or self.launcher is None:
            fill_without_keys(self.out, self.lse, self.sink)
            return launch_stages((), self.selection.spec.arch, **options)
        for copy, matrix, memory in self.copied:
            if copy.name == "out":
                memory[...] = _NAN
            else:
                copy.read(matrix, memory)
        if self.planning is not None:
            run = self.planning.launch(**options)
            if run.verdict != "clean":
                return run
        self.counter[...] = 0  # a run that was stopped, or a mutant, may have left it elsewhere
        stage = Stage(self.selection.spec, self.kernel, self.launcher.geometry, self.params)
        run = stage.launch(kernel, **options)
        for copy, matrix, memory in self.copied:
            if copy.name == "out":
                copy.write(matrix, memory)
        return run


def prepare(
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
    out: Any = None,
    lse: Any = None,
    **device: Any,
) -> Prepared:
    """Check NumPy arrays as a GPU call would, select, compile and pack.

    Parameters
    ----------
    q, k, v, softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias, seqused_q, seqused_k
        As for :func:`cupyfa.attention`.
    layout, out, lse
        As for :func:`cupyfa.attention`.
    **device
        As for :func:`prepare_arrays`.

    Returns
    -------
    Prepared
        Ready to launch.
    """
    options = check_options(softmax_scale, causal, window_size, softcap, layout)
    arrays = Arrays(q, k, v, out, lse, sink, alibi_slopes, bias, None, None, seqused_q, seqused_k)
    return prepare_arrays(arrays, options, **device)


def prepare_arrays(
    arrays: Arrays[Any],
    options: Options,
    *,
    want_lse: bool = True,
    config: Config | None = None,
    arch: str = "sm_90a",
    sms: int | None = None,
) -> Prepared:
    """Check NumPy arrays as a GPU call would, select, compile and pack.

    Parameters
    ----------
    arrays : Arrays
        As the user passed them.
    options : Options
        Checked.
    want_lse : bool
        Allocate ``lse`` if the caller passed none.
    config : Mapping, optional
        As for :func:`cupyfa.attention`.
    arch : str
        A key of :data:`ARCHITECTURES`.
    sms : int, optional
        Multiprocessors of the device; few make a persistent kernel walk many tiles.

    Returns
    -------
    Prepared
        Ready to launch.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"attention: arch is {arch!r}; kernels exist for {', '.join(ARCHITECTURES)}")
    check_numpy(arrays._asdict(), ("q", "k", "v"))
    device = ARCHITECTURES[arch] if sms is None else dataclasses.replace(ARCHITECTURES[arch], multiprocessors=sms)
    # Device 0: the rules for arrays on a GPU hold.
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, 0))
    if operands.bias is not None and arrays.bias is not None:
        operands = operands._replace(bias=dataclasses.replace(operands.bias, aligned=is_aligned(arrays.bias)))
    problem = Problem.from_operands(operands, options, want_lse=want_lse, current_device=0)
    selection = select(problem, device, config)
    out, lse, sink = arrays.out, arrays.lse, arrays.sink
    if out is None:
        out = np.empty((*arrays.q.shape[:-1], arrays.v.shape[-1]), arrays.q.dtype)
    if lse is None and want_lse:
        lse = np.empty(problem.lse_shape, np.float32)
    for name, x in (("out", out), ("lse", lse)):
        if x is not None and not x.flags.writeable:
            raise ValueError(f"attention: {name} is read-only; it must be writable")
    passed = arrays._replace(out=out, lse=lse)
    check_overlap(problem, host_addresses(passed))
    counter = np.zeros(1, np.uint32)
    if problem.is_empty:
        return Prepared(problem, selection, None, None, b"", out, lse, sink, counter)
    kernel, traits = kernel_of(selection.spec)
    emulated = EmulatedDevice(arch, device.multiprocessors)
    strided = [copy.name for copy in plan_copies(problem, options.layout, (), 0)]
    at = {
        name: emulated.register(x, name=name, writable=name in ("out", "lse"))
        for name, x in passed.given().items()
        if name not in strided  # it may be no array that the device can have
    }
    unaligned = check_alignment(problem, Addresses(**(dict.fromkeys(strided, 0) | at)))
    copies = plan_copies(problem, options.layout, unaligned, 0)
    copied = tuple(Copied(copy, getattr(passed, copy.name), np.empty(copy.size, np.uint8)) for copy in copies)
    for copy, _, memory in copied:
        at[copy.name] = emulated.register(memory, name=f"copy of {copy.name}", writable=copy.name == "out")
    addresses = Addresses(**at)
    readable = with_copies(problem, copies)
    launcher = plan_forward(readable, traits, Function(0), device)

    at_counter = emulated.register(counter, name="tile_counter") if traits["dynamic"] else 0
    planning, at_plan = None, 0
    if problem.planned:
        packing = Packing.of(readable, selection, device)
        plan = np.zeros(packing.plan_bytes, np.uint8)
        at_plan = emulated.register(plan, name="plan")
        plan_kernel, plan_traits = kernel_of(PlanSpec())
        to_plan = packing.pack(addresses, at_plan)
        planning = Planning(plan_kernel.on(emulated), plan_traits["threads"], to_plan, plan)
    params = launcher.pack(tensor_maps(emulated), addresses, at_counter, at_plan)
    return Prepared(
        problem, selection, kernel.on(emulated), launcher, params, out, lse, sink, counter, planning, copied
    )


def is_aligned(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array will begin at a multiple of 16 bytes: whole arrays do, as those of CuPy.

    Parameters
    ----------
    array : numpy.ndarray
        Any.

    Returns
    -------
    bool
        Wherever NumPy has put it, only what a view does to it counts.
    """
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    begins, whole_begins = (x.__array_interface__["data"][0] for x in (array, whole))
    return int(begins - whole_begins) % 16 == 0


class EmulatedAttention(NamedTuple):
    """Output, LSE and what the emulator found.

    Attributes
    ----------
    out, lse : ndarray
        As :class:`cupyfa.AttentionResult`.
    run : Run
        The verdict.
    """

    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]
    run: Run


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
    config: Config | None = None,
    arch: str = "sm_90a",
    sms: int | None = None,
    policy: str = "eager",
    seed: int = 0,
    **options: Any,
) -> EmulatedAttention:
    """Compute attention by the kernel of an architecture, instruction by instruction, on the CPU.

    Parameters
    ----------
    q, k, v, softmax_scale, causal, window_size, softcap, sink, alibi_slopes, bias, seqused_q, seqused_k
        As for :func:`cupyfa.attention`.
    layout, config
        As for :func:`cupyfa.attention`; NumPy arrays.
    arch : str
        A key of :data:`ARCHITECTURES`.
    sms : int, optional
        Multiprocessors of the device.
    policy, seed, **options
        As for :meth:`Prepared.launch`.

    Returns
    -------
    EmulatedAttention
        A hazard does not raise: look at ``run.verdict``.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyfa import emulate
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 64, 1, 64)).astype(np.float16) for _ in range(3))
    >>> out, lse, run = emulate.attention(q, k, v, policy="lazy")  # doctest: +SKIP
    >>> run.verdict  # doctest: +SKIP
    'clean'
    """
    checked = check_options(softmax_scale, causal, window_size, softcap, layout)
    arrays = Arrays(q, k, v, None, None, sink, alibi_slopes, bias, None, None, seqused_q, seqused_k)
    prepared = prepare_arrays(arrays, checked, config=config, arch=arch, sms=sms)
    run = prepared.launch(policy=policy, seed=seed, **options)
    lse = cast("np.ndarray[Any, Any]", prepared.lse)  # not None: prepare makes one unless it is told not to
    return EmulatedAttention(prepared.out, lse, run)
