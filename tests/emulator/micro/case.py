"""What a micro-kernel is launched with, and what it leaves: descriptions without a device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
UNWRITTEN = 0xCD  # what outputs hold before the launch


@dataclass(frozen=True, eq=False)
class Module:
    """A text of PTX: one or more kernels. ``optimise``: by the driver's ptxas."""

    name: str
    kernels: Callable[[], list[str]]
    optimise: bool = True

    @cached_property
    def text(self) -> str:
        return HEADER + "\n".join(self.kernels())


@dataclass(frozen=True, eq=False)
class Input:
    """An array that the kernel reads; made when asked for."""

    name: str
    make: Callable[[], Array]

    def initial(self) -> Array:
        return np.ascontiguousarray(self.make())


@dataclass(frozen=True, eq=False)
class Output:
    """An array that the kernel writes. ``rows`` names the parts along the first axis, for messages and digests."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[str, ...] = ()
    make: Callable[[], Array] | None = None

    def initial(self) -> Array:
        """What it holds before the launch: poison, or the array that is updated in place."""
        array = np.empty(self.shape, self.dtype)
        if self.make is None:
            array.view(np.uint8)[...] = UNWRITTEN
        else:
            array[...] = self.make()
        return array


Buffer: TypeAlias = Input | Output


@dataclass(frozen=True, eq=False)
class Map:
    """A tensor map over a buffer, in the driver's terms; dimension 0 is the innermost one.

    ``dtype`` is NumPy's name, or bfloat16; ``strides`` are bytes for the dimensions from 1.
    """

    buffer: Buffer
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: Literal[0, 32, 64, 128] = 0
    fill: Literal["zero", "nan"] = "zero"

    @property
    def steps(self) -> tuple[int, ...]:
        return self.element_strides or (1,) * len(self.shape)


@dataclass(frozen=True)
class Word:
    """A .u32 parameter."""

    value: int


Argument: TypeAlias = Buffer | Map | Word
Shape3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Case:
    """One launch. ``keep`` names outputs whose arrays are kept whole; ``compare`` names a rule of golden.py.

    ``hazards``: the errors that the emulator must report although the hardware has a result.
    """

    name: str
    module: Module
    entry: str
    arguments: tuple[Argument, ...]
    grid: int = 1
    block: int = 32
    cluster: int = 1
    shared: int = 0
    keep: tuple[str, ...] = ()
    compare: str = "bits"
    hazards: tuple[str, ...] = ()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every buffer once, those that only a tensor map names included."""
        found: dict[str, Buffer] = {}
        for argument in self.arguments:
            if not isinstance(argument, Word):
                buffer = argument.buffer if isinstance(argument, Map) else argument
                assert found.setdefault(buffer.name, buffer) is buffer, (self.name, buffer.name)
        return tuple(found.values())

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(buffer for buffer in self.buffers if isinstance(buffer, Output))

    def initial(self) -> dict[str, Array]:
        return {buffer.name: buffer.initial() for buffer in self.buffers}

    def fingerprint(self) -> str:
        """Changes when the kernel, the inputs or the launch change: then the golden is of another case."""
        digest = hashlib.sha256(self.module.text.encode())
        launch = (self.entry, self.grid, self.block, self.cluster, self.shared)
        digest.update(repr(launch).encode())
        for argument in self.arguments:
            if isinstance(argument, Map):
                fields = (argument.dtype, argument.shape, argument.strides, argument.box, argument.steps)
                digest.update(repr((*fields, argument.swizzle, argument.fill, argument.buffer.name)).encode())
            else:
                digest.update(repr(getattr(argument, "name", argument)).encode())
        for name, array in self.initial().items():
            digest.update(repr((name, array.dtype.str, array.shape)).encode())
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]
