"""The launch layer without a driver: its structs are those of the driver and of the kernels."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvrtc_tools import NEEDS_NVRTC, compile_ptx, initialiser

import cupyfa
from cupyfa._launch import (
    PARAMETER_SIZES,
    ForwardLauncher,
    Function,
    LaunchGeometry,
    TensorMapGeometry,
    launch,
    pack_plan,
    plan_bytes,
    unpack_traits,
)
from cupyfa.sources import read

# What cuda/params.h says, in the notation of Python's struct, after the four tensor maps of 128 bytes. The map of the
# bias, which begins at a multiple of 64 bytes, is 128 bytes of the padding here.
LAYOUT = {
    "lse": "Q",
    "lse_stride_batch": "q",
    "lse_stride_head": "q",
    "lse_stride_row": "q",
    "sink": "Q",
    "alibi_slopes": "Q",
    "sink_stride": "q",
    "alibi_stride_batch": "q",
    "alibi_stride_head": "q",
    "scale_log2": "f",
    "softcap_slope": "f",
    "softcap": "f",
    "seqlen_q": "i",
    "seqlen_k": "i",
    "q_step": "i",
    "o_shift": "i",
    "last_diagonal": "i",
    "first_diagonal": "i",
    "heads_q": "I",
    "heads_per_kv": "I",
    "heads_total": "I",
    "tiles_m": "I",
    "tiles": "I",
    "heads_per_section": "I",
    "plan": "4xQ",
    "tile_counter": "Q",
    "bias_data": "40x128xQ",
    "bias_stride_batch": "q",
    "bias_stride_head": "q",
    "bias_stride_row": "q",
    "bias_stride_key": "q",
    "bias_rows": "i",
    "bias_keys": "i",
    "scale": "f",
}
BIAS_MAP = 704
VALUES = {
    "lse_stride_batch": 2**40 + 1,
    "lse_stride_head": -(2**35) - 2,
    "lse_stride_row": 3,
    "sink_stride": 2**41 + 4,
    "alibi_stride_batch": 2**42 + 5,
    "alibi_stride_head": -(2**36) - 6,
    "bias_stride_batch": 2**43 + 7,
    "bias_stride_head": -(2**37) - 8,
    "bias_stride_row": 2**38 + 9,
    "bias_stride_key": 10,
    "bias_rows": 2**31 - 1025,
    "bias_keys": 78,
    "scale": 0.4375,
    "scale_log2": 0.3125,
    "softcap_slope": 0.15625,
    "softcap": 0.21875,
    "seqlen_q": 2**31 - 1024,
    "seqlen_k": 77,
    "q_step": 2**30 + 79,
    "o_shift": -(2**30) + 80,
    "last_diagonal": 2**31 - 1025,
    "first_diagonal": -(2**31) + 9,
    "heads_q": 65_537,
    "heads_per_kv": 11,
    "heads_total": 2**32 - 2,
    "tiles_m": 13,
    "tiles": 2**31 + 14,
    "heads_per_section": 15,
}
#: Pointers behind the tensor maps, in the order of the addresses that a launch takes.
ADDRESSES = {"lse": 2**47 - 4, "sink": 2**46 - 8, "alibi_slopes": 2**45 - 16, "bias_data": 2**44 - 64}
TRAITS = ("threads", "shared_bytes", "cluster_size", "tile_m", "tile_n", "box_cols", "bias_box_cols", "bias_box_rows")
TRAITS += ("bias_swizzle", "persistent", "dynamic", "producer_registers", "consumer_registers")


def map_geometry(index: int = 0) -> TensorMapGeometry:
    return TensorMapGeometry("bfloat16", (64, 100 + index, 3, 2), (384, 128, 38400), (64, 128))


def launcher(function: Function | None = None, **changes: Any) -> ForwardLauncher:
    values = VALUES | changes
    lse_strides = tuple(values.pop(name) for name in ("lse_stride_batch", "lse_stride_head", "lse_stride_row"))
    alibi_strides = tuple(values.pop(name) for name in ("alibi_stride_batch", "alibi_stride_head"))
    bias_strides = tuple(values.pop(f"bias_stride_{axis}") for axis in ("batch", "head", "row", "key"))
    return ForwardLauncher(
        function=function or Function(0),
        geometry=LaunchGeometry(grid=132, threads=384, shared_bytes=200_000),
        **dict(zip("qkvo", (map_geometry(i) for i in range(4)), strict=True)),
        lse_strides=lse_strides,
        alibi_strides=alibi_strides,
        bias_strides=bias_strides,
        **values,
    )


def encode(geometry: TensorMapGeometry, address: int) -> bytes:
    """A stand-in for the driver: 128 bytes that tell the address and the tensor."""
    return struct.pack("<16Q", address, *geometry.shape, *range(11))


def pack(tile_counter: int = 0, plan: int = 0, **changes: Any) -> bytes:
    """A packed FwdParams whose tensors are at 1 to 4; the other arrays are nowhere unless `changes` says where."""
    addresses = [changes.pop(name, 0) for name in ADDRESSES]
    return launcher(**changes).pack(encode, (1, 2, 3, 4, *addresses), tile_counter, plan)


def memory(struct_of_binding: Any, size: int) -> bytes:
    return ctypes.string_at(struct_of_binding.getPtr(), size)


def test_tensor_map_is_the_drivers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason=NEEDS_NVRTC)
    tensor_map = driver.CUtensorMap()
    tensor_map.opaque = [driver.cuuint64_t(n) for n in range(1, 17)]
    assert struct.unpack("<16Q", memory(tensor_map, PARAMETER_SIZES["TensorMap"])) == tuple(range(1, 17))
    with pytest.raises(IndexError):
        tensor_map.opaque = [driver.cuuint64_t(n) for n in range(17)]


def test_launch_config_is_the_drivers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason=NEEDS_NVRTC)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 11, 12, 13
    config.blockDimX, config.blockDimY, config.blockDimZ = 14, 15, 16
    config.sharedMemBytes, config.hStream = 17, driver.CUstream(2**40 + 18)
    attributes = [driver.CUlaunchAttribute(), driver.CUlaunchAttribute()]
    attributes[0].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster = attributes[0].value.clusterDim
    cluster.x, cluster.y, cluster.z = 21, 22, 23
    attributes[1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[1].value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = attributes, 2
    assert PARAMETER_SIZES["LaunchConfig"] == struct.calcsize("<7I4xQQI4x") == 56
    *numbers, stream, address, count = struct.unpack("<7I4xQQI4x", memory(config, 56))
    assert (*numbers, stream, count) == (11, 12, 13, 14, 15, 16, 17, 2**40 + 18, 2)
    size = PARAMETER_SIZES["LaunchAttribute"]  # right if the second attribute begins there
    assert size == 72
    assert struct.unpack_from("<I4xIII", ctypes.string_at(address, size)) == (4, 21, 22, 23)
    assert struct.unpack_from("<I4xi", ctypes.string_at(address + size, size)) == (6, 1)


DRIVER_CONSTANTS = {
    "cluster_dimension": "CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
    "programmatic_stream_serialization": "CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    "max_dynamic_shared_size_bytes": "CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "tensor_map_float16": "CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    "tensor_map_float32": "CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
    "tensor_map_bfloat16": "CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    "tensor_map_interleave_none": "CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE",
    "tensor_map_swizzle_none": "CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE",
    "tensor_map_swizzle_32b": "CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B",
    "tensor_map_swizzle_64b": "CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B",
    "tensor_map_swizzle_128b": "CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B",
    "tensor_map_l2_promotion_128b": "CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
    "tensor_map_l2_promotion_256b": "CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
    "tensor_map_oob_fill_zeros": "CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
}


def test_constants_are_the_drivers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason=NEEDS_NVRTC)
    header = (Path(__file__).resolve().parent.parent / "cupyfa" / "_driver.h").read_text(encoding="utf-8")
    ours = {name: int(value) for name, value in re.findall(r"\b(\w+) = (\d+)[,;]", header)}
    assert ours.keys() == DRIVER_CONSTANTS.keys()
    for name, path in DRIVER_CONSTANTS.items():
        kind, member = path.split(".")
        assert ours[name] == getattr(getattr(driver, kind), member).value, name


# --- Packing ---


def test_params_hold_every_value_at_its_place() -> None:
    packed = pack(tile_counter=2**44 - 32, plan=2**43 - 16, **ADDRESSES)
    assert len(packed) == PARAMETER_SIZES["FwdParams"]
    maps = [struct.unpack_from("<16Q", packed, 128 * i) for i in range(4)]
    assert maps == [(i + 1, 64, 100 + i, 3, 2, *range(11)) for i in range(4)]
    values = struct.unpack_from("<" + "".join(LAYOUT.values()), packed, 512)
    ours = VALUES | ADDRESSES | {"plan": 2**43 - 16, "tile_counter": 2**44 - 32}
    assert dict(zip(LAYOUT, values, strict=True)) == ours
    assert packed[BIAS_MAP : BIAS_MAP + 128] == bytes(128)


def test_params_hold_the_map_of_a_bias() -> None:
    plain, biased = pack(bias_data=5), pack(bias=map_geometry(7), bias_data=5)
    assert struct.unpack_from("<16Q", biased, BIAS_MAP) == (5, 64, 107, 3, 2, *range(11))
    assert biased == plain[:BIAS_MAP] + biased[BIAS_MAP : BIAS_MAP + 128] + plain[BIAS_MAP + 128 :]


@pytest.mark.parametrize("name", LAYOUT)
def test_a_value_changes_only_its_own_bytes(name: str) -> None:
    offset = 512 + struct.calcsize("<" + "".join(list(LAYOUT.values())[: list(LAYOUT).index(name)]))
    size = struct.calcsize("<" + LAYOUT[name])
    changed = {i for i, (a, b) in enumerate(zip(pack(), pack(**{name: 1}), strict=True)) if a != b}
    assert changed
    assert changed <= set(range(offset, offset + size))


@pytest.mark.parametrize("count", [0, 5, 6, 7])
def test_a_launch_takes_eight_addresses(count: int) -> None:
    with pytest.raises(ValueError, match="values to unpack"):
        launcher().pack(encode, range(count))


def test_params_are_what_the_device_compiler_lays_out() -> None:
    opaque = ", ".join(str(n) for n in range(11))
    fields = [f"{{{{{i + 1}, 64, {100 + i}, 3, 2, {opaque}}}}}" for i in range(4)]
    fields += [f"{VALUES.get(name, 0)}{'f' * (kind == 'f')}" for name, kind in LAYOUT.items()]
    named = zip(("q", "k", "v", "o", *LAYOUT), fields, strict=True)  # in their order, else this is an error
    source = read("params.h") + (
        "__constant__ cupyfa::FwdParams example = {" + ", ".join(f".{name} = {value}" for name, value in named) + "};"
    )
    ptx = compile_ptx(source, "-std=c++20", "-arch=compute_90")
    assert initialiser(ptx, "example") == pack()


PLAN_LAYOUT = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "plan"), "Q"),
    "sequences": "I",
    **dict.fromkeys(("rows_q", "rows_k", "q_step", "k_step", "total_q", "total_k", "tile_m", "tile_n", "window"), "i"),
    **dict.fromkeys(("heads_q", "heads_per_kv", "keys_in_l2", "multiprocessors"), "I"),
    **dict.fromkeys(("tiles_grow", "longest_first"), "i"),
}


def test_plan_params_are_what_the_device_compiler_lays_out() -> None:
    values = {name: 100 + i for i, name in enumerate(PLAN_LAYOUT)} | {"tiles_grow": 1, "longest_first": 1}
    options = dict(list(values.items())[5:])
    packed = pack_plan([values[name] for name in list(PLAN_LAYOUT)[:4]], values["plan"], **options)
    assert len(packed) == PARAMETER_SIZES["PlanParams"]
    assert struct.unpack_from("<" + "".join(PLAN_LAYOUT.values()), packed) == tuple(values.values())
    pointers = list(PLAN_LAYOUT)[:5]
    source = read("params.h") + (
        "__constant__ cupyfa::PlanParams example = {"
        + ", ".join(f".{name} = {0 if name in pointers else values[name]}" for name in PLAN_LAYOUT)
        + "};"
    )
    data = initialiser(compile_ptx(source, "-std=c++20", "-arch=compute_90"), "example")
    assert data == bytes(40) + packed[40:]


def test_a_plan_is_a_header_and_its_tiles() -> None:
    assert PARAMETER_SIZES["PackedTile"] == 32
    assert plan_bytes(0) == PARAMETER_SIZES["Plan"] == 64
    assert plan_bytes(10) == 64 + 320


@pytest.mark.parametrize(("shape", "strides"), [((64,), ()), ((64, 2), ()), ((1,) * 6, (16,) * 5)])
def test_a_tensor_map_has_two_to_five_dimensions(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="2 to 5 dimensions"):
        TensorMapGeometry("float16", shape, strides, (64, 64))


def test_traits_are_what_the_device_compiler_lays_out() -> None:
    source = read("params.h") + (
        "__constant__ cupyfa::KernelTraits example = {"
        + ", ".join(f".{name} = {100 + i}" for i, name in enumerate(TRAITS))
        + "};"
    )
    data = initialiser(compile_ptx(source, "-std=c++20", "-arch=compute_90"), "example")
    assert len(data) == PARAMETER_SIZES["KernelTraits"]
    assert unpack_traits(data) == {name: 100 + i for i, name in enumerate(TRAITS)}


def test_traits_round_trip() -> None:
    values = [(-1) ** i * (2**31 - 1 - i) for i in range(len(TRAITS))]
    assert unpack_traits(struct.pack("<13i", *values)) == dict(zip(TRAITS, values, strict=True))
    assert 4 * len(TRAITS) == PARAMETER_SIZES["KernelTraits"]


@pytest.mark.parametrize("size", [0, 48, 56])
def test_traits_of_the_wrong_size(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^KernelTraits has 52 bytes, got {size}$"):
        unpack_traits(bytes(size))


def test_tensor_map_of_the_wrong_size() -> None:
    with pytest.raises(ValueError, match=r"^a tensor map has 128 bytes, got 3$"):
        launcher().pack(lambda geometry, address: b"abc", (1, 2, 3, 4, 0, 0, 0, 0))


def test_packing_leaves_the_launcher_alone() -> None:
    one = launcher()
    first = one.pack(encode, (1, 2, 3, 4, 5, 6, 7, 8))
    other = one.pack(encode, (6, 7, 8, 9, 10, 11, 12, 13))
    assert other != first
    assert one.pack(encode, (1, 2, 3, 4, 5, 6, 7, 8)) == first
    assert not one.function.launched


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tiles", 2**32),
        ("seqlen_q", 2**31),
        ("last_diagonal", 2**31),
        ("first_diagonal", -(2**31) - 1),
        ("heads_q", -1),
        ("lse_stride_row", 2**63),
        ("alibi_stride_head", -(2**63) - 1),
        ("sink", 2**64),
        ("alibi_slopes", -1),
        ("bias_stride_key", 2**63),
        ("bias_data", 2**64),
    ],
)
def test_a_value_that_does_not_fit_is_refused(name: str, value: int) -> None:
    with pytest.raises(OverflowError):
        pack(**{name: value})


# --- Geometry ---


def test_tensor_map_geometry_keeps_what_it_was_given() -> None:
    geometry = TensorMapGeometry("float16", (128, 2**31 - 1, 65_537, 3), (2**40 - 16, 256, 2**39), (64, 192))
    assert (geometry.dtype, geometry.box) == ("float16", (64, 192))
    assert (geometry.shape, geometry.strides) == ((128, 2**31 - 1, 65_537, 3), (2**40 - 16, 256, 2**39))


def test_tensor_map_geometry_promotes_to_256_bytes_unless_told_otherwise() -> None:
    assert map_geometry().l2_promotion == 256
    shape, strides = (64, 1, 1, 1), (128, 128, 128)
    assert TensorMapGeometry("float16", shape, strides, (64, 64), l2_promotion=128).l2_promotion == 128


def test_tensor_map_geometry_knows_three_dtypes() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        assert TensorMapGeometry(dtype, (64, 1, 1, 1), (128, 128, 128), (64, 64)).dtype == dtype
    with pytest.raises(KeyError, match="float64"):
        TensorMapGeometry("float64", (64, 1, 1, 1), (128, 128, 128), (64, 64))


def test_tensor_map_geometry_has_a_swizzle_unless_told_otherwise() -> None:
    assert map_geometry().swizzle == 128
    assert TensorMapGeometry("float32", (64, 1, 1, 1), (128, 128, 128), (72, 64), swizzle=0).swizzle == 0


def test_launch_geometry_shows_itself() -> None:
    geometry = LaunchGeometry(grid=1, threads=2, shared_bytes=3, cluster_size=4, programmatic=True)
    assert repr(geometry) == "LaunchGeometry(grid=1, threads=2, shared_bytes=3, cluster_size=4, programmatic=True)"


# --- Without a driver ---


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="there is a driver: libcuda.so.1 loads")
@pytest.mark.parametrize(
    "call",
    [
        lambda: map_geometry().encode(4096),
        lambda: Function(1).allow_shared_memory(100_000),
        lambda: launch(Function(1), LaunchGeometry(grid=1, threads=1, shared_bytes=0), 0, b"params"),
        lambda: launcher(function=Function(1))((1, 2, 3, 4, 0, 0, 0, 0), 0),
    ],
    ids=["encode", "allow_shared_memory", "launch", "launcher"],
)
def test_a_call_of_the_driver_says_that_there_is_none(call: Callable[[], object]) -> None:
    with pytest.raises(cupyfa.LaunchError, match=r"^libcuda\.so\.1 was not found: a launch needs an NVIDIA driver$"):
        call()
