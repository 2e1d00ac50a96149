"""Checks of what a launch is given; each message names the argument, its value and what it may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyfa.emulator.program import Parameter, Program

__all__ = ["SHARED_LIMIT", "Dimensions", "check_geometry", "check_options", "dimensions", "integer", "pack"]

Dimensions = tuple[int, int, int]

#: Shared memory that a CTA may have, by architecture (CUDA programming guide, "Technical Specifications").
SHARED_LIMIT = {"sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_103a": 227 * 1024}
_GRID_LIMIT = (2**31 - 1, 65535, 65535)
_BLOCK_LIMIT = (1024, 1024, 64)
_MOST_CTAS = 2**31 - 1  # of the emulator: it numbers them with 32 bits
_MOST_RESIDENT = 512  # threads' clocks grow with the square of it

# Options of a launch: bounds of the integers; the others are booleans.
_BOUNDS = {
    "seed": (0, 2**64 - 1),
    "max_instructions": (0, 2**63 - 1),
    "max_idle": (0, 2**63 - 1),
    "sms": (1, 2**31 - 1),
    "resident": (1, _MOST_RESIDENT),
    "slots": (0, 2**20),
    "launch_registers": (0, 255),
}


def integer(value: object, what: str) -> int:
    """Return an int; a float, a bool or a string is a TypeError.

    Parameters
    ----------
    value : object
        An int or a NumPy integer.
    what : str
        Its name.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what} is {value!r}, a {type(value).__name__}; it must be an int")
    return int(value)


def dimensions(value: int | Sequence[int], what: str) -> Dimensions:
    """Return one to three positive integers as three.

    Parameters
    ----------
    value : int or sequence of int
        Those that are left out are 1.
    what : str
        Its name.
    """
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    values = [integer(n, f"launch: {what}") for n in (value if several else (value,))]  # type: ignore[union-attr]
    if not 1 <= len(values) <= 3 or any(n < 1 for n in values):
        raise ValueError(f"launch: {what} is {value!r}; it must be one to three positive integers")
    x, y, z = (*values, 1, 1, 1)[:3]
    return x, y, z


def check_geometry(
    program: Program, arch: str, grid: Dimensions, block: Dimensions, cluster: Dimensions, shared: int
) -> None:
    """Raise ValueError for a launch that the device would refuse.

    Parameters
    ----------
    program : Program
        The kernel.
    arch : str
        Of the device.
    grid, block, cluster : tuple of int
        As of :func:`dimensions`.
    shared : int
        Dynamic shared memory, bytes.
    """
    if program.arch != arch:
        raise ValueError(f"launch: {program.name} is for {program.arch}, the device is {arch}")
    for what, values, limits in (("grid", grid, _GRID_LIMIT), ("block", block, _BLOCK_LIMIT)):
        if any(n > limit for n, limit in zip(values, limits, strict=True)):
            raise ValueError(f"launch: {what} is {values}; it may be at most {limits}")
    if grid[0] * grid[1] * grid[2] > _MOST_CTAS:
        raise ValueError(f"launch: grid is {grid}; the emulator takes at most {_MOST_CTAS} CTAs")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"launch: grid {grid} is not a multiple of the cluster {cluster}")
    if cluster[0] * cluster[1] * cluster[2] > 16:
        raise ValueError(f"launch: a cluster of {cluster} has more than 16 CTAs")
    if program.cluster is not None and dimensions(program.cluster, "cluster") != cluster:
        raise ValueError(f"launch: cluster is {cluster}, {program.name} requires {program.cluster}")
    if program.reqntid is not None and dimensions(program.reqntid, "block") != block:
        raise ValueError(f"launch: block is {block}, {program.name} requires {program.reqntid}")
    threads, most = block[0] * block[1] * block[2], min(1024, program.max_threads or 1024)
    if threads > most:
        raise ValueError(f"launch: {threads} threads, {program.name} allows {most}")
    total = program.dynamic_shared_offset + shared
    if shared < 0 or total > SHARED_LIMIT[arch]:
        raise ValueError(f"launch: {total} bytes of shared memory; a CTA of {arch} may have {SHARED_LIMIT[arch]}")


def check_options(options: Mapping[str, object]) -> None:
    """Raise TypeError or ValueError for an option of a launch that means nothing.

    Parameters
    ----------
    options : mapping
        As the machine takes them.
    """
    for name, value in options.items():
        if name not in _BOUNDS:
            if not isinstance(value, bool):
                raise TypeError(f"launch: {name} is {value!r}, a {type(value).__name__}; it must be a bool")
            continue
        least, most = _BOUNDS[name]
        if not least <= integer(value, f"launch: {name}") <= most:
            raise ValueError(f"launch: {name} is {value}; it must be {least} to {most}")


def pack(program: Program, params: bytes | Sequence[Any], register: Callable[[NDArray[Any], str], int]) -> bytes:
    """Return the parameter block of a launch.

    Parameters
    ----------
    program : Program
        The kernel.
    params : bytes or sequence
        The block, or a value for each parameter.
    register : callable
        Array and name -> address.

    Returns
    -------
    bytes
        ``program.param_bytes`` of them.
    """
    if isinstance(params, (bytes, bytearray)):
        if len(params) != program.param_bytes:
            raise ValueError(f"launch: params has {len(params)} bytes, {program.name} takes {program.param_bytes}")
        return bytes(params)
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise TypeError(f"launch: params is a {type(params).__name__}; it must be bytes or a sequence of values")
    if len(params) != len(program.params):
        raise ValueError(f"launch: {len(params)} params, {program.name} has {len(program.params)} parameters")
    block = bytearray(program.param_bytes)
    for value, parameter in zip(params, program.params, strict=True):
        block[parameter.offset : parameter.offset + parameter.size] = _bytes_of(value, parameter, register)
    return bytes(block)


def _bytes_of(value: Any, parameter: Parameter, register: Callable[[NDArray[Any], str], int]) -> bytes:
    name, size = parameter.name, parameter.size
    if isinstance(value, np.ndarray):
        if size != 8:
            raise ValueError(f"launch: parameter {name} has {size} bytes; an array needs one of 8, for its address")
        value = register(value, name)
    if isinstance(value, (bytes, bytearray)):
        data = bytes(value)
    elif isinstance(value, np.generic):
        data = value.tobytes()
    elif isinstance(value, int):
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise ValueError(f"launch: {value} does not fit the {size} bytes of parameter {name}")
        data = (value % (1 << (8 * size))).to_bytes(size, "little")
    else:
        raise TypeError(
            f"launch: parameter {name} is a {type(value).__name__}; it must be an int, bytes, a NumPy scalar or array"
        )
    if len(data) != size:
        raise ValueError(f"launch: parameter {name} has {size} bytes, got {len(data)}")
    return data
