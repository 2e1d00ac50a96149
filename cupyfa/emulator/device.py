"""A GPU that is not there: memory, modules and launches, like the driver's, on NumPy arrays."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyfa.emulator import _core, tensormap
from cupyfa.emulator.arguments import SHARED_LIMIT, check_geometry, check_options, dimensions, integer, pack
from cupyfa.emulator.decode import decode
from cupyfa.emulator.policies import policy_fields
from cupyfa.emulator.program import Program
from cupyfa.emulator.ptx import Module as Ptx
from cupyfa.emulator.ptx import parse
from cupyfa.emulator.report import Event, Finding, Place, Run

__all__ = ["EmulatedDevice", "EmulatedKernel", "EmulatedModule"]

_GLOBAL_FIRST = 0x7E00_0000_0000
_GUARD = 1 << 20  # no overrun of a buffer reaches the next one
#: What the machine writes for an instruction, and for a place in shared memory.
_INSTRUCTION, _MBARRIER = re.compile(r"#(\d+)\b"), re.compile(r"mbarrier at byte (\d+)")
_KINDS = ("issue", "complete", "wait", "release")


class _Buffer(NamedTuple):
    """What is registered, as the machine takes it."""

    data: NDArray[np.uint8]
    writable: bool
    protocol: bool
    initialised: bool
    name: str


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return the memory of an array that is dense in some order of its axes, None for another one."""
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    dense = array.transpose(order)
    return dense.reshape(-1).view(np.uint8) if dense.flags.c_contiguous else None


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
        if arch not in SHARED_LIMIT:
            raise ValueError(f"arch is {arch!r}; the emulator knows {', '.join(SHARED_LIMIT)}")
        if integer(sms, "sms") < 1:
            raise ValueError(f"sms is {sms}; it must be positive")
        self.arch, self.sms = arch, sms
        self._next = _GLOBAL_FIRST
        self._buffers: dict[int, _Buffer] = {}
        self._addresses: dict[int, int] = {}
        self._lock = threading.Lock()  # launches of several threads may share a device

    def register(
        self,
        array: NDArray[Any],
        *,
        name: str = "",
        writable: bool = True,
        protocol: bool = False,
        initialised: bool = True,
    ) -> int:
        """Make an array global memory of the device; it is shared, not copied.

        Parameters
        ----------
        array : ndarray
            Dense in some order of its axes, or a view into such an array: then the whole array is registered and the
            address is the view's. The device keeps it, and what is true of one view of it is true of all.
        name : str
            For reports.
        writable : bool
            A kernel that writes to it anyway is reported.
        protocol : bool
            It holds flags or accumulators by which CTAs synchronise: races between clusters that are resident together
            are reported.
        initialised : bool
            False: it holds nothing, and a read of what the launch has not written is reported.

        Returns
        -------
        int
            Its address.
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(f"register: {name or 'array'} is a {type(array).__name__}; it must be a numpy.ndarray")
        if array.dtype.hasobject:
            raise TypeError(
                f"register: {name or 'the array'} has dtype {array.dtype}; objects are no memory of a device"
            )
        if writable and not array.flags.writeable:
            raise ValueError(f"register: {name or 'the array'} is read-only; pass writable=False")
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        data = _bytes_of(base)
        if data is None:
            base, data = array, _bytes_of(array)
        if data is None:
            raise ValueError(f"register: {name or 'the array'} is neither dense nor a view of a dense array")
        if writable and not base.flags.writeable:
            raise ValueError(f"register: {name or 'the array'} is a view of a read-only array; pass writable=False")
        start: int = base.__array_interface__["data"][0]
        offset: int = array.__array_interface__["data"][0] - start
        with self._lock:
            address = self._addresses.get(start, 0)
            known = self._buffers.get(address)
            if known is not None and known.data.size >= data.size:
                self._buffers[address] = known._replace(
                    writable=known.writable or writable,
                    protocol=known.protocol or protocol,
                    initialised=known.initialised and initialised,
                )
                return address + offset
            address = self._next
            self._next += (data.size + _GUARD + 255) // 256 * 256
            title = name or f"buffer {len(self._buffers)}"
            self._buffers[address] = _Buffer(data, writable, protocol, initialised, title)
            if data.size:
                self._addresses[start] = address
        return address + offset

    def tensor_map(self, address: int, **fields: Any) -> bytes:
        """Return a tensor map over registered memory; see :func:`cupyfa.emulator.tensormap.encode`."""
        encoded = tensormap.encode(address, **fields)
        end = address + tensormap.extent(**fields)
        for base, buffer in list(self._buffers.items()):
            if base <= address < base + buffer.data.size:
                if end > base + buffer.data.size:
                    size, excess = buffer.data.size, end - base - buffer.data.size
                    raise ValueError(f"tensor map: it ends {excess} bytes behind {buffer.name}, which has {size}")
                return encoded
        raise ValueError(f"tensor map: address {address:#x} is not in registered memory")

    def load(self, ptx: str) -> EmulatedModule:
        """Parse a PTX module; its kernels are decoded when they are first used."""
        if not isinstance(ptx, str):
            raise TypeError(f"load: ptx is a {type(ptx).__name__}; it must be a str")
        return EmulatedModule(self, parse(ptx))

    def memory(self) -> list[tuple[int, NDArray[np.uint8], bool, bool, bool, str]]:
        """Return what is registered, as the machine takes it."""
        with self._lock:
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
        return self._place(index) if 0 <= index < len(self.program.code) else None

    def _place(self, index: int) -> Place:
        program = self.program
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
        programmatic: bool = False,
        max_instructions: int = 1_000_000_000,
        max_idle: int = 50_000_000,
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
        programmatic : bool
            The launch depends on the grid before it and may begin before that has ended: what precedes
            ``griddepcontrol.wait`` must not read global memory.
        max_instructions, max_idle : int
            Stop with PROGRESS_TIMEOUT after so many warp instructions, and after so many in a row in which nothing else
            happens (no arrival, no copy, no change of a flag); 0: never.
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
        cluster_dims = dimensions(cluster if cluster is not None else (program.cluster or 1), "cluster")
        grid_dims, block_dims = dimensions(grid, "grid"), dimensions(block, "block")
        check_geometry(
            program, self.device.arch, grid_dims, block_dims, cluster_dims, integer(shared, "launch: shared")
        )
        fields = policy_fields(policy)
        options = {
            "seed": seed,
            "checks": checks,
            "strict_warpgroup": strict_warpgroup,
            "lenient_tcgen05": lenient_tcgen05,
            "review": review,
            "stop_at_error": stop_at_error,
            "record": record,
            "programmatic": programmatic,
            "max_instructions": max_instructions,
            "max_idle": max_idle,
            "sms": self.device.sms,
            "resident": resident,
            "slots": slots,
            "launch_registers": launch_registers or program.max_registers or 0,
        }
        check_options(options)
        block_of_params = pack(program, params, self._register)
        start = time.perf_counter()
        findings, counts, events = _core.run(
            self._code,
            self.device.memory(),
            block_of_params,
            grid_dims,
            block_dims,
            cluster_dims,
            shared,
            fields,
            options,
        )
        counts["seconds"] = time.perf_counter() - start
        return Run(
            kernel=program.name,
            arch=self.device.arch,
            policy=policy,
            seed=seed,
            findings=tuple(self._finding(finding) for finding in findings),
            statistics=counts,
            events=tuple(self._event(*event) for event in events),
        )

    def _register(self, array: NDArray[Any], name: str) -> int:
        return self.device.register(array, name=name, writable=bool(array.flags.writeable))

    def _finding(self, finding: tuple[Any, ...]) -> Finding:
        """Return a finding of the machine, with places for its numbers of instructions and names for its offsets."""
        hazard, severity, at, other, cta, warp, lanes, subject, detail, times = finding
        return Finding(
            hazard,
            severity,
            self.place(at),
            self.place(other),
            cta,
            warp,
            lanes,
            self._named(subject),
            self._named(_INSTRUCTION.sub(lambda found: str(self.place(int(found[1])) or found[0]), detail)),
            times,
        )

    def _named(self, text: str) -> str:
        """Return a text with the variables that its mbarriers lie in."""

        def name(found: re.Match[str]) -> str:
            byte = int(found[1])
            for symbol, (offset, size) in self.program.shared_symbols.items():
                if offset <= byte < offset + size:
                    place = f"{symbol}+{byte - offset}" if byte > offset else symbol
                    return f"{found[0]} ({place})"
            return found[0]

        return _MBARRIER.sub(name, text)

    def _event(self, when: int, at: int, cta: int, warp: int, kind: int, subject: int, value: int) -> Event:
        return Event(when, self._place(at), cta, warp, _KINDS[kind], subject, value)
