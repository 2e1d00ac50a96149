"""A kernel of a call under the emulator, and which kernels have run there clean."""

from __future__ import annotations

import dataclasses
from typing import Any

from cupyfa._launch import LaunchGeometry
from cupyfa.emulator import EmulatedKernel, Run
from cupyfa.spec import Spec

__all__ = ["Stage", "ran_clean"]

#: Specs whose kernel has run in this process with all checks, and of those, the ones in which something was found.
_ran: set[Spec] = set()
_found: set[Spec] = set()


def ran_clean(spec: Spec) -> bool:
    """Return whether a spec's kernel has run here under the emulator, each time clean.

    Parameters
    ----------
    spec : Spec
        The compile key.

    Returns
    -------
    bool
        An explanation calls that *emulated*.
    """
    return spec in _ran and spec not in _found


@dataclasses.dataclass(frozen=True)
class Stage:
    """A kernel that is ready to run.

    Attributes
    ----------
    spec : Spec
        Its compile key.
    kernel : EmulatedKernel
        The kernel.
    geometry : LaunchGeometry
        Grid and block.
    params : bytes
        The packed parameters.
    """

    spec: Spec
    kernel: EmulatedKernel
    geometry: LaunchGeometry
    params: bytes

    def launch(self, **options: Any) -> Run:
        """Run it.

        Parameters
        ----------
        **options
            As for :meth:`cupyfa.emulator.EmulatedKernel.launch`.

        Returns
        -------
        Run
            What was found.
        """
        run = self.kernel.launch(
            grid=self.geometry.grid,
            block=self.geometry.threads,
            cluster=self.geometry.cluster_size,
            shared=self.geometry.shared_bytes,
            params=self.params,
            **{"strict_warpgroup": True, **options},
        )
        if options.get("checks", True):
            _ran.add(self.spec)
            if run.verdict != "clean":
                _found.add(self.spec)
        return run
