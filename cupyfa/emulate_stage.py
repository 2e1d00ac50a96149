"""The kernels of a call under the emulator: how they are launched, and which of them have run there clean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from cupyfa._launch import LaunchGeometry, TensorMapGeometry
from cupyfa.emulator import EmulatedDevice, EmulatedKernel, Run
from cupyfa.errors import type_name
from cupyfa.spec import Spec

__all__ = ["Stage", "check_numpy", "launch_stages", "ran_clean", "tensor_maps"]

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

    def launch(self, kernel: EmulatedKernel | None = None, **options: Any) -> Run:
        """Run it.

        Parameters
        ----------
        kernel : EmulatedKernel, optional
            Another one in its place, a mutant: it says nothing about this one.
        **options
            As for :meth:`cupyfa.emulator.EmulatedKernel.launch`. But ``strict_warpgroup`` is True unless it is given:
            each warp of our kernels waits and releases for itself.

        Returns
        -------
        Run
            What was found.
        """
        run = (kernel or self.kernel).launch(
            grid=self.geometry.grid,
            block=self.geometry.threads,
            cluster=self.geometry.cluster_size,
            shared=self.geometry.shared_bytes,
            params=self.params,
            **{"strict_warpgroup": True, **options},
        )
        if kernel is None and options.get("checks", True):
            _ran.add(self.spec)
            if run.verdict != "clean":
                _found.add(self.spec)
        return run


def launch_stages(stages: Iterable[Stage], arch: str, **options: Any) -> Run:
    """Run stages in their order, until one is not clean.

    Parameters
    ----------
    stages : iterable of Stage
        Of a call; perhaps none.
    arch : str
        Of the device.
    **options
        As for :meth:`Stage.launch`.

    Returns
    -------
    Run
        Of the last one that ran; a clean one if there is nothing to launch.
    """
    run = Run("nothing to launch", arch, options.get("policy", "eager"), options.get("seed", 0), (), {})
    for stage in stages:
        run = stage.launch(**options)
        if run.verdict != "clean":
            break
    return run


def tensor_maps(device: EmulatedDevice) -> Callable[[TensorMapGeometry, int], bytes]:
    """Return what makes tensor maps of a device.

    Parameters
    ----------
    device : EmulatedDevice
        Whose memory they describe.

    Returns
    -------
    callable
        ``encode(geometry, address)`` returns the 128 bytes of a tensor map.
    """

    def encode(geometry: TensorMapGeometry, address: int) -> bytes:
        return device.tensor_map(
            address,
            dtype=geometry.dtype,
            shape=geometry.shape,
            strides=geometry.strides,
            box=(*geometry.box, *[1] * (len(geometry.shape) - 2)),
            swizzle=geometry.swizzle,
        )

    return encode


def check_numpy(arrays: Mapping[str, Any], required: Iterable[str]) -> None:
    """Check that arrays are what the emulator can read.

    Parameters
    ----------
    arrays : Mapping
        Those of a call, by name; None for one that was not passed.
    required : iterable of str
        Which of them must have been passed.

    Raises
    ------
    TypeError
        Naming the array.
    """
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray) and not (x is None and name not in required):
            raise TypeError(f"attention: {name} is a {type_name(type(x))}; the emulator needs a numpy.ndarray")
