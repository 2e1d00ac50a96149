"""The kernels of a call that launches several, and how far the evidence about each reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from cupyfa._launch import unpack_traits
from cupyfa.compiler import PtxasReport, compile_offline
from cupyfa.errors import CompileError
from cupyfa.explain import Rung, compiled_rung
from cupyfa.kernels import Kernel
from cupyfa.spec import Spec

__all__ = ["ExplainedKernel", "OfflineKernels", "explain_loaded", "explain_offline"]


@dataclasses.dataclass(frozen=True)
class ExplainedKernel:
    """A kernel of the call.

    Attributes
    ----------
    spec : Spec
        Its compile key.
    ptxas : PtxasReport or None
        Registers, spills and advisories; None if it was not compiled, or the report is lost.
    rung : Rung
        What has been shown about it.
    """

    spec: Spec
    ptxas: PtxasReport | None
    rung: Rung

    def lines(self) -> list[str]:
        """Return it as lines of an explanation."""
        lines = [f"kernel  {self.spec}"]
        if self.ptxas is not None:
            lines.append(f"        registers {self.ptxas.registers}; spills {self.ptxas.spill_bytes} bytes")
            lines += [f"        {advisory}" for advisory in self.ptxas.advisories]
        return [*lines, f"        {self.rung.value}"]


@dataclasses.dataclass(frozen=True)
class OfflineKernels:
    """Kernels that were compiled without a GPU, as far as there is a compiler.

    Attributes
    ----------
    kernels : tuple of ExplainedKernel
        In the order of the specs.
    note : str
        Why some were not compiled; empty if all were.
    """

    kernels: tuple[ExplainedKernel, ...]
    note: str
    _traits: dict[Spec, dict[str, int]]

    def traits(self, spec: Spec) -> dict[str, int]:
        """Return the traits of a kernel; sizes of 0 if it was not compiled, with which nothing can be launched."""
        return self._traits.get(spec) or dict.fromkeys(("threads", "shared_bytes"), 0)


def explain_offline(specs: Iterable[Spec]) -> OfflineKernels:
    """Compile kernels without a GPU.

    Parameters
    ----------
    specs : iterable of Spec
        The kernels.

    Returns
    -------
    OfflineKernels
        At the rung ``source`` where there is no compiler.

    Raises
    ------
    CompileError
        A kernel does not compile.
    """
    wanted, explained, traits, note = tuple(specs), {}, {}, ""
    for spec in dict.fromkeys(wanted):  # some are launched more than once
        try:
            compiled = compile_offline(spec)
        except CompileError as error:
            if error.spec is not None:  # the kernel is at fault, not the installation
                raise
            explained[spec] = ExplainedKernel(spec, None, Rung.SOURCE)
            note = str(error)
            continue
        traits[spec] = unpack_traits(compiled.traits_bytes)
        explained[spec] = ExplainedKernel(spec, compiled.report, compiled_rung(spec))
    return OfflineKernels(tuple(explained[spec] for spec in wanted), note, traits)


def explain_loaded(kernels: Iterable[Kernel]) -> tuple[ExplainedKernel, ...]:
    """Return what is known about kernels that are loaded on the current device.

    Parameters
    ----------
    kernels : iterable of Kernel
        In their order.

    Returns
    -------
    tuple of ExplainedKernel
        Of each.
    """
    return tuple(
        ExplainedKernel(kernel.spec, kernel.ptxas, Rung.RUN if kernel.function.launched else compiled_rung(kernel.spec))
        for kernel in kernels
    )
