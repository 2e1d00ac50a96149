"""Tensor stores and reductions: every CTA writes one box, and the whole tensor is the result."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

import numpy as np

from . import data
from .case import Case, Input, Map, Module, Output
from .ptx import Kernel
from .tma_load import SIZES, aligned, packed, table, tensor_bytes

PREFIX = "tma_store"
STAGE = 16 * 1024
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def store_kernel(name: str, dimensions: int, reduction: str = "") -> str:
    """A row of the table: five coordinates, the place in shared memory. CTA i writes its own bytes."""
    kernel = Kernel(name, "map:map table:ptr source:ptr")
    base, first, cta = kernel.smem(), kernel.first_thread(), kernel.cta()
    kernel.copy(base, kernel.offset("%source", cta, STAGE), STAGE, shared_source=False)
    row = kernel.offset("%table", cta, 32)
    coordinates = [kernel.set("r", f"ld.global.b32 $, [{row}+{4 * i}]") for i in range(dimensions)]
    place = kernel.set("r", f"ld.global.b32 $, [{row}+20]")
    operation = "cp.reduce" if reduction else "cp"
    suffix = f".{reduction}" if reduction else ""
    kernel(
        f"add.u32 {place}, {place}, {base};",
        "fence.proxy.async;",
        "bar.sync 0;",
        f"@{first} {operation}.async.bulk.tensor.{dimensions}d.global.shared::cta{suffix}.tile.bulk_group "
        f"[%map, {{{', '.join(coordinates)}}}], [{place}];",
        f"@{first} cp.async.bulk.commit_group;",
        f"@{first} cp.async.bulk.wait_group 0;",
    )
    return kernel.text()


def kernels() -> list[str]:
    texts = [store_kernel(f"store_{d}d", d) for d in range(1, 6)]
    texts += [store_kernel(f"add_{d}d", d, "add") for d in (1, 3, 4, 5)]
    return texts + [store_kernel(f"{reduction}_2d", 2, reduction) for reduction in REDUCTIONS]


MODULE = Module(PREFIX, kernels)


def cover(shape: tuple[int, ...], box: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Boxes side by side from the tensor's corner, the first and the last of them, and one outside: no two meet.

    No coordinate is negative: that is an illegal instruction on the H200, though loads may begin before the tensor. One
    that is no multiple of its box is clipped at the far end of every dimension.
    """
    boxes = list(itertools.product(*(range(0, extent, width) for extent, width in zip(shape, box, strict=True))))
    beyond = aligned((shape[0] + 16 // size - 1, *shape[1:]), size)
    return [*boxes[:12], *boxes[12:][-12:], beyond]


def case(
    name: str,
    entry: str,
    dtype: str,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: int = 0,
    pad: int = 0,
    at: Iterable[int] = (0,),
    elements: tuple[int, ...] = (),
    number: str = "",
    rows: list[tuple[int, ...]] | None = None,
) -> Case:
    """``number``: the format of the numbers of source and tensor; without it they are random bytes."""
    size = SIZES.get(dtype, 4 if "32" in dtype else 8)
    strides = packed(shape, size, pad)
    total = tensor_bytes(shape, strides, size)
    places = table(rows if rows is not None else cover(shape, box, size), at)
    bytes_ = int(np.prod(box)) * size
    assert bytes_ + max(places[:, 5]) <= STAGE, name
    if number:
        source = Input("source", partial(data.small, 7, len(places) * STAGE // size, number, -50, 50))
        target = Output(
            "target", "<u4", (total // 4,), make=lambda: data.small(8, total // size, number, -50, 50).view("<u4")
        )
    else:
        source = Input("source", partial(data.words, 7, len(places) * STAGE // 4))
        target = Output("target", "<u4", (total // 4,), make=partial(data.words, 8, total // 4))
    tensor = Map(target, dtype, shape, strides, box, elements, swizzle)  # type: ignore[arg-type]
    arguments = (tensor, Input("table", lambda: places), source)
    return Case(f"{PREFIX}/{name}", MODULE, entry, arguments, grid=len(places), block=64, shared=STAGE)


def cases() -> list[Case]:
    shape, box = (37, 11, 5, 4, 3), (16, 4, 3, 3, 2)
    found = []
    for d, dtype in itertools.product(range(1, 6), ("uint8", "bfloat16", "float32", "uint64")):
        found.append(case(f"{d}d_{dtype}", f"store_{d}d", dtype, shape[:d], box[:d], pad=d % 2))
    for swizzle, (dtype, size) in itertools.product((32, 64, 128), (("uint8", 1), ("float16", 2), ("float32", 4))):
        inner = swizzle // size
        wide = (2 * inner - 16 // size, 41)
        name = f"2d_{dtype}_swizzle{swizzle}"
        found.append(case(name, "store_2d", dtype, wide, (inner, 16), swizzle=swizzle, at=(0, 128, 512, 1024, 896)))
        deep = (wide[0], 9, 3)
        found.append(case(f"3d_{dtype}_swizzle{swizzle}", "store_3d", dtype, deep, (inner, 4, 2), swizzle=swizzle))
    for swizzle, inner in ((32, 8), (64, 24), (128, 24), (128, 48)):  # rows narrower than the swizzle
        found.append(
            case(f"narrow_{2 * inner}_swizzle{swizzle}", "store_2d", "float16", (72, 41), (inner, 16), swizzle=swizzle)
        )
    found.append(case("stride2", "store_2d", "float32", (44, 21), (16, 8), elements=(1, 2)))
    numbers = {
        "uint32": (REDUCTIONS, "<u4"),
        "int32": (("add", "min", "max", "and", "or", "xor"), "<i4"),
        "uint64": (("add", "min", "max", "and", "or", "xor"), "<u8"),
        "int64": (("min", "max"), "<i8"),  # bits of int64: an illegal instruction on the H200
        "float16": (("add", "min", "max"), "f16"),
        "bfloat16": (("add", "min", "max"), "bf16"),
        "float32": (("add",), "f32"),
    }
    for dtype, (reductions, number) in numbers.items():
        for reduction in reductions:
            name = f"{reduction}_{dtype}"
            found.append(case(name, f"{reduction}_2d", dtype, (37, 11), (16, 4), number=number))
    for d in (1, 3, 4, 5):
        found.append(case(f"add_{d}d_float32", f"add_{d}d", "float32", shape[:d], box[:d], number="f32"))
    found.append(case("add_swizzled", "add_2d", "float32", (48, 20), (32, 8), swizzle=128, number="f32"))
    return found
