"""A GPU that is not there: memory, modules and launches, like the driver's, on NumPy arrays."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyfa.emulator import _core, tensormap
from cupyfa.emulator.decode import decode
from cupyfa.emulator.policies import policy_fields
from cupyfa.emulator.program import Program
from cupyfa.emulator.ptx import Module as Ptx
from cupyfa.emulator.ptx import parse
from cupyfa.emulator.report import Event, Finding, Place, Run

__all__ = ["EmulatedDevice", "EmulatedKernel", "EmulatedModule"]

_GLOBAL_FIRST = 0x7E00_0000_0000
_GUARD = 1 << 20  # no overrun of a buffer reaches the next one
#: Shared memory that a CTA may have, by architecture (CUDA programming guide, "Technical Specifications").
_SHARED_LIMIT = {"sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_103a": 227 * 1024}
_KINDS = ("issue", "complete", "wait", "release")


class EmulatedDevice:
    """A device of an architecture.

    Parameters
    ----------
    arch : str
        ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
    sms : int
        Multiprocessors. Persistent kernels launch one CTA for each, so a small number makes them walk several tiles.

    Examples
    --------
    >>> device = EmulatedDevice("sm_90a")
    >>> x = np.arange(32, dtype=np.float32)
    >>> module = device.load('''
    ... .version 8.6
    ... .target sm_90a
    ... .address_size 64
    ... .entry double(.param .u64 x) {
    ...   .reg .b64 %rd<3>; .reg .f32 %f<2>; .reg .b32 %r<2>;
    ...   ld.param.u64 %rd0, [x];
    ...   mov.u32 %r0, %tid.x;
    ...   mul.wide.u32 %rd1, %r0, 4;
    ...   add.s64 %rd0, %rd0, %rd1;
    ...   ld.global.f32 %f0, [%rd0];
    ...   add.f32 %f0, %f0, %f0;
    ...   st.global.f32 [%rd0], %f0;
    ...   ret;
    ... }''')
    >>> address = device.register(x, name="x")
    >>> module.launch("double", grid=1, block=32, params=[address]).verdict
    'clean'
    >>> x[:4]
    array([0., 2., 4., 6.], dtype=float32)
    """

    def __init__(self, arch: str = "sm_90a", sms: int = 132) -> None:
        if arch not in _SHARED_LIMIT:
            raise ValueError(f"arch is {arch!r}; the emulator knows {', '.join(_SHARED_LIMIT)}")
        if sms < 1:
            raise ValueError(f"sms is {sms}; it must be positive")
        self.arch, self.sms = arch, sms
        self._next = _GLOBAL_FIRST
        self._buffers: dict[int, tuple[NDArray[np.uint8], bool, bool, str]] = {}
        self._addresses: dict[int, int] = {}

    def register(self, array: NDArray[Any], *, name: str = "", writable: bool = True, protocol: bool = False) -> int:
        """Make an array global memory of the device; it is shared, not copied.

        Parameters
        ----------
        array : ndarray
            C-contiguous, or a view into a C-contiguous array: then the whole array is registered and the address is the
            view's.
        name : str
            For reports.
        writable : bool
            A kernel that writes to it anyway is reported.
        protocol : bool
            It holds flags or accumulators by which CTAs synchronise.

        Returns
        -------
        int
            Its address.
        """
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        if not base.flags.c_contiguous:
            base = array
        if not base.flags.c_contiguous:
            raise ValueError(f"register: {name or 'the array'} is not a view of a C-contiguous array")
        start: int = base.__array_interface__["data"][0]
        offset: int = array.__array_interface__["data"][0] - start
        if start in self._addresses:
            address = self._addresses[start]
            known = self._buffers[address]
            self._buffers[address] = (known[0], known[1] or writable, known[2] or protocol, known[3])
            return address + offset
        if writable and not base.flags.writeable:
            raise ValueError(f"register: {name or 'the array'} is read-only; pass writable=False")
        address = self._next
        data = base.reshape(-1).view(np.uint8)
        self._buffers[address] = (data, writable, protocol, name or f"buffer {len(self._buffers)}")
        if data.size:
            self._addresses[start] = address
        self._next += (data.size + _GUARD + 255) // 256 * 256
        return address + offset

    def tensor_map(self, address: int, **fields: Any) -> bytes:
        """Return a tensor map; see :func:`cupyfa.emulator.tensormap.encode`."""
        return tensormap.encode(address, **fields)

    def load(self, ptx: str) -> EmulatedModule:
        """Parse a PTX module; its kernels are decoded when they are first used."""
        return EmulatedModule(self, parse(ptx))

    def memory(self) -> list[tuple[int, NDArray[np.uint8], bool, bool, str]]:
        """Return what is registered, as the machine takes it."""
        return [(address, *buffer) for address, buffer in self._buffers.items()]


class EmulatedModule:
    """A loaded PTX module.

    Parameters
    ----------
    device : EmulatedDevice
        Where it is loaded.
    ptx : Ptx
        The parsed text.
    """

    def __init__(self, device: EmulatedDevice, ptx: Ptx) -> None:
        self.device, self.ptx = device, ptx
        self._kernels: dict[str, EmulatedKernel] = {}

    def kernel(self, name: str | None = None) -> EmulatedKernel:
        """Return a kernel, decoded; without a name the only one."""
        if name is None and len(self.ptx.entries) == 1:
            name = next(iter(self.ptx.entries))
        key = name or ""
        if key not in self._kernels:
            self._kernels[key] = EmulatedKernel(self.device, decode(self.ptx, name))
        return self._kernels[key]

    def launch(self, name: str | None = None, **arguments: Any) -> Run:
        """Launch a kernel; see :meth:`EmulatedKernel.launch`."""
        return self.kernel(name).launch(**arguments)


def _dim3(value: int | Sequence[int], what: str) -> tuple[int, int, int]:
    values: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value,)
    full = (*values, 1, 1, 1)[:3]
    if len(values) > 3 or any(not isinstance(n, (int, np.integer)) or n < 1 for n in full):
        raise ValueError(f"launch: {what} is {value!r}; it must be one to three positive integers")
    return int(full[0]), int(full[1]), int(full[2])


class EmulatedKernel:
    """A kernel ready to run.

    Parameters
    ----------
    device : EmulatedDevice
        Whose memory it sees.
    program : Program
        Decoded.
    """

    def __init__(self, device: EmulatedDevice, program: Program) -> None:
        self.device, self.program = device, program
        self._code = _core.Code(program)

    def on(self, device: EmulatedDevice) -> EmulatedKernel:
        """Return the same kernel on another device, without decoding it again."""
        kernel = copy.copy(self)
        kernel.device = device
        return kernel

    def place(self, index: int) -> Place | None:
        """Return what is known about a record of the program."""
        program = self.program
        if not 0 <= index < len(program.code):
            return None
        site = int(program.code["site"][index])
        file, line = program.sites[site]
        return Place(index, file, line, program.callers[site], program.text[index])

    def launch(
        self,
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        params: bytes | Sequence[Any] = b"",
        cluster: int | Sequence[int] | None = None,
        shared: int = 0,
        policy: str = "eager",
        seed: int = 0,
        checks: bool = True,
        strict_warpgroup: bool = False,
        lenient_tcgen05: bool = False,
        review: bool = False,
        stop_at_error: bool = False,
        record: bool = False,
        max_instructions: int = 0,
        resident: int = 1,
        slots: int = 512,
        launch_registers: int = 0,
    ) -> Run:
        """Run the kernel.

        Parameters
        ----------
        grid, block, cluster : int or sequence of int
            CTAs, threads of a CTA, CTAs of a cluster (by default what the kernel requires).
        params : bytes or sequence
            The packed parameter block, or one value a parameter: int, NumPy scalar, bytes, or a registered array.
        shared : int
            Dynamic shared memory of a CTA, bytes.
        policy : str
            A name of :data:`cupyfa.emulator.policies.POLICIES`.
        seed : int
            Of the schedule.
        checks : bool
            Without them only values, deadlocks and bounds are looked at.
        strict_warpgroup : bool
            A wait proves only the calling warp's part of a wgmma; otherwise that of its whole warpgroup.
        lenient_tcgen05 : bool
            Missing tcgen05 fences and load waits are information, for kernels that rely on what ptxas makes of them.
        review : bool
            Report findings on which sources disagree.
        stop_at_error : bool
            End the run at the first error.
        record : bool
            Keep events for a timeline.
        max_instructions : int
            Stop with PROGRESS_TIMEOUT after so many warp instructions; 0: never.
        resident : int
            Clusters that run at the same time, for kernels that wait for other CTAs.
        slots : int
            Clock slots for asynchronous work.
        launch_registers : int
            Registers of a thread at launch; by default what fits.

        Returns
        -------
        Run
            The verdict and what was found.
        """
        program = self.program
        cluster_dims = _dim3(cluster if cluster is not None else (program.cluster or 1), "cluster")
        grid_dims, block_dims = _dim3(grid, "grid"), _dim3(block, "block")
        self._check(grid_dims, block_dims, cluster_dims, shared)
        options = {
            "seed": seed,
            "checks": checks,
            "strict_warpgroup": strict_warpgroup,
            "lenient_tcgen05": lenient_tcgen05,
            "review": review,
            "stop_at_error": stop_at_error,
            "record": record,
            "max_instructions": max_instructions,
            "sms": self.device.sms,
            "resident": resident,
            "slots": slots,
            "launch_registers": launch_registers or program.max_registers or 0,
        }
        start = time.perf_counter()
        findings, counts, events = _core.run(
            self._code,
            self.device.memory(),
            self._pack(params),
            grid_dims,
            block_dims,
            cluster_dims,
            shared,
            policy_fields(policy),
            options,
        )
        counts["seconds"] = time.perf_counter() - start
        return Run(
            kernel=program.name,
            arch=self.device.arch,
            policy=policy,
            seed=seed,
            findings=tuple(Finding(f[0], f[1], self.place(f[2]), self.place(f[3]), *f[4:]) for f in findings),
            statistics=counts,
            events=tuple(self._event(*event) for event in events),
        )

    def _event(self, when: int, at: int, cta: int, warp: int, kind: int, subject: int, value: int) -> Event:
        place = self.place(at)
        assert place is not None
        return Event(when, place, cta, warp, _KINDS[kind], subject, value)

    def _check(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], cluster: tuple[int, int, int], shared: int
    ) -> None:
        program, arch = self.program, self.device.arch
        threads = block[0] * block[1] * block[2]
        if program.arch != arch:
            raise ValueError(f"launch: {program.name} is for {program.arch}, the device is {arch}")
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise ValueError(f"launch: grid {grid} is not a multiple of the cluster {cluster}")
        if cluster[0] * cluster[1] * cluster[2] > 16:
            raise ValueError(f"launch: a cluster of {cluster} has more than 16 CTAs")
        if program.cluster is not None and _dim3(program.cluster, "cluster") != cluster:
            raise ValueError(f"launch: cluster is {cluster}, {program.name} requires {program.cluster}")
        if program.reqntid is not None and _dim3(program.reqntid, "block") != block:
            raise ValueError(f"launch: block is {block}, {program.name} requires {program.reqntid}")
        if threads > min(1024, program.max_threads or 1024):
            raise ValueError(
                f"launch: {threads} threads, {program.name} allows {min(1024, program.max_threads or 1024)}"
            )
        total = program.dynamic_shared_offset + shared
        if shared < 0 or total > _SHARED_LIMIT[arch]:
            raise ValueError(f"launch: {total} bytes of shared memory; a CTA of {arch} may have {_SHARED_LIMIT[arch]}")

    def _pack(self, params: bytes | Sequence[Any]) -> bytes:
        program = self.program
        if isinstance(params, bytes):
            if len(params) != program.param_bytes:
                raise ValueError(f"launch: params has {len(params)} bytes, {program.name} takes {program.param_bytes}")
            return params
        if len(params) != len(program.params):
            raise ValueError(f"launch: {len(params)} params, {program.name} has {len(program.params)} parameters")
        block = bytearray(program.param_bytes)
        for value, parameter in zip(params, program.params, strict=True):
            block[parameter.offset : parameter.offset + parameter.size] = self._bytes_of(
                value, parameter.name, parameter.size
            )
        return bytes(block)

    def _bytes_of(self, value: Any, name: str, size: int) -> bytes:
        if isinstance(value, np.ndarray):
            value = self.device.register(value, name=name, writable=bool(value.flags.writeable))
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
                f"launch: parameter {name} is a {type(value).__name__}; it must be an int, a NumPy scalar or array or bytes"
            )
        if len(data) != size:
            raise ValueError(f"launch: parameter {name} has {size} bytes, got {len(data)}")
        return data
