"""tcgen05: products in every layout, and the shapes of loads and stores, against maps written down here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.tcgen05_kernels import HEAD, Image, Product, copy_to_shared, descriptor_of

from cupyfa.emulator.device import EmulatedDevice
from cupyfa.emulator.policies import POLICIES

PRODUCTS = {
    # where D lands
    "m128": Product(),
    "m64": Product(m=64),
    "m64-upper": Product(m=64, lane=16),
    "m64-n8": Product(m=64, n=8),
    "m128-n256": Product(n=256),
    "m256-pair": Product(m=256, ctas=2),
    "m128-pair": Product(ctas=2),
    "m256-pair-n256": Product(m=256, n=256, ctas=2),
    # A in tensor memory
    "ts": Product(a_in_tmem=True),
    "ts-m64": Product(m=64, a_in_tmem=True),
    "ts-m64-upper": Product(m=64, a_in_tmem=True, lane=16),
    "ts-pair": Product(m=256, ctas=2, a_in_tmem=True),
    "ts-pair-folded": Product(ctas=2, a_in_tmem=True),
    "ts-f16": Product(a="f16", b="f16", a_in_tmem=True),
    "ts-e4m3": Product(a="e4m3", b="e4m3", a_in_tmem=True),
    "ts-tf32": Product(a="tf32", b="tf32", a_in_tmem=True),
    # types
    "f16": Product(a="f16", b="f16"),
    "f16-pair": Product(a="f16", b="f16", m=256, ctas=2),
    "e4m3": Product(a="e4m3", b="e4m3"),
    "e4m3-pair": Product(a="e4m3", b="e4m3", m=256, ctas=2),
    "e4m3-e5m2": Product(a="e4m3", b="e5m2"),
    "tf32": Product(a="tf32", b="tf32"),
    "f16-into-f16": Product(a="f16", b="f16", d="f16"),
    "f16-into-f16-m64": Product(a="f16", b="f16", d="f16", m=64),
    "e5m2-into-f16": Product(a="e5m2", b="e5m2", d="f16", accumulate=False),
    # majors and swizzles
    "b-mn": Product(b_mn=1),
    "a-mn": Product(a_mn=1),
    "both-mn": Product(a_mn=1, b_mn=1, n=128),
    "both-mn-pair": Product(a_mn=1, b_mn=1, m=256, n=128, ctas=2),
    "b-mn-pair-folded": Product(b_mn=1, n=128, ctas=2),
    "b-mn-64": Product(b_mn=1, b_swizzle=64),
    "b-mn-32": Product(b_mn=1, b_swizzle=32),
    "b-mn-0": Product(b_mn=1, b_swizzle=0),
    "b-mn-e4m3": Product(a="e4m3", b="e4m3", b_mn=1, n=128),
    "b-mn-e4m3-64": Product(a="e4m3", b="e4m3", b_mn=1, b_swizzle=64),
    "k-32": Product(a_swizzle=32, b_swizzle=32),
    "k-0": Product(a_swizzle=0, b_swizzle=0),
    # what is kept of D
    "no-accumulate": Product(accumulate=False),
    "scale-d": Product(scale=3),
    "masked": Product(mask=(0x0000FFFF, 0xFFFFFFFF, 0, 0x80000001)),
    "masked-pair": Product(m=256, ctas=2, mask=(0, 1, 2, 0xFFFFFFFF, 0xF0F0F0F0, 0, 0, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str) -> None:
    out, wanted, run = PRODUCTS[name].run()
    np.testing.assert_array_equal(out.view(np.uint32), wanted.view(np.uint32))
    assert run.verdict == "clean", run


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "eager"])
@pytest.mark.parametrize("name", ["m128", "ts-pair"])
def test_product_under_any_schedule(name: str, policy: str) -> None:
    out, wanted, run = PRODUCTS[name].run(policy=policy, seed=3)
    np.testing.assert_array_equal(out.view(np.uint32), wanted.view(np.uint32))
    assert run.verdict == "clean", run


def test_both_ctas_of_a_pair_allocate() -> None:
    run = Product(m=256, ctas=2).run(
        change=(
            "@!%p bra allocated;",
            "or.b32 %x0, %cta, %tid;\nsetp.lt.u32 %p, %x0, 32;\n"
            "mad.lo.u32 %x0, %cta, 32, %tid;\nsetp.lt.u32 %p, %x0, 32;\n@!%p bra allocated;",
        )
    )[2]
    assert "PROGRESS_DEADLOCK" in run.hazards, run
    assert "free columns of tensor memory" in str(run)


# --- copies from shared memory ----------------------------------------------------------------------------------------

# Rows and 16-byte chunks of the source, and where its rows go.
COPIES: dict[str, tuple[int, int, Any]] = {
    "128x256b": (128, 2, lambda row: [row]),
    "128x128b": (128, 1, lambda row: [row]),
    "64x128b.warpx2::02_13": (64, 1, lambda row: [row, row + 64]),
    "64x128b.warpx2::01_23": (64, 1, lambda row: [row % 32 + row // 32 * 64, row % 32 + row // 32 * 64 + 32]),
    "32x128b.warpx4": (32, 1, lambda row: [row, row + 32, row + 64, row + 96]),
}


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("shape", COPIES)
def test_copy(shape: str, policy: str) -> None:
    rows, chunks, lanes = COPIES[shape]
    source = np.arange(rows * chunks * 4, dtype=np.uint32).reshape(rows, chunks * 4) + 5
    image = Image.of(source.view(np.float32), mn_major=False, swizzle=0)
    wanted = np.zeros((chunks * 4, 128), np.uint32)
    for row in range(rows):
        wanted[:, lanes(row)] = source[row][:, None]
    out = np.zeros_like(wanted)
    registers = "{" + ", ".join(f"%x{8 + i}" for i in range(4 * chunks)) + "}"
    stores = "\n".join(f"st.global.b32 [%out+{512 * i}], %x{8 + i};" for i in range(4 * chunks))
    text = f"""{HEAD}
.entry k(.param .u64 pa, .param .u64 pout) {{
.reg .b32 %tmem, %tid, %base, %bar, %slot, %lane, %x<16>;
.reg .b64 %a, %out, %d, %t<4>;
.reg .pred %p, %first;
ld.param.u64 %a, [pa];
ld.param.u64 %out, [pout];
mov.u32 %tid, %tid.x;
mov.u32 %base, smem;
add.u32 %slot, %base, 16384;
add.u32 %bar, %slot, 8;
setp.eq.u32 %first, %tid, 0;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first fence.mbarrier_init.release.cluster;
setp.lt.u32 %p, %tid, 32;
@!%p bra allocated;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 32;
allocated:
{copy_to_shared("a", 1024, len(image.data), cta="0")}
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %tmem, [%slot];
{descriptor_of("%d", 1024, image.descriptor)}
@%first tcgen05.cp.cta_group::1.{shape} [%tmem+8], %d;
@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
wait:
mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
@!%p bra wait;
tcgen05.fence::after_thread_sync;
and.b32 %lane, %tid, 96;
shl.b32 %lane, %lane, 16;
add.u32 %lane, %lane, %tmem;
tcgen05.ld.sync.aligned.32x32b.x{4 * chunks}.b32 {registers}, [%lane+8];
tcgen05.wait::ld.sync.aligned;
mul.wide.u32 %t0, %tid, 4;
add.u64 %out, %out, %t0;
{stores}
bar.sync 0;
setp.lt.u32 %p, %tid, 32;
@!%p bra end;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 32;
end:
ret;
}}
"""
    device = EmulatedDevice("sm_100a")
    params = [device.register(array) for array in (image.data, out)]
    run = device.load(text).launch(grid=1, block=128, shared=17 * 1024, params=params, policy=policy)
    np.testing.assert_array_equal(out, wanted)
    assert run.verdict == "clean", run


# --- loads and stores ------------------------------------------------------------------------------------------------

# Register r of lane l: lane and column, and the registers and columns of one repetition.
SHAPES: dict[str, tuple[Any, int, int]] = {
    "32x32b": (lambda l, r: (l, r), 1, 1),
    "16x64b": (lambda l, r: (l // 4 + 8 * (l % 2), l // 2 % 2 + 2 * r), 1, 2),
    "16x128b": (lambda l, r: (l // 4 + 8 * (r % 2), l % 4 + 4 * (r // 2)), 2, 4),
    "16x256b": (lambda l, r: (l // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r // 4)), 4, 8),
    "16x32bx2": (lambda l, r: (l % 16, r + l // 16 * HALF), 1, 1),
}
HALF = 40


def fragments(shape: str, count: int, pack: bool) -> np.ndarray:
    """(lane, column) of each register [register, lane]."""
    place, registers, _ = SHAPES[shape]
    width = 2 if pack else 1
    half = HALF if shape == "16x32bx2" else 0
    cells = [[place(l, r) for l in range(32)] for r in range(registers * count)]
    if half and pack:  # the offset of the second half is in columns, however they are packed
        return np.array([[(l % 16, 2 * r + l // 16 * half) for l in range(32)] for r in range(count)])
    return np.array(cells) * (1, width)


def transfer(shape: str, count: int, lane: int, pack: bool, store: bool, warp: int = 0) -> tuple[np.ndarray, Any, Any]:
    """Fill 64 columns with known cells, load in one shape; or store in one shape, load all cells."""
    _, registers, _ = SHAPES[shape]
    registers *= count
    names = "{" + ", ".join(f"%v{i}" for i in range(registers)) + "}"
    half = f", {HALF}" if shape == "16x32bx2" else ""
    base = "{" + ", ".join(f"%c{i}" for i in range(64)) + "}"
    suffix = ".pack::16b" if pack and not store else ".unpack::16b" if pack else ""
    address = f"[%t+{(lane << 16) + 8}]"
    if store:
        target = f"{address}{half}, {names}"
        moves = "\n".join(f"ld.global.b32 %v{i}, [%in+{128 * i}];" for i in range(registers))
        body = f"""{moves}
tcgen05.st.sync.aligned.{shape}.x{count}{suffix}.b32 {target};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x64.b32 {base}, [%t];
tcgen05.wait::ld.sync.aligned;
""" + "\n".join(f"st.global.b32 [%out+{128 * i}], %c{i};" for i in range(64))
    else:
        body = f"""tcgen05.ld.sync.aligned.{shape}.x{count}{suffix}.b32 {names}, {address}{half};
tcgen05.wait::ld.sync.aligned;
""" + "\n".join(f"st.global.b32 [%out+{128 * i}], %v{i};" for i in range(registers))
    fill = "\n".join(f"mad.lo.u32 %c{i}, %lane, 1000, {i};" for i in range(64))
    text = f"""{HEAD}
.entry k(.param .u64 pin, .param .u64 pout) {{
.reg .b32 %t, %tid, %lane, %slot, %c<64>, %v<128>;
.reg .b64 %in, %out, %x;
.reg .pred %p;
ld.param.u64 %in, [pin];
ld.param.u64 %out, [pout];
mov.u32 %tid, %tid.x;
and.b32 %lane, %tid, 31;
mov.u32 %slot, smem;
setp.lt.u32 %p, %tid, 32;
@!%p bra allocated;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 128;
allocated:
bar.sync 0;
shr.u32 %v0, %tid, 5;
setp.ne.u32 %p, %v0, {warp};
@%p bra done;
ld.shared.b32 %t, [%slot];
add.u32 %t, %t, {32 * (warp % 4) << 16};
mul.wide.u32 %x, %lane, 4;
add.u64 %in, %in, %x;
add.u64 %out, %out, %x;
{fill}
tcgen05.st.sync.aligned.32x32b.x64.b32 [%t], {base};
tcgen05.st.sync.aligned.32x32b.x64.b32 [%t+64], {base};
tcgen05.wait::st.sync.aligned;
{body}
done:
bar.sync 0;
setp.lt.u32 %p, %tid, 32;
@!%p bra end;
ld.shared.b32 %t, [%slot];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 128;
end:
ret;
}}
"""
    values = np.arange(registers * 32, dtype=np.uint32).reshape(registers, 32) * 65_537 + 7
    out = np.zeros((64 if store else registers, 32), np.uint32)
    device = EmulatedDevice("sm_100a")
    params = [device.register(array) for array in (values, out)]
    run = device.load(text).launch(grid=1, block=160, shared=1024, params=params)
    return out, values, run


@pytest.mark.parametrize("pack", [False, True], ids=["", "pack"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("shape", "lane"), [(shape, lane) for shape in SHAPES for lane in (0, 16) if (shape, lane) != ("32x32b", 16)]
)
def test_load_and_store_shapes(shape: str, count: int, lane: int, pack: bool) -> None:
    cells = np.arange(32)[:, None] * 1000 + np.arange(128) % 64
    places = fragments(shape, count, pack)
    lanes, columns = places[..., 0] + lane, places[..., 1] + 8
    out, _, run = transfer(shape, count, lane, pack, store=False)
    wanted = cells[lanes, columns]
    if pack:
        wanted = (wanted & 0xFFFF) | cells[lanes, columns + 1] << 16
    np.testing.assert_array_equal(out, wanted)
    assert run.verdict == "clean", run

    out, values, run = transfer(shape, count, lane, pack, store=True)
    wanted = cells[:, :64].T.copy()
    inside = columns + pack < 64
    wanted[columns[inside], lanes[inside]] = (values & 0xFFFF if pack else values)[inside]
    if pack:
        wanted[columns[inside] + 1, lanes[inside]] = (values >> 16)[inside]
    np.testing.assert_array_equal(out, wanted)
    assert run.verdict == "clean", run


@pytest.mark.parametrize("warp", [1, 3, 4])
def test_a_warp_has_lanes_by_its_number_modulo_four(warp: int) -> None:
    assert transfer("32x32b", 4, 0, False, store=False, warp=warp)[2].verdict == "clean"
