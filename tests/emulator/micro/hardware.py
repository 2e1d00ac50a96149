"""Runs cases on a GPU through the driver alone: ptxas of the driver assembles, nothing but NumPy is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from .case import HEADER, UNWRITTEN, Array, Case, Map, Module, Word

ARENA = 512 << 20
GUARD = 4096  # poison between buffers, looked at afterwards
# CUtensorMapDataType, from 0.
TYPES = ("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16")
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
SHARED_LIMIT = 227 * 1024
# CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_OPTIMIZATION_LEVEL
ERROR_LOG, ERROR_LOG_SIZE, OPTIMISATION = 5, 6, 7
MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

# One CTA for each SM takes all of its shared memory and leaves a pattern there: what a case reads and did not write
# then differs between two runs.
SCRUB = f"""{HEADER}
.visible .entry scrub(.param .u32 value)
{{
.reg .b32 %r<5>; .reg .pred %p;
ld.param.u32 %r1, [value];
mov.u32 %r2, %tid.x;
shl.b32 %r2, %r2, 2;
mov.u32 %r3, smem;
LOOP:
add.u32 %r4, %r3, %r2;
st.shared.b32 [%r4], %r1;
add.u32 %r2, %r2, 4096;
setp.lt.u32 %p, %r2, {SHARED_LIMIT};
@%p bra LOOP;
ret;
}}
"""


class DriverError(RuntimeError):
    """A call of the driver failed; after an error of a kernel every later one does."""


class Gpu:
    """The first device. Cases run one after another in one arena of memory."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name, count = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGetName", name, 100, device)
        self.call("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSOR_COUNT, device)
        self.name, self.multiprocessors = name.value.decode(), count.value
        arena = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(arena), ctypes.c_size_t(ARENA))
        self.arena = arena.value
        self.modules: dict[Module, ctypes.c_void_p] = {}
        self.told: list[str] = []  # about the launch in progress, for the report of a failure
        self.scrubber = self.function(self.load(SCRUB), "scrub", SHARED_LIMIT)

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(result, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()}")

    def load(self, text: str, optimise: bool = True) -> ctypes.c_void_p:
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 3)(ERROR_LOG, ERROR_LOG_SIZE, OPTIMISATION)
        values = (ctypes.c_void_p * 3)(ctypes.addressof(log), len(log), 0)
        try:
            count = 2 if optimise else 3
            self.call("cuModuleLoadDataEx", ctypes.byref(module), text.encode() + b"\0", count, options, values)
        except DriverError as error:
            raise DriverError(f"{error} {log.value.decode()[:500]}") from None
        return module

    def function(self, module: ctypes.c_void_p, entry: str, shared: int) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        if shared > 48 * 1024:
            self.call("cuFuncSetAttribute", function, MAX_SHARED, shared)
        return function

    def launch(self, function: ctypes.c_void_p, grid: int, block: int, shared: int, values: list[bytes]) -> None:
        """``values``: the bytes of each parameter. Clusters are a directive of the kernel."""
        storage = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * max(1, len(storage)))(*(ctypes.addressof(value) for value in storage))
        self.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, None, pointers, None)
        self.call("cuCtxSynchronize")

    def tensor_map(self, tensor: Map, address: int) -> bytes:
        storage = ctypes.create_string_buffer(128 + 128)
        aligned = -(-ctypes.addressof(storage) // 128) * 128
        rank = len(tensor.shape)
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(aligned),
            TYPES.index(tensor.dtype),
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*tensor.shape),
            (ctypes.c_uint64 * rank)(*tensor.strides, 0),
            (ctypes.c_uint32 * rank)(*tensor.box),
            (ctypes.c_uint32 * rank)(*tensor.steps),
            0,  # interleave none
            SWIZZLES[tensor.swizzle],
            0,  # L2 promotion none
            {"zero": 0, "nan": 1}[tensor.fill],
        )
        encoded = ctypes.string_at(aligned, 128)
        self.told.append("map " + " ".join(f"{word:x}" for word in np.frombuffer(encoded, np.uint64)[:12]))
        return encoded

    def run(self, case: Case, pattern: int) -> dict[str, Array]:
        """The outputs, after shared memory was filled with the pattern everywhere."""
        self.told = []
        if case.module not in self.modules:
            self.modules[case.module] = self.load(case.module.text, case.module.optimise)
        function = self.function(self.modules[case.module], case.entry, case.shared)
        self.launch(self.scrubber, self.multiprocessors, 1024, SHARED_LIMIT, [np.uint32(pattern).tobytes()])
        arrays, addresses, at = case.initial(), dict[str, int](), GUARD
        for name, array in arrays.items():
            addresses[name] = self.arena + at
            at += -(-array.nbytes // 256) * 256 + GUARD
        assert at <= ARENA, case.name
        image = np.full(at, UNWRITTEN, np.uint8)
        for name, array in arrays.items():
            start = addresses[name] - self.arena
            image[start : start + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        device, size = ctypes.c_uint64(self.arena), ctypes.c_size_t(at)
        self.call("cuMemcpyHtoD_v2", device, ctypes.c_void_p(image.ctypes.data), size)
        self.launch(function, case.grid, case.block, case.shared, parameters(case, addresses, self.tensor_map))
        after = np.empty_like(image)
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(after.ctypes.data), device, size)
        outputs = {}
        for output in case.outputs:
            array, start = arrays[output.name], addresses[output.name] - self.arena
            found = after[start : start + array.nbytes].copy()
            outputs[output.name] = found.view(array.dtype).reshape(array.shape)
            image[start : start + array.nbytes] = found
        if not np.array_equal(image, after):
            place = self.arena + int(np.flatnonzero(image != after)[0])
            raise DriverError(f"a write outside the outputs, at {place:#x}; buffers at {addresses}")
        return outputs


def parameters(case: Case, addresses: dict[str, int], tensor_map: Callable[[Map, int], bytes]) -> list[bytes]:
    """The bytes of each parameter, the tensor maps by the function given."""
    found = []
    for argument in case.arguments:
        if isinstance(argument, Word):
            found.append(np.uint32(argument.value).tobytes())
        elif isinstance(argument, Map):
            found.append(tensor_map(argument, addresses[argument.buffer.name]))
        else:
            found.append(np.uint64(addresses[argument.name]).tobytes())
    return found
