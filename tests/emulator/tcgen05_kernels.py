"""Micro-kernels for tcgen05: operands as the bytes that shared memory holds, and the PTX of one product.

The layouts here are written from the documents' maps from an element to a byte, not from the machine's source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.emulator.device import EmulatedDevice
from cupyfa.emulator.report import Run

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "tf32": np.float32,
}
KINDS = {"bf16": "f16", "f16": "f16", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "tf32": "tf32"}
FORMATS = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1}
SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}
SENTINEL = -77.0
STEPS = 4  # instructions along K


def instruction_descriptor(a: str, b: str, d: str, m: int, n: int, *, a_mn: int = 0, b_mn: int = 0) -> int:
    fields = (d == "f32") << 4 | FORMATS[a] << 7 | FORMATS[b] << 10 | a_mn << 15 | b_mn << 16
    return fields | n >> 3 << 17 | m >> 4 << 24


@dataclass(frozen=True)
class Image:
    """A matrix (M or N by K) as shared memory holds it: bytes, a descriptor without its address, its step along K."""

    data: np.ndarray
    descriptor: int
    step: int

    @classmethod
    def of(cls, matrix: np.ndarray, mn_major: bool, swizzle: int) -> Image:
        """Lay out a matrix of one of the DTYPES."""
        extent, k = matrix.shape
        size = matrix.dtype.itemsize
        mn, kk = np.meshgrid(np.arange(extent), np.arange(k), indexing="ij")
        per_step = 32 // size
        if not mn_major and swizzle:
            span, leading, stride = swizzle, 16, 8 * swizzle
            byte = kk * size
            address = byte // span * (extent * span) + mn // 8 * stride + mn % 8 * span + byte % span
            step = 32 if span > 32 else extent * span
            assert span == 32 or span >= STEPS * 32, "a step must be a constant"
        elif not mn_major:  # cores of 8 rows of 16 bytes: first along M or N, then along K
            leading, stride = extent * 16, 128
            address = kk * size // 16 * leading + mn // 8 * stride + mn % 8 * 16 + kk * size % 16
            step = 2 * leading
        elif swizzle:
            span = swizzle // size
            stride = 8 * swizzle
            leading = k // 8 * stride
            address = mn // span * leading + kk // 8 * stride + kk % 8 * swizzle + mn % span * size
            step = per_step // 8 * stride
        else:
            span = 16 // size
            leading, stride = 128, k // 8 * 128
            address = mn // span * stride + kk // 8 * leading + kk % 8 * 16 + mn % span * size
            step = per_step // 8 * leading
        # 128: bits 4 to 6 ^= 7 to 9; 64: 4, 5 ^= 7, 8; 32: 4 ^= 7.
        address ^= address >> 3 & {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[swizzle]
        data = np.full(-(-int(address.max() + size) // 16) * 16, 0xFF, np.uint8)
        for byte in range(size):
            data[address + byte] = matrix.view(np.uint8).reshape(extent, k, size)[:, :, byte]
        fields = (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | SWIZZLES[swizzle] << 61
        return cls(data, fields, step)


def copy_to_shared(name: str, offset: int, size: int, cta: str = "%cta", threads: int = 128) -> str:
    """All threads copy this CTA's part of a buffer to shared memory."""
    return f"""
mul.wide.u32 %t0, {cta}, {size};
add.u64 %t0, %t0, %{name};
mov.u32 %x0, %tid;
copy_{name}:
shl.b32 %x1, %x0, 4;
setp.ge.u32 %p, %x1, {size};
@%p bra copied_{name};
cvt.u64.u32 %t1, %x1;
add.u64 %t1, %t1, %t0;
ld.global.v4.b32 {{%x4, %x5, %x6, %x7}}, [%t1];
add.u32 %x2, %base, %x1;
st.shared.v4.b32 [%x2+{offset}], {{%x4, %x5, %x6, %x7}};
add.u32 %x0, %x0, {threads};
bra copy_{name};
copied_{name}:"""


def descriptor_of(register: str, offset: int, fields: int) -> str:
    """A matrix descriptor of what lies at an offset of shared memory."""
    return f"""
add.u32 %x0, %base, {offset};
shr.u32 %x0, %x0, 4;
and.b32 %x0, %x0, 0x3fff;
cvt.u64.u32 {register}, %x0;
or.b64 {register}, {register}, {fields};"""


@dataclass(frozen=True)
class Product:
    """One product, in STEPS instructions."""

    m: int = 128
    n: int = 64
    ctas: int = 1
    a: str = "bf16"
    b: str = "bf16"
    d: str = "f32"
    a_mn: int = 0
    b_mn: int = 0
    a_swizzle: int = 128
    b_swizzle: int = 128
    a_in_tmem: bool = False
    accumulate: bool = True
    scale: int | None = None
    mask: tuple[int, ...] = ()
    lane: int = 0  # where D begins

    @property
    def kind(self) -> str:
        return KINDS[self.a]

    @property
    def k(self) -> int:
        return STEPS * 32 // np.dtype(DTYPES[self.a]).itemsize

    @property
    def columns(self) -> int:
        """Of D in a CTA."""
        return self.n // 2 if self.ctas == 2 and self.m == 128 else self.n

    def place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """CTA, lane and column of each element of D."""
        row, column = np.meshgrid(np.arange(self.m), np.arange(self.n), indexing="ij")
        if self.ctas == 1:
            return 0 * row, row if self.m == 128 else 32 * (row // 16) + row % 16 + self.lane, column
        if self.m == 256:
            return row // 128, row % 128, column
        half = self.n // 2
        return row // 64, row % 64 + 64 * (column >= half), column % half

    def a_lanes(self) -> list[tuple[int, int, int]]:
        """(CTA, lane, row of A) of an A in tensor memory."""
        cta, lane, _ = self.place()
        places = {(int(c), int(l), r) for r in range(self.m) for c, l in zip(cta[r], lane[r], strict=True)}
        return sorted(places)

    def ptx(self, a: Image | None, b: Image) -> str:
        """The kernel: parameters a, b (images of each CTA), start (cells of D), out (cells), a_cells."""
        group = f"cta_group::{self.ctas}"
        columns, a_columns, b_offset = self.columns, STEPS * 8, 0
        a_offset = -(-len(b.data) // 1024) * 1024 + 1024
        barrier = 200 * 1024
        sync = "bar.sync 0;"
        if self.ctas == 2:
            sync = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
        copies = [copy_to_shared("b", b_offset + 1024, len(b.data))]
        if a is not None:
            copies.append(copy_to_shared("a", a_offset + 1024, len(a.data)))
        idesc = instruction_descriptor(self.a, self.b, self.d, self.m, self.n, a_mn=self.a_mn, b_mn=self.b_mn)
        mma = []
        tail = f", {self.scale}" if self.scale is not None else ""
        if self.mask:
            mma += [f"mov.u32 %m{i}, {value};" for i, value in enumerate(self.mask)]
        mask = "{" + ", ".join(f"%m{i}" for i in range(len(self.mask))) + "}, " if self.mask else ""
        for step in range(STEPS):
            source = f"[%tmem+{384 + 8 * step}]"
            if self.a_in_tmem and self.lane:
                source = f"[%alane+{8 * step}]"
            if a is not None:
                mma.append(f"add.u64 %da, %abase, {step * a.step >> 4};")
                source = "%da"
            enable = "1" if self.accumulate or step else "0"
            only_first = tail if step == 0 or not tail else ", 0"
            mma += [
                f"add.u64 %db, %bbase, {step * b.step >> 4};",
                f"setp.ne.u32 %enable, {enable}, 0;",
                f"tcgen05.mma.{group}.kind::{self.kind} [%d], {source}, %db, {idesc}, {mask}%enable{only_first};",
            ]
        commit = f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster"
        multicast = ".multicast::cluster.b64 [%bar], 3;" if self.ctas == 2 else ".b64 [%bar];"
        nl = "\n"
        return f"""{HEAD}
.entry k(.param .u64 pa, .param .u64 pb, .param .u64 pstart, .param .u64 pout, .param .u64 pcells)
{{
.reg .b32 %tmem, %d, %tid, %cta, %base, %bar, %lane, %alane, %slot, %count, %m<8>, %x<16>;
.reg .b64 %a, %b, %start, %out, %cells, %abase, %bbase, %da, %db, %t<8>;
.reg .pred %p, %q, %enable, %leader, %first;
ld.param.u64 %a, [pa];
ld.param.u64 %b, [pb];
ld.param.u64 %start, [pstart];
ld.param.u64 %out, [pout];
ld.param.u64 %cells, [pcells];
mov.u32 %tid, %tid.x;
mov.u32 %cta, %cluster_ctarank;
mov.u32 %base, smem;
add.u32 %bar, %base, {barrier};
add.u32 %slot, %bar, 8;
setp.eq.u32 %first, %tid, 0;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first fence.mbarrier_init.release.cluster;
setp.lt.u32 %p, %tid, 32;
@!%p bra allocated;
tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%slot], 512;
tcgen05.relinquish_alloc_permit.{group}.sync.aligned;
allocated:
{nl.join(copies)}
fence.proxy.async.shared::cta;
{sync}
ld.shared.b32 %tmem, [%slot];
// The lanes of this warp: cells [column][lane] of {columns} columns of D, then those of A.
and.b32 %lane, %tid, 96;
shl.b32 %lane, %lane, 16;
add.u32 %lane, %lane, %tmem;
mad.lo.u32 %x0, %cta, 128, %tid;
mul.wide.u32 %t0, %x0, 4;
{self._cells("start", columns, "%lane", store=True)}
{self._cells("cells", a_columns, "%lane+384", store=True) if a is None else ""}
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
{sync}
tcgen05.fence::after_thread_sync;
or.b32 %x1, %cta, %tid;
setp.eq.u32 %leader, %x1, 0;
@!%leader bra issued;
add.u32 %d, %tmem, {self.lane << 16};
add.u32 %alane, %tmem, {(self.lane << 16) + 384};
{descriptor_of("%abase", a_offset + 1024, a.descriptor if a else 0)}
{descriptor_of("%bbase", b_offset + 1024, b.descriptor)}
{nl.join(mma)}
{commit}{multicast}
issued:
mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
@!%p bra issued;
tcgen05.fence::after_thread_sync;
{self._cells("out", columns, "%lane", store=False)}
tcgen05.fence::before_thread_sync;
{sync}
setp.lt.u32 %p, %tid, 32;
@!%p bra done;
tcgen05.dealloc.{group}.sync.aligned.b32 %tmem, 512;
done:
ret;
}}
"""

    def _cells(self, name: str, columns: int, address: str, store: bool) -> str:
        """Each thread moves its lane between cells [column][CTA][lane] in global and tensor memory."""
        lines = [f"add.u64 %t1, %{name}, %t0;"]
        registers = "{" + ", ".join(f"%x{i}" for i in range(8, 16)) + "}"
        start = int(address.partition("+")[2] or 0)
        base = address.partition("+")[0]
        for column in range(0, columns, 8):
            each = [(column + i) * 4 * 128 * self.ctas for i in range(8)]
            place = f"[{base}+{start + column}]"
            if store:
                lines += [f"ld.global.b32 %x{8 + i}, [%t1+{offset}];" for i, offset in enumerate(each)]
                lines.append(f"tcgen05.st.sync.aligned.32x32b.x8.b32 {place}, {registers};")
            else:
                lines.append(f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers}, {place};")
                lines.append("tcgen05.wait::ld.sync.aligned;")
                lines += [f"st.global.b32 [%t1+{offset}], %x{8 + i};" for i, offset in enumerate(each)]
        return "\n".join(lines)

    def run(self, change: tuple[str, str] = ("", ""), **options: Any) -> tuple[np.ndarray, np.ndarray, Run]:
        """Run it on small integers: the cells of D [column][CTA][lane], what they should be, and the report."""
        rng = np.random.default_rng(self.m + self.n)
        left = rng.integers(-3, 4, (self.m, self.k)).astype(DTYPES[self.a])
        right = rng.integers(-3, 4, (self.n, self.k)).astype(DTYPES[self.b])
        b_images = [Image.of(part, bool(self.b_mn), self.b_swizzle) for part in np.split(right, self.ctas)]
        a_images = [Image.of(part, bool(self.a_mn), self.a_swizzle) for part in np.split(left, self.ctas)]
        a_columns = STEPS * 8
        cells = np.full((a_columns, self.ctas, 128), 0xFFFFFFFF, np.uint32)
        words = left.view(np.uint32).reshape(self.m, a_columns)
        for cta, lane, row in self.a_lanes():
            cells[:, cta, lane] = words[row]
        start = rng.integers(-8, 9, (self.columns, self.ctas, 128)).astype(np.float32)
        if self.d == "f16":
            start = start.astype(np.float16).view(np.uint16).astype(np.uint32).view(np.float32)
        out = np.full_like(start, SENTINEL)

        product = left.astype(np.float64) @ right.astype(np.float64).T
        cta, lane, column = self.place()
        old = start[column, cta, lane]
        if self.d == "f16":
            old = old.view(np.uint32).astype(np.uint16).view(np.float16)
        if self.accumulate:
            product += old * 2.0 ** -(self.scale or 0)
        wanted = start.copy()
        new = product.astype(np.float32)
        if self.d == "f16":
            new = product.astype(np.float16).view(np.uint16).astype(np.uint32).view(np.float32)
        wanted[column, cta, lane] = new
        for word, value in enumerate(self.mask):
            kept = [32 * (word % 4) + bit for bit in range(32) if value >> bit & 1]
            wanted[:, word // 4, kept] = start[:, word // 4, kept]

        device = EmulatedDevice("sm_100a")
        a_data, b_data = (np.stack([image.data for image in images]) for images in (a_images, b_images))
        text = self.ptx(None if self.a_in_tmem else a_images[0], b_images[0])
        run = device.load(text.replace(*change, 1)).launch(
            grid=self.ctas,
            block=128,
            cluster=self.ctas,
            shared=201 * 1024 + 1024,
            params=[device.register(array) for array in (a_data, b_data, start.copy(), out, cells)],
            **options,
        )
        return out, wanted, run
