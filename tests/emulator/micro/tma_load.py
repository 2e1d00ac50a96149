"""Tensor loads: every CTA loads one box and copies the raw bytes of shared memory out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

import numpy as np

from . import data
from .case import Array, Case, Input, Map, Module, Output, Word
from .ptx import Kernel

PREFIX = "tma_load"
LANDING = 32 * 1024  # bytes of shared memory for the box; the mbarrier stands behind them
SHARED = LANDING + 64
SIZES = {"uint8": 1, "uint16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "float32": 4, "uint64": 8, "float64": 8}


def load_kernel(dimensions: int) -> str:
    """A row of the table: five coordinates, the place in shared memory."""
    kernel = Kernel(f"load_{dimensions}d", "map:map table:ptr out:ptr came:ptr expected:u32 dump:u32")
    base, first = kernel.smem(), kernel.first_thread()
    kernel.fill(base, "%dump", 0x5A5A5A5A)
    barrier = kernel.set("r", f"add.u32 $, {base}, {LANDING}")
    cta = kernel.cta()
    row = kernel.offset("%table", cta, 32)
    coordinates = [kernel.set("r", f"ld.global.b32 $, [{row}+{4 * i}]") for i in range(dimensions)]
    place = kernel.set("r", f"ld.global.b32 $, [{row}+20]")
    kernel(
        f"add.u32 {place}, {place}, {base};",
        f"@{first} mbarrier.init.shared::cta.b64 [{barrier}], 1;",
        "fence.mbarrier_init.release.cluster;",
        "fence.proxy.async;",
        "bar.sync 0;",
        f"@{first} mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], %expected;",
        f"@{first} cp.async.bulk.tensor.{dimensions}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[{place}], [%map, {{{', '.join(coordinates)}}}], [{barrier}];",
    )
    came = kernel.wait(barrier)
    kernel(f"@{first} st.global.b32 [{kernel.offset('%came', cta, 4)}], {came};", "bar.sync 0;")
    target = kernel.set("d", f"mul.wide.u32 $, {cta}, %dump")
    kernel(f"add.u64 {target}, {target}, %out;")
    kernel.copy(target, base, "%dump", shared_source=True)
    return kernel.text()


def multicast_kernel() -> str:
    """Clusters of two. CTA r loads the box at (c0, c1 + r * step) to its part of both, or of those in its mask.

    A row of the table: c0, c1, step, two masks, two byte counts to expect, the distance of the parts.
    """
    kernel = Kernel("multicast", "map:map table:ptr out:ptr came:ptr dump:u32", ".reqnctapercluster 2, 1, 1")
    base, first = kernel.smem(), kernel.first_thread()
    kernel.fill(base, "%dump", 0x5A5A5A5A)
    barrier = kernel.set("r", f"add.u32 $, {base}, {LANDING}")
    cta, rank = kernel.cta(), kernel.set("r", "mov.u32 $, %cluster_ctarank")
    row = kernel.offset("%table", kernel.set("r", f"shr.u32 $, {cta}, 1"), 32)
    c0, c1, step, distance = (kernel.set("r", f"ld.global.b32 $, [{row}+{offset}]") for offset in (0, 4, 8, 28))
    mine = kernel.offset(row, rank, 4)
    mask32 = kernel.set("r", f"ld.global.b32 $, [{mine}+12]")
    expected = kernel.set("r", f"ld.global.b32 $, [{mine}+20]")
    mask = kernel.set("h", f"cvt.u16.u32 $, {mask32}")
    sends = kernel.set("p", f"setp.ne.u32 $, {mask32}, 0")
    kernel(f"and.pred {sends}, {sends}, {first};", f"mad.lo.u32 {c1}, {rank}, {step}, {c1};")
    place = kernel.set("r", f"mad.lo.u32 $, {rank}, {distance}, {base}")
    kernel(
        f"@{first} mbarrier.init.shared::cta.b64 [{barrier}], 1;",
        "fence.mbarrier_init.release.cluster;",
        "fence.proxy.async;",
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.wait.acquire.aligned;",
        f"@{first} mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {expected};",
        f"@{sends} cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        f"[{place}], [%map, {{{c0}, {c1}}}], [{barrier}], {mask};",
    )
    came = kernel.wait(barrier)
    kernel(f"@{first} st.global.b32 [{kernel.offset('%came', cta, 4)}], {came};", "bar.sync 0;")
    target = kernel.set("d", f"mul.wide.u32 $, {cta}, %dump")
    kernel(f"add.u64 {target}, {target}, %out;")
    kernel.copy(target, base, "%dump", shared_source=True)
    kernel("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;")
    return kernel.text()


MODULE = Module(PREFIX, lambda: [*map(load_kernel, range(1, 6)), multicast_kernel()])


def packed(shape: tuple[int, ...], size: int, pad: int = 0) -> tuple[int, ...]:
    """Strides of a tensor whose rows are padded to a multiple of 16 bytes, and then some."""
    strides = [(-(-shape[0] * size // 16) * 16) + 16 * pad]
    for extent in shape[1:-1]:
        strides.append(strides[-1] * extent + 16 * pad)
    return tuple(strides[: len(shape) - 1])


def tensor_bytes(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    span = shape[0] * size + sum((extent - 1) * stride for extent, stride in zip(shape[1:], strides, strict=True))
    return -(-span // 16) * 16


def aligned(at: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The innermost coordinate at or below the given one whose bytes are a multiple of 16.

    Any other one is an illegal instruction on the H200, even where the box lies outside the tensor.
    """
    unit = 16 // size
    return (at[0] // unit * unit, *at[1:])


def places(shape: tuple[int, ...], box: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """The corner, inside, over each end of each dimension, over all ends, outside altogether."""
    unit = 16 // size
    zero = (0,) * len(shape)
    inside = tuple(min(unit if d == 0 else 1, max(0, s - b)) for d, (s, b) in enumerate(zip(shape, box, strict=True)))
    found = [zero, inside]
    for d, (extent, width) in enumerate(zip(shape, box, strict=True)):
        for at in (-(width + 1) // 2, extent - (width + 1) // 2, -width, extent + (unit - 1) * (d == 0)):
            found.append((*inside[:d], at, *inside[d + 1 :]))
    found.append(tuple(-1 for _ in shape))
    found.append(tuple(extent - 1 for extent in shape))
    return list(dict.fromkeys(aligned(at, size) for at in found))


def table(rows: Iterable[tuple[int, ...]], at: Iterable[int] = (0,)) -> Array:
    """Coordinates, and the place in shared memory in the sixth word."""
    result = []
    for row, place in zip(rows, itertools.cycle(at), strict=False):
        result.append([*row, *[0] * (5 - len(row)), place, 0, 0])
    return np.array(result, np.int32)


def load_case(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    *,
    pad: int = 0,
    at: Iterable[int] = (0,),
    rows: list[tuple[int, ...]] | None = None,
    elements: tuple[int, ...] = (),
    swizzle: int = 0,
    fill: str = "zero",
) -> Case:
    size = SIZES[dtype]
    strides = packed(shape, size, pad)
    source = Input("source", partial(data.words, 5, tensor_bytes(shape, strides, size) // 4))
    tensor = Map(source, dtype, shape, strides, box, elements, swizzle, fill)  # type: ignore[arg-type]
    count = [-(-width // step) for width, step in zip(box, tensor.steps, strict=True)]
    count[0] = box[0]  # the stride of the innermost dimension is ignored without interleave
    bytes_ = int(np.prod(count)) * size
    places_ = table(rows if rows is not None else places(shape, box, size), at)
    dump = -(-(bytes_ + max(places_[:, 5])) // 128) * 128 + 128
    assert dump <= LANDING, name
    out = Output("out", "<u4", (len(places_), int(dump) // 4))
    came = Output("came", "<u4", (len(places_),))
    arguments = (tensor, Input("table", lambda: places_), out, came, Word(bytes_), Word(int(dump)))
    entry = f"load_{len(shape)}d"
    return Case(f"{PREFIX}/{name}", MODULE, entry, arguments, grid=len(places_), block=64, shared=SHARED)


def dimension_cases() -> Iterable[Case]:
    """1D to 5D, all types, no swizzle."""
    shape, box = (37, 11, 5, 4, 3), (16, 4, 3, 2, 2)
    for d, dtype in itertools.product(range(1, 6), SIZES):
        yield load_case(f"{d}d_{dtype}", dtype, shape[:d], box[:d], pad=d % 2)
    yield load_case("1d_wide", "uint32", (1000,), (256,))
    yield load_case("2d_tall", "uint8", (64, 700), (16, 256))


def swizzle_cases() -> Iterable[Case]:
    """Rows as wide as the swizzle, narrower ones, and boxes that do not begin at a multiple of the pattern."""
    for swizzle, (dtype, size) in itertools.product((32, 64, 128), (("uint8", 1), ("bfloat16", 2), ("float32", 4))):
        inner = swizzle // size
        shape = (inner + 16 // size * 3, 37, 3, 3, 2)
        for d in (2, 3) if size != 2 else (1, 2, 3, 4, 5):
            box = (inner, 19, 2, 2, 2)[:d]
            yield load_case(f"{d}d_{dtype}_swizzle{swizzle}", dtype, shape[:d], box, swizzle=swizzle)
        unit = 16 // size
        rows = [(0, 0), (0, 5), (unit, 3), (0, 30), (-unit, -2), (2 * unit, 1)]
        name = f"place_{dtype}_swizzle{swizzle}"
        at = (128, 256, 512, 896, 1024, 384)
        yield load_case(name, dtype, shape[:2], (inner, 16), swizzle=swizzle, rows=rows, at=at)
    for swizzle, inner in [(128, 64), (128, 32), (128, 16), (64, 32), (64, 16), (32, 16), (128, 96)]:
        box, shape = (inner // 2, 17), (64, 40)
        yield load_case(f"narrow_{inner}_swizzle{swizzle}", "float16", shape, box, swizzle=swizzle)


def fill_cases() -> Iterable[Case]:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for d in (1, 2, 4):
            box, shape = (16, 5, 3, 2)[:d], (21, 7, 5, 3)[:d]
            yield load_case(f"nan_{d}d_{dtype}", dtype, shape, box, fill="nan")
    yield load_case("nan_swizzled", "bfloat16", (72, 21), (64, 16), fill="nan", swizzle=128)


def stride_cases() -> Iterable[Case]:
    """Element strides: of a box of b elements every s-th is loaded."""
    for dtype in ("uint8", "bfloat16", "uint32"):
        yield load_case(f"stride2_{dtype}", dtype, (48, 23), (16, 8), elements=(1, 2))
        yield load_case(f"stride3_{dtype}", dtype, (48, 23), (16, 8), elements=(1, 3))
    yield load_case("stride_3d", "float16", (64, 12, 9), (64, 6, 4), elements=(1, 2, 2), swizzle=128)
    yield load_case("stride_4d", "float32", (16, 9, 8, 7), (16, 3, 4, 5), elements=(1, 2, 3, 2))
    yield load_case("stride_fill", "float32", (16, 9, 8), (16, 5, 5), elements=(1, 2, 3), fill="nan")


def multicast_cases() -> Iterable[Case]:
    for swizzle in (0, 128):
        shape, box, size = (80, 50), (64, 16), 2
        strides = packed(shape, size)
        source = Input("source", partial(data.words, 6, tensor_bytes(shape, strides, size) // 4))
        tensor = Map(source, "bfloat16", shape, strides, box, (), swizzle)  # type: ignore[arg-type]
        part = 64 * 16 * size
        rows = np.array(
            [
                (0, 0, 16, 3, 3, 2 * part, 2 * part, part),
                (16, 7, 20, 3, 3, 2 * part, 2 * part, part),
                (-8, 40, 16, 3, 3, 2 * part, 2 * part, part),
                (0, 0, 16, 2, 1, part, part, part),
                (0, 3, 16, 3, 0, part, part, part),
                (0, 3, 16, 0, 2, 0, part, part),
            ],
            np.int32,
        )
        dump = 2 * part + 128
        out, came = Output("out", "<u4", (2 * len(rows), dump // 4)), Output("came", "<u4", (2 * len(rows),))
        given = (tensor, Input("table", partial(np.copy, rows)), out, came, Word(dump))
        name, grid = f"{PREFIX}/multicast_swizzle{swizzle}", 2 * len(rows)
        yield Case(name, MODULE, "multicast", given, grid=grid, block=64, cluster=2, shared=SHARED)


def cases() -> list[Case]:
    return [*dimension_cases(), *swizzle_cases(), *fill_cases(), *stride_cases(), *multicast_cases()]
