"""What the emulator's interface refuses: each message names what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from emulator.ptx_text import DECLARATIONS, module

from cupyfa.emulator import EmulatedDevice
from cupyfa.emulator.syntax import PtxError

PARAMETERS = ".param .u64 x, .param .u32 n, .param .align 64 .b8 map[128]"
HEAD = ".extern .shared .align 16 .b8 smem[];"
PTX = module(f"{DECLARATIONS}\nmov.u32 %r0, smem;\nret;", PARAMETERS, HEAD, "sm_90a")
FIXED = PTX.replace(") {", ") .reqntid 64, 1, 1 .reqnctapercluster 2, 1, 1 {")
TWO = PTX + PTX.replace(".entry k", ".entry j")
LIMITED = PTX.replace(") {", ") .maxntid 64, 1, 1 {")
MAP = {"dtype": "float16", "shape": (64, 64), "strides": (128,), "box": (64, 8), "swizzle": 128}


def device() -> EmulatedDevice:
    return EmulatedDevice("sm_90a", sms=2)


def launch(ptx: str = PTX, **changes: Any) -> Any:
    here = device()
    x = np.zeros(64, np.float32)
    arguments: dict[str, Any] = {"grid": 1, "block": 32, "params": [x, 3, bytes(128)]} | changes
    return here.load(ptx).launch(**arguments)


def encode(**changes: Any) -> bytes:
    here = device()
    x = np.zeros((64, 64), np.float16)
    address = here.register(x, name="x")
    fields = MAP | changes
    return here.tensor_map(fields.pop("address", 0) + address, **fields)


def test_the_calls_that_the_cases_change_are_right() -> None:
    assert launch().verdict == "clean"
    assert launch(FIXED, grid=2, block=64).verdict == "clean"
    assert len(encode()) == 128


GEOMETRY: dict[str, tuple[dict[str, Any], str]] = {
    "no threads": ({"block": 0}, "block is 0"),
    "too many threads": ({"block": 1025}, "block is .*at most"),
    "too many threads together": ({"block": (64, 32, 1)}, "2048 threads"),
    "too deep a block": ({"block": (1, 1, 65)}, "block is .*at most"),
    "no CTAs": ({"grid": (4, 0)}, "grid is"),
    "a negative grid": ({"grid": -1}, "grid is -1"),
    "four dimensions": ({"grid": (1, 1, 1, 1)}, "grid is .*one to three"),
    "no dimensions": ({"block": ()}, "block is .*one to three"),
    "too high a grid": ({"grid": (1, 65536)}, "grid is .*at most"),
    "more CTAs than have numbers": ({"grid": (65536, 65535)}, "grid is"),
    "a grid that the cluster does not divide": ({"grid": 3, "cluster": 2}, "not a multiple of the cluster"),
    "a cluster larger than the grid": ({"grid": 2, "cluster": 4}, "not a multiple of the cluster"),
    "too large a cluster": ({"grid": 32, "cluster": 32}, "more than 16"),
    "no cluster": ({"cluster": 0}, "cluster is 0"),
    "negative shared memory": ({"shared": -1}, "shared memory"),
    "too much shared memory": ({"shared": 227 * 1024 + 1}, "shared memory"),
    "missing parameters": ({"params": []}, "0 params"),
    "too many parameters": ({"params": [0, 0, bytes(128), 0]}, "4 params"),
    "a parameter that is too large": ({"params": [0, 1 << 32, bytes(128)]}, "parameter n"),
    "a parameter that is too negative": ({"params": [0, -(1 << 31) - 1, bytes(128)]}, "parameter n"),
    "a scalar of another size": ({"params": [0, np.int64(3), bytes(128)]}, "parameter n has 4 bytes, got 8"),
    "an address in 4 bytes": ({"params": [0, np.zeros(4), bytes(128)]}, "parameter n has 4 bytes; an array"),
    "a short tensor map": ({"params": [0, 0, bytes(64)]}, "parameter map has 128 bytes, got 64"),
    "a short block": ({"params": bytes(191)}, "191 bytes, k takes 192"),
    "an unknown policy": ({"policy": "optimistic"}, "policy is 'optimistic'"),
    "a negative seed": ({"seed": -1}, "seed is -1"),
    "a seed of 65 bits": ({"seed": 1 << 64}, "seed is"),
    "nothing resident": ({"resident": 0}, "resident is 0"),
    "more resident than fits": ({"resident": 1 << 20}, "resident is"),
    "negative slots": ({"slots": -1}, "slots is -1"),
    "more registers than there are": ({"launch_registers": 256}, "launch_registers is 256"),
    "a negative limit": ({"max_instructions": -1}, "max_instructions is -1"),
    "a negative idle limit": ({"max_idle": -5}, "max_idle is -5"),
    "an unknown kernel": ({"name": "other"}, "no kernel other"),
}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "a float grid": ({"grid": 1.0}, "grid is 1.0, a float"),
    "a text for a grid": ({"grid": "1"}, "grid is '1', a str"),
    "a bool for a block": ({"block": True}, "block is True, a bool"),
    "floats in a block": ({"block": (32, 1.5)}, "block is 1.5, a float"),
    "float shared memory": ({"shared": 1024.0}, "shared is 1024.0, a float"),
    "a float seed": ({"seed": 0.5}, "seed is 0.5, a float"),
    "an int for a flag": ({"checks": 1}, "checks is 1, a int"),
    "None for a flag": ({"review": None}, "review is None"),
    "a float parameter": ({"params": [0, 1.0, bytes(128)]}, "parameter n is a float"),
    "None for an address": ({"params": [None, 0, bytes(128)]}, "parameter x is a NoneType"),
    "a dict of parameters": ({"params": {"x": 0}}, "params is a dict"),
    "a text of parameters": ({"params": "abc"}, "params is a str"),
    "a float resident": ({"resident": 1.5}, "resident is 1.5"),
}
MAPS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": ({"dtype": "float8"}, "dtype is 'float8'"),
    "no dimensions": ({"shape": (), "strides": (), "box": ()}, "0 dimensions"),
    "six dimensions": ({"shape": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "6 dimensions"),
    "too few strides": ({"strides": ()}, "0 strides for 2"),
    "too short a box": ({"box": (64,)}, "box and element_strides"),
    "an odd address": ({"address": 8}, "multiple of 16"),
    "an address below 0": ({"address": -(1 << 63)}, "64-bit address"),
    "a size of zero": ({"shape": (64, 0)}, "shape .*1 to 2"),
    "strides of 8 bytes": ({"strides": (8,)}, "strides .*16"),
    "a box of 257 rows": ({"box": (64, 257)}, "box .*256"),
    "an empty box": ({"box": (64, 0)}, "box .*256"),
    "a traversal stride of 9": ({"element_strides": (9, 1)}, "element_strides .*1 to 8"),
    "an unknown swizzle": ({"swizzle": 48}, "swizzle is 48"),
    "an inner box of 8 bytes": ({"box": (4, 8), "swizzle": 0}, "inner box has 8 bytes"),
    "an inner box wider than the swizzle": ({"swizzle": 64}, "swizzle spans 64"),
    "an unknown fill": ({"fill": "one"}, "fill is 'one'"),
    "NaN for integers": ({"dtype": "uint16", "fill": "nan"}, "floating-point"),
    "a tensor that ends behind its buffer": ({"shape": (64, 65)}, "ends 128 bytes behind x"),
    "an address of nothing": ({"address": 1 << 40}, "not in registered memory"),
}
MAP_KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "a float size": ({"shape": (64.0, 64)}, "entry of shape is 64.0"),
    "a number for a box": ({"box": 64}, "box is a int"),
    "a float stride": ({"strides": (128.0,)}, "entry of strides is 128.0"),
}


@pytest.mark.parametrize("case", GEOMETRY)
def test_a_launch_without_meaning_is_a_value_error(case: str) -> None:
    changes, message = GEOMETRY[case]
    with pytest.raises(ValueError, match=message):
        launch(**changes)


@pytest.mark.parametrize("case", KINDS)
def test_a_launch_with_another_kind_of_value_is_a_type_error(case: str) -> None:
    changes, message = KINDS[case]
    with pytest.raises(TypeError, match=message):
        launch(**changes)


@pytest.mark.parametrize("case", MAPS)
def test_a_tensor_map_that_the_driver_would_refuse(case: str) -> None:
    changes, message = MAPS[case]
    with pytest.raises(ValueError, match=f"tensor map: .*{message}"):
        encode(**changes)


@pytest.mark.parametrize("case", MAP_KINDS)
def test_a_tensor_map_of_other_kinds_of_values(case: str) -> None:
    changes, message = MAP_KINDS[case]
    with pytest.raises(TypeError, match=f"tensor map: .*{message}"):
        encode(**changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 32}, "block is .*requires"),
        ({"cluster": 1}, "cluster is .*requires"),
        ({"grid": 3}, "not a multiple"),
    ],
)
def test_what_a_kernel_requires_of_its_launch(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(FIXED, **({"grid": 2, "block": 64} | change))


def test_a_kernel_that_allows_fewer_threads() -> None:
    assert launch(LIMITED, block=64).verdict == "clean"
    with pytest.raises(ValueError, match="96 threads, k allows 64"):
        launch(LIMITED, block=96)


def test_another_architecture() -> None:
    with pytest.raises(ValueError, match="k is for sm_90a, the device is sm_100a"):
        EmulatedDevice("sm_100a").load(PTX).launch(grid=1, block=32, params=bytes(192))


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: EmulatedDevice("sm_80"), ValueError, "arch is 'sm_80'"),
        (lambda: EmulatedDevice(sms=0), ValueError, "sms is 0"),
        (lambda: EmulatedDevice(sms=1.5), TypeError, "sms is 1.5"),  # type: ignore[arg-type]
        (lambda: device().load(b"abc"), TypeError, "ptx is a bytes"),  # type: ignore[arg-type]
        (lambda: device().load(".version 8.6 .target sm_90a .entry"), PtxError, "line 1"),
        (lambda: device().load(TWO).launch(grid=1, block=1), PtxError, "name one"),
        (lambda: device().register([1, 2], name="q"), TypeError, "q is a list"),  # type: ignore[arg-type]
        (lambda: device().register(np.array([object()]), name="q"), TypeError, "dtype object"),
        (lambda: device().register(read_only(), name="q"), ValueError, "q is read-only"),
        (lambda: device().register(np.broadcast_to(np.float32(1), (4, 4)), name="q"), ValueError, "q is read-only"),
    ],
)
def test_devices_modules_and_memory(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_an_array_that_is_registered_twice_is_writable_if_it_was_once() -> None:
    here, x = device(), np.zeros(8, np.float32)
    assert here.register(x, writable=False) == here.register(x)
    assert here.register(x[2:]) == here.register(x) + 8
    assert [buffer[2] for buffer in here.memory()] == [True]


def test_a_deadlock_names_places_variables_and_what_is_missing() -> None:
    body = f"""{DECLARATIONS}
    .shared .align 8 .b64 full[2];
    mov.u32 %r0, full;
    mov.u32 %r1, %tid.x;
    setp.eq.u32 %p0, %r1, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%r0+8], 3;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0+8], 64;
    AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r0+8], 0;
    @!%p1 bra AGAIN;
    ret;"""
    text = module(body, target="sm_90a")
    line = 1 + text.split("\n").index("    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r0+8], 0;")
    run = device().load(text).launch(grid=1, block=96)
    (finding,) = run.findings
    assert finding.hazard == "PROGRESS_DEADLOCK"
    assert f"CTA 0 warps 0-2 at <ptx>:{line}: mbarrier.try_wait" in finding.detail
    assert "mbarrier at byte 8 (full+8) of CTA 0, parity 0: phase 0 is open" in finding.detail
    assert "2 of 3 arrivals and 64 bytes are missing, 0 copies in flight" in finding.detail
    assert finding.detail.count("\n") == 1


def test_a_deadlock_names_bytes_that_nobody_expected() -> None:
    body = f"""{DECLARATIONS}
    .shared .align 8 .b64 full;
    mov.u32 %r0, full;
    mbarrier.init.shared::cta.b64 [%r0], 1;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 256;
    mbarrier.arrive.shared::cta.b64 _, [%r0];
    AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r0], 0;
    @!%p1 bra AGAIN;
    ret;"""
    run = device().load(module(body, target="sm_90a")).launch(grid=1, block=1)
    (finding,) = (f for f in run.findings if f.hazard == "PROGRESS_DEADLOCK")
    assert "0 of 1 arrivals are missing, 256 bytes more than expected have arrived, 0 copies" in finding.detail


def test_a_timeout_names_who_runs_and_what_is_in_flight() -> None:
    body = f"""{DECLARATIONS}
    mov.u32 %r0, smem;
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p0, %r1, 32;
    @%p0 bar.sync 1, 64;
    AGAIN:
    ld.volatile.shared.u32 %r2, [%r0];
    bra AGAIN;"""
    run = (
        device()
        .load(module(body, head=HEAD, target="sm_90a"))
        .launch(grid=1, block=64, shared=16, max_instructions=10_000, policy="lazy")
    )
    finding = run.findings[-1]
    assert finding.hazard == "PROGRESS_TIMEOUT"
    assert "waits for named barrier 1: 32 of 64 threads have arrived" in finding.detail
    assert "CTA 0 warp 1 at" in finding.detail
    assert ": runs" in finding.detail


# --- Registered memory ---


def test_an_array_that_is_dense_in_another_order_is_memory() -> None:
    device = EmulatedDevice()
    array = np.zeros((4, 3, 2), np.float32).transpose(1, 0, 2).copy(order="K")
    assert not array.flags.c_contiguous
    address = device.register(array, name="array")
    assert device.register(array[1, 2], name="part") == address + array.strides[0] + 2 * array.strides[1]
    ((_, data, *_),) = device.memory()
    assert data.size == array.nbytes
    with pytest.raises(ValueError, match="neither dense nor a view of a dense array"):
        device.register(np.ndarray((8, 4), np.float32, bytearray(256), strides=(32, 8)))


def test_threads_may_register_at_the_same_time() -> None:
    device = EmulatedDevice()
    arrays = [np.zeros(16, np.float32) for _ in range(400)]
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            addresses = list(pool.map(device.register, arrays))
    finally:
        sys.setswitchinterval(old)
    assert len(set(addresses)) == len(arrays)
    assert len(device.memory()) == len(arrays)


def test_a_larger_array_at_the_same_place_is_registered_anew() -> None:
    device = EmulatedDevice()
    memory = bytearray(4096)
    small = device.register(np.frombuffer(memory, np.float32, 32))
    large = device.register(np.frombuffer(memory, np.float32))
    assert small != large
    assert device.register(np.frombuffer(memory, np.float32)) == large
