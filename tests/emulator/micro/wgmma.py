"""wgmma: every descriptor a CTA of its own, over shared memory filled with small integers byte for byte.

Nothing lays matrices out: the layout is what the hardware reads through a descriptor. Sums stay below 2^11, exact in
every accumulator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from . import data
from .case import Array, Case, Input, Module, Output
from .ptx import Kernel

SHARED = 96 * 1024
B_START = 16 * 1024
WIDTHS = (8, 16, 24, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Shape:
    """What the spelling of an instruction fixes."""

    n: int
    d: str = "f32"
    a: str = "f16"
    b: str = "f16"
    registers: bool = False
    transpose_a: int = 0
    transpose_b: int = 0
    scale_a: int = 1
    scale_b: int = 1

    @property
    def fp8(self) -> bool:
        return self.a.startswith("e")

    @property
    def count(self) -> int:
        """32-bit registers of the accumulator."""
        return self.n // 2 if self.d == "f32" else self.n // 4

    @property
    def name(self) -> str:
        flags = "rs" if self.registers else "ss"
        majors = "" if self.fp8 else "_" + ("k" if not self.transpose_a else "m") + "kn"[self.transpose_b]
        negated = "_nega" * (self.scale_a < 0) + "_negb" * (self.scale_b < 0)
        return f"{flags}_{self.d}_{self.a}_{self.b}{majors}_n{self.n}{negated}"

    def instruction(self, d: list[str], a: str, b: str, scale: str) -> str:
        k = 32 if self.fp8 else 16
        flags = [str(self.scale_a), str(self.scale_b)]
        if not self.fp8:
            flags += ([] if self.registers else [str(self.transpose_a)]) + [str(self.transpose_b)]
        return (
            f"wgmma.mma_async.sync.aligned.m64n{self.n}k{k}.{self.d}.{self.a}.{self.b} "
            f"{{{', '.join(d)}}}, {a}, {b}, {scale}, {', '.join(flags)};"
        )


# A row of the table that a CTA takes: descriptors without the base address, what K steps add to them (16-byte units),
# how many steps, and of which steps scale-d is 1 (a bit mask).
ROW = np.dtype([("a", "<u8"), ("b", "<u8"), ("a_step", "<u4"), ("b_step", "<u4"), ("steps", "<u4"), ("scale", "<u4")])


def descriptor(start: int, leading: int, stride: int, swizzle: int, base: int = 0) -> int:
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | base << 49 | SWIZZLE[swizzle] << 62


def k_major() -> Iterable[tuple[int, int, int, int]]:
    """(swizzle, leading, stride, step): one K step is 32 bytes of a row."""
    yield from [(128, 16, 1024, 32), (64, 16, 512, 32), (32, 16, 256, 1024)]
    yield from [(0, 128, 1024, 256), (0, 2048, 128, 4096)]


def mn_major() -> Iterable[tuple[int, int, int, int]]:
    """16 rows of K are two groups of eight; both orders of the strides."""
    yield from [(128, 8192, 1024, 2048), (128, 1024, 4096, 8192), (64, 4096, 512, 1024), (64, 512, 4096, 8192)]
    yield from [(32, 2048, 256, 512), (32, 256, 2048, 4096), (0, 1024, 128, 256), (0, 128, 2048, 4096)]


def table(transpose_a: int, transpose_b: int) -> Array:
    """Descriptors for a pair of majors: every swizzle of B with one of A, over four K steps."""
    sides = [list(mn_major() if transposed else k_major()) for transposed in (transpose_a, transpose_b)]
    rows = []
    for i in range(max(map(len, sides))):
        a, b = (side[i % len(side)] for side in sides)
        scale = (0b1111, 0b1110, 0b1010, 0b0001)[i % 4]
        rows.append((descriptor(0, *a[1:3], a[0]), descriptor(B_START, *b[1:3], b[0]), a[3] >> 4, b[3] >> 4, 4, scale))
    return np.array(rows, ROW)


def begin(kernel: Kernel) -> tuple[str, str]:
    """Fill shared memory, for the tensor core too; its base in a descriptor's units, and the row's address."""
    base = kernel.smem()
    kernel.copy(base, "%bytes", SHARED, shared_source=False)
    kernel("fence.proxy.async;", "bar.sync 0;")
    units = kernel.set("r", f"shr.u32 $, {base}, 4")
    return kernel.set("d", f"cvt.u64.u32 $, {units}"), kernel.offset("%table", kernel.cta(), ROW.itemsize)


def vectors(registers: list[str]) -> Iterable[tuple[int, str, str]]:
    size = 4 if len(registers) % 4 == 0 else 2
    for i in range(0, len(registers), size):
        yield 4 * i, f"v{size}", "{" + ", ".join(registers[i : i + size]) + "}"


def accumulator(kernel: Kernel, count: int) -> list[str]:
    """Registers that begin with numbers of the thread's own."""
    registers = [kernel.new("r") for _ in range(count)]
    address = kernel.offset("%start", kernel.tid(), 4 * count)
    for offset, vector, names in vectors(registers):
        kernel(f"ld.global.{vector}.b32 {names}, [{address}+{offset}];")
    return registers


def store(kernel: Kernel, registers: list[str], slot: str) -> None:
    """Thread t of slot s writes its registers one behind another."""
    threads = kernel.set("r", "mov.u32 $, %ntid.x")
    index = kernel.set("r", f"mad.lo.u32 $, {slot}, {threads}, {kernel.tid()}")
    address = kernel.offset("%out", index, 4 * len(registers))
    for offset, vector, names in vectors(registers):
        kernel(f"st.global.{vector}.b32 [{address}+{offset}], {names};")


def loop_kernel(shape: Shape) -> str:
    """One instruction for each step of K, each in a group of its own."""
    kernel = Kernel(shape.name, "bytes:ptr fragments:ptr start:ptr table:ptr out:ptr")
    base, row = begin(kernel)
    a, b, d = kernel.new("d"), kernel.new("d"), accumulator(kernel, shape.count)
    a_step, b_step, steps, scale, step, bit = (kernel.new("r") for _ in range(6))
    wide, p, again = kernel.new("d"), kernel.new("p"), kernel.label()
    kernel(
        f"ld.global.v2.b64 {{{a}, {b}}}, [{row}];",
        f"ld.global.v4.b32 {{{a_step}, {b_step}, {steps}, {scale}}}, [{row}+16];",
        f"add.u64 {a}, {a}, {base};",
        f"add.u64 {b}, {b}, {base};",
        f"mov.u32 {step}, 0;",
    )
    fragment = [kernel.new("r") for _ in range(4)] if shape.registers else []
    address = kernel.offset("%fragments", kernel.tid(), 16) if shape.registers else ""
    kernel(f"{again}:", f"shr.u32 {bit}, {scale}, {step};", f"and.b32 {bit}, {bit}, 1;", f"setp.ne.u32 {p}, {bit}, 0;")
    if shape.registers:
        kernel(f"ld.global.v4.b32 {{{', '.join(fragment)}}}, [{address}];", f"add.u64 {address}, {address}, 2048;")
    operand = f"{{{', '.join(fragment)}}}" if shape.registers else a
    kernel(
        "wgmma.fence.sync.aligned;",
        shape.instruction(d, operand, b, p),
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        f"cvt.u64.u32 {wide}, {a_step};",
        f"add.u64 {a}, {a}, {wide};",
        f"cvt.u64.u32 {wide}, {b_step};",
        f"add.u64 {b}, {b}, {wide};",
        f"add.u32 {step}, {step}, 1;",
        f"setp.lt.u32 {p}, {step}, {steps};",
        f"@{p} bra {again};",
    )
    store(kernel, d, kernel.cta())
    return kernel.text()


def shared_bytes(dtype_a: str, dtype_b: str) -> Array:
    """A's elements up to B_START, B's after it; both sides read across the border with some descriptors."""
    size = 1 if dtype_a.startswith("e") else 2
    first = data.small(1, B_START // size, dtype_a)
    second = data.small(2, (SHARED - B_START) // size, dtype_b)
    return np.concatenate([first.view(np.uint8), second.view(np.uint8)])


def start_values(dtype: str, threads: int, count: int) -> Array:
    return data.small(3, threads * count * (2 if dtype == "f16" else 1), dtype, -9, 9)


def arguments(shape: Shape, rows: Array, slots: int, threads: int = 128) -> tuple[Input | Output, ...]:
    fragment_count = 4 * threads * 16 // (1 if shape.fp8 else 2)
    per_thread = shape.count * (2 if shape.d == "f16" else 1)
    return (
        Input("bytes", partial(shared_bytes, shape.a, shape.b)),
        Input("fragments", partial(data.small, 4, fragment_count, shape.a)),
        Input("start", partial(start_values, shape.d, threads, shape.count)),
        Input("table", lambda: rows),
        Output("out", "<f2" if shape.d == "f16" else "<f4", (slots, threads, per_thread)),
    )


def build(prefix: str, shapes: Iterable[Shape], keep: Iterable[str] = ()) -> list[Case]:
    """One module and, for each shape, one case that takes all descriptors of its majors."""
    shapes = list(shapes)
    module = Module(prefix, lambda: [loop_kernel(shape) for shape in shapes])
    cases = []
    for shape in shapes:
        rows = table(shape.transpose_a, shape.transpose_b)
        kept = ("out",) if shape.name in keep else ()
        cases.append(
            Case(
                f"{prefix}/{shape.name}",
                module,
                shape.name,
                arguments(shape, rows, len(rows)),
                grid=len(rows),
                block=128,
                shared=SHARED,
                keep=kept,
            )
        )
    return cases


def half_cases() -> list[Case]:
    """float16 into float32 and float16: every N, and both majors of both operands."""
    shapes = [Shape(n) for n in range(8, 257, 8)]
    shapes += [Shape(n, transpose_b=1) for n in WIDTHS]
    shapes += [Shape(n, transpose_a=1, transpose_b=b) for b in (0, 1) for n in (8, 24, 64, 128, 256)]
    shapes += [Shape(n, d="f16", transpose_b=b) for b in (0, 1) for n in (8, 16, 64, 128, 256)]
    return build("wgmma_half", shapes, keep=["ss_f32_f16_f16_kk_n8", "ss_f32_f16_f16_mn_n24"])


def single_cases() -> list[Case]:
    """bfloat16."""
    shapes = [Shape(n, a="bf16", b="bf16", transpose_b=b) for b in (0, 1) for n in WIDTHS]
    shapes += [Shape(64, a="bf16", b="bf16", transpose_a=1, transpose_b=b) for b in (0, 1)]
    return build("wgmma_single", shapes)


def register_cases() -> list[Case]:
    """A from registers."""
    widths = (8, 16, 24, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
    shapes = [
        Shape(n, a=t, b=t, registers=True, transpose_b=b) for t in ("f16", "bf16") for b in (0, 1) for n in widths
    ]
    shapes += [Shape(n, d="f16", registers=True) for n in (8, 64, 256)]
    return build("wgmma_registers", shapes, keep=["rs_f32_f16_f16_kn_n16"])


def fp8_cases() -> list[Case]:
    """All four pairs of the 8-bit types; their operands are K-major."""
    pairs = list(itertools.product(("e4m3", "e5m2"), repeat=2))
    shapes = [
        Shape(n, a=a, b=b, registers=registers)
        for registers in (False, True)
        for a, b in pairs
        for n in ((8, 64, 96, 128, 192, 256) if a == b == "e4m3" else (16, 128))
    ]
    shapes += [Shape(n, d="f16", a=a, b=b) for a, b in pairs for n in (8, 64)]
    return build("wgmma_fp8", shapes, keep=["rs_f32_e4m3_e4m3_n8"])


def special_cases() -> list[Case]:
    from .wgmma_special import special_kernels

    return special_kernels()
