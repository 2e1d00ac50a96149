"""wgmma beside the sweep: negation, several steps in a group, groups in flight, two warpgroups, odd descriptors."""

from __future__ import annotations

import numpy as np

from .case import Array, Case, Module
from .ptx import Kernel
from .wgmma import B_START, ROW, SHARED, Shape, accumulator, arguments, begin, descriptor, loop_kernel, store, table

PREFIX = "wgmma_special"


def unrolled_kernel(shape: Shape, name: str, *, groups: int, warpgroups: int = 1) -> str:
    """Four K steps in one group, ``groups`` accumulators, each with a group of its own.

    Group g reads B 8 KB further; warpgroup w reads A 8 KB further.
    """
    kernel = Kernel(name, "bytes:ptr fragments:ptr start:ptr table:ptr out:ptr")
    base, row = begin(kernel)
    a, b = kernel.new("d"), kernel.new("d")
    a_step, b_step, steps, scale = (kernel.new("r") for _ in range(4))
    sets = [accumulator(kernel, shape.count) for _ in range(groups)]
    kernel(
        f"ld.global.v2.b64 {{{a}, {b}}}, [{row}];",
        f"ld.global.v4.b32 {{{a_step}, {b_step}, {steps}, {scale}}}, [{row}+16];",
        f"add.u64 {a}, {a}, {base};",
        f"add.u64 {b}, {b}, {base};",
    )
    if warpgroups > 1:
        warpgroup = kernel.set("r", f"shr.u32 $, {kernel.tid()}, 7")
        kernel(f"mad.wide.u32 {a}, {warpgroup}, {8192 >> 4}, {a};")
    bits = [kernel.set("r", f"and.b32 $, {scale}, {1 << step}") for step in range(4)]
    scales = [kernel.set("p", f"setp.ne.u32 $, {bit}, 0") for bit in bits]
    a_at = [kernel.set("d", f"mad.wide.u32 $, {a_step}, {step}, {a}") for step in range(4)]
    b_at = [[kernel.set("d", f"mad.wide.u32 $, {b_step}, {step}, {b}") for step in range(4)] for group in range(groups)]
    for group in range(1, groups):
        kernel(*(f"add.u64 {register}, {register}, {group * 8192 >> 4};" for register in b_at[group]))
    kernel("wgmma.fence.sync.aligned;")
    for group, registers in enumerate(sets):
        kernel(*(shape.instruction(registers, a_at[s], b_at[group][s], scales[s]) for s in range(4)))
        kernel("wgmma.commit_group.sync.aligned;")
    slot = kernel.set("r", f"mul.lo.u32 $, {kernel.cta()}, {groups}")
    for group, registers in enumerate(sets):
        kernel(f"wgmma.wait_group.sync.aligned {groups - 1 - group};")
        store(kernel, registers, kernel.set("r", f"add.u32 $, {slot}, {group}"))
    return kernel.text()


def row(a: int, b: int, a_step: int = 2, b_step: int = 2) -> tuple[int, int, int, int, int, int]:
    return (a, b, a_step, b_step, 4, 0b1111)


def unaligned() -> Array:
    """Tiles that do not begin where their swizzle's pattern does, with and without the descriptor's base offset."""
    rows = [
        row(descriptor(start, 16, 1024, 128, base), descriptor(B_START + start, 16, 1024, 128, base))
        for start in (128, 256, 512, 640)
        for base in (0, start >> 7 & 7)
    ]
    rows += [
        row(descriptor(start, 16, 256 * scale, swizzle), descriptor(B_START + start, 16, 256 * scale, swizzle))
        for start, swizzle, scale in [(128, 64, 2), (256, 64, 2), (128, 32, 1), (16, 0, 4), (48, 0, 4)]
    ]
    return np.array(rows, ROW)


def ignored_leading() -> Array:
    """A leading byte offset where K-major swizzled layouts have no use for one, and unusual strides."""
    rows = [
        row(descriptor(0, leading, stride, swizzle), descriptor(B_START, leading, stride, swizzle))
        for leading in (0, 1024, 4096)
        for swizzle, stride in [(128, 1024), (64, 512), (32, 256), (128, 2048), (64, 1024), (32, 4096), (128, 128)]
    ]
    return np.array(rows, ROW)


def special_kernels() -> list[Case]:
    wide, narrow = Shape(64), Shape(16)
    negations = [Shape(16, scale_a=a, scale_b=b) for a, b in [(-1, 1), (1, -1), (-1, -1)]]
    negations += [Shape(16, a="e4m3", b="e4m3", scale_a=-1), Shape(16, d="f16", scale_b=-1)]
    negations += [Shape(16, a="bf16", b="bf16", registers=True, scale_a=-1)]
    mn = Shape(64, transpose_b=1, a="bf16", b="bf16")
    kernels = {
        "one_group": (wide, 1, 1),
        "one_group_n256": (Shape(256), 1, 1),
        "two_groups": (wide, 2, 1),
        "three_groups": (Shape(32), 3, 1),
        "two_warpgroups": (wide, 1, 2),
        "two_warpgroups_two_groups": (mn, 2, 2),
    }

    def texts() -> list[str]:
        texts = [loop_kernel(shape) for shape in (narrow, *negations)]
        for name, (shape, groups, warpgroups) in kernels.items():
            texts.append(unrolled_kernel(shape, name, groups=groups, warpgroups=warpgroups))
        return texts

    module = Module(PREFIX, texts)
    cases = []
    for name, shape, rows in [
        *((shape.name, shape, table(0, 0)[:3]) for shape in negations),
        ("unaligned", narrow, unaligned()),
        ("leading", narrow, ignored_leading()),
    ]:
        given = arguments(shape, rows, len(rows))
        cases.append(Case(f"{PREFIX}/{name}", module, shape.name, given, grid=len(rows), block=128, shared=SHARED))
    for name, (shape, groups, warpgroups) in kernels.items():
        # K steps of the rows without swizzle leave the 8 KB of a group; the bytes there are defined as well.
        rows = table(shape.transpose_a, shape.transpose_b)
        given = arguments(shape, rows, len(rows) * groups, 128 * warpgroups)
        cases.append(
            Case(f"{PREFIX}/{name}", module, name, given, grid=len(rows), block=128 * warpgroups, shared=SHARED)
        )
    return cases
