"""Bytes of operand tiles and registers of tensor-memory fragments."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell.descriptors import Kind, SmemDescriptor, Swizzle, k_steps
from cupyfa.oracles.blackwell.layouts import (
    LD_SHAPES,
    Major,
    MisalignedTile,
    fragment,
    fragment_registers,
    operand_address,
    p_cell,
    swizzle_address,
    swizzle_width,
    tile_offset,
)

SWIZZLES = [Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(0, 2**18 - 1), st.sampled_from(SWIZZLES))
def test_swizzle_is_its_own_inverse_and_stays_in_its_row_of_128_bytes(address, swizzle):
    moved = swizzle_address(address, swizzle)
    assert swizzle_address(moved, swizzle) == address
    assert moved >> 7 == address >> 7
    assert moved % 16 == address % 16


@pytest.mark.parametrize(
    ("swizzle", "bits", "from_bits"),
    [(Swizzle.B128, 0b1110000, 0b1110000000), (Swizzle.B64, 0b110000, 0b110000000), (Swizzle.B32, 0b10000, 0b10000000)],
)
def test_swizzle_bits(swizzle, bits, from_bits):
    for address in range(0, 2048, 16):
        assert swizzle_address(address, swizzle) == address ^ ((address & from_bits) >> 3 & bits)


@pytest.mark.parametrize("element_bytes", [1, 2])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_tile_is_a_bijection(swizzle, element_bytes):
    rows, columns = 32, 2 * swizzle_width(swizzle) // element_bytes
    offsets = {tile_offset(r, c, rows, element_bytes, swizzle) for r in range(rows) for c in range(columns)}
    assert offsets == set(range(0, rows * columns * element_bytes, element_bytes))


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_tile_is_what_tma_writes(swizzle):
    """The closed form against a plain row-major panel whose addresses are swizzled afterwards."""
    rows, element_bytes, base = 64, 2, 0x11000
    width = swizzle_width(swizzle)
    for r, c in itertools.product(range(rows), range(2 * width // element_bytes)):
        panel, byte = divmod(c * element_bytes, width)
        linear = base + panel * rows * width + r * width + byte
        assert base + tile_offset(r, c, rows, element_bytes, swizzle) == swizzle_address(linear, swizzle)


def test_formulas_of_128_byte_tiles():
    rows = 128
    for r, c in itertools.product(range(0, rows, 3), range(128)):
        bf16 = (r // 8) * 1024 + (r % 8) * 128 + ((c % 64 // 8) ^ (r % 8)) * 16 + (c % 8) * 2 + (c // 64) * rows * 128
        assert tile_offset(r, c, rows, 2, Swizzle.B128) == bf16
        fp8 = (r // 8) * 1024 + (r % 8) * 128 + ((c // 16) ^ (r % 8)) * 16 + c % 16
        assert tile_offset(r, c, rows, 1, Swizzle.B128) == fp8


#: name -> (k, mn, element bytes, kind, major, LBO, SBO, swizzle). The tile has mn rows if K-major, else k rows.
OPERANDS = {
    "Q or K, bf16": (128, 128, 2, Kind.F16, Major.K, 16, 1024, Swizzle.B128),
    "half of K, bf16": (192, 64, 2, Kind.F16, Major.K, 16, 1024, Swizzle.B128),
    "Q or K, fp8": (128, 128, 1, Kind.F8F6F4, Major.K, 16, 1024, Swizzle.B128),
    "Q or K, bf16, 64-byte rows": (96, 128, 2, Kind.F16, Major.K, 16, 512, Swizzle.B64),
    "V, bf16, 128 x 128": (128, 128, 2, Kind.F16, Major.MN, 16384, 1024, Swizzle.B128),
    "V, bf16, 128 x 64": (128, 64, 2, Kind.F16, Major.MN, 0, 1024, Swizzle.B128),
    "V, bf16, 128 x 96": (128, 96, 2, Kind.F16, Major.MN, 8192, 512, Swizzle.B64),
    "V, fp8, 128 x 128": (128, 128, 1, Kind.F8F6F4, Major.MN, 0, 1024, Swizzle.B128),
    "V, fp8, 128 x 64": (128, 64, 1, Kind.F8F6F4, Major.MN, 0, 512, Swizzle.B64),
    "dS as A, bf16": (128, 128, 2, Kind.F16, Major.MN, 16384, 1024, Swizzle.B128),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_descriptors_read_what_tma_wrote(name):
    """Every element of the operand, through the descriptor of its K step, is the byte where the tile has it."""
    k, mn, element_bytes, kind, major, lbo, sbo, swizzle = OPERANDS[name]
    base, rows = 0x11000, mn if major is Major.K else k
    start = SmemDescriptor(base, lbo, sbo, swizzle)
    words = k_steps(start, k, kind, mn_major=major is Major.MN, rows=rows)
    assert len(words) == k // kind.k
    seen = set()
    for step, word in enumerate(words):
        descriptor = SmemDescriptor.decode(word)
        for i, kk in itertools.product(range(mn), range(kind.k)):
            row, col = (i, step * kind.k + kk) if major is Major.K else (step * kind.k + kk, i)
            address = operand_address(descriptor, major, i, kk, element_bytes)
            assert address == base + tile_offset(row, col, rows, element_bytes, swizzle)
            seen.add(address)
    assert len(seen) == k * mn


@pytest.mark.parametrize("major", list(Major))
def test_unswizzled_operands(major):
    """Without a swizzle LBO and SBO trade places between the two majors."""
    rows, k, mn = 64, 16, 64
    if major is Major.K:  # chunks of 16 bytes along k are whole panels apart
        descriptor = SmemDescriptor(0, lbo=rows * 16, sbo=128, swizzle=Swizzle.NONE)
    else:  # rows are k: 8 of them are 128 bytes, 8 mn a panel
        rows = k
        descriptor = SmemDescriptor(0, lbo=128, sbo=rows * 16, swizzle=Swizzle.NONE)
    for i, kk in itertools.product(range(mn), range(k)):
        row, col = (i, kk) if major is Major.K else (kk, i)
        assert operand_address(descriptor, major, i, kk, 2) == tile_offset(row, col, rows, 2, Swizzle.NONE)


def test_a_hopper_swizzle_code_would_read_other_bytes():
    # 64-byte swizzle is code 2 on Hopper; here 2 means 128 bytes.
    right = SmemDescriptor(0, lbo=16, sbo=512, swizzle=Swizzle.B64)
    wrong = SmemDescriptor(0, lbo=16, sbo=512, swizzle=Swizzle(2))
    differing = [
        (i, k)
        for i, k in itertools.product(range(64), range(16))
        if operand_address(right, Major.K, i, k, 2) != operand_address(wrong, Major.K, i, k, 2)
    ]
    assert len(differing) > 64 * 16 // 2


def test_v_needs_no_transposed_copy():
    """V[key][dv] is read along keys: the same tile, read K-major and MN-major, gives transposed operands."""
    V = SmemDescriptor(0, lbo=16384, sbo=1024, swizzle=Swizzle.B128)
    K = SmemDescriptor(0, lbo=16, sbo=1024, swizzle=Swizzle.B128)
    for row, col in itertools.product(range(16), range(16)):
        assert operand_address(V, Major.MN, mn=col, k=row, element_bytes=2) == operand_address(
            K, Major.K, mn=row, k=col, element_bytes=2
        )


def test_probabilities_as_an_operand():
    for element_bytes, columns in ((2, 64), (1, 32)):
        cells = [p_cell(row, k, element_bytes) for row in range(128) for k in range(128)]
        assert len(set(cells)) == 128 * 128
        assert {lane for lane, _, _ in cells} == set(range(128))
        assert {column for _, column, _ in cells} == set(range(columns))
    for kind, element_bytes in ((Kind.F16, 2), (Kind.F8F6F4, 1)):
        assert p_cell(0, kind.k, element_bytes) == (0, 8, 0), "one instruction is 8 columns"
    assert [p_cell(9, k, 2) for k in (0, 1, 2)] == [(9, 0, 0), (9, 0, 2), (9, 1, 0)]


@pytest.mark.parametrize("shape", LD_SHAPES)
def test_fragments_are_bijections(shape):
    registers, largest = LD_SHAPES[shape]
    lanes = 32 if shape.startswith("32") else 16
    bits = int(shape.split("x")[1].rstrip("b"))
    for repetitions in (1, 2, largest):
        count = fragment_registers(shape, repetitions)
        assert count == registers * repetitions <= 128
        cells = [fragment(shape, thread, r) for thread in range(32) for r in range(count)]
        assert len(set(cells)) == 32 * count
        assert {lane for lane, _ in cells} == set(range(lanes))
        assert {column for _, column in cells} == set(range(bits // 32 * repetitions))


def test_16x256b_is_the_accumulator_fragment_of_earlier_matrix_instructions():
    # Rows t / 4 and t / 4 + 8, pairs of columns 2 (t % 4): the layout of mma.sync and wgmma.
    for thread in range(32):
        cells = [fragment("16x256b", thread, r) for r in range(4)]
        row, column = thread // 4, 2 * (thread % 4)
        assert cells == [(row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1)]


def test_32x32b_gives_a_thread_its_row():
    assert [fragment("32x32b", t, r) for t in (0, 31) for r in (0, 127)] == [(0, 0), (0, 127), (31, 0), (31, 127)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tile_offset(32, 0, 32, 2, Swizzle.B128), "of a tile of 32 rows"),
        (lambda: tile_offset(0, 0, 12, 2, Swizzle.B128), "multiple of 8"),
        (lambda: tile_offset(0, 0, 8, 4, Swizzle.B128), "element_bytes is 4"),
        (lambda: swizzle_width(Swizzle.B128_ATOM32), "not modelled"),
        (lambda: swizzle_width(128), "128 is no Swizzle"),
        (lambda: swizzle_address(-1, Swizzle.B128), "address is -1"),
        (lambda: operand_address(SmemDescriptor(0, 16, 16, Swizzle.NONE), 0, 0, 0, 2), "0 is no Major"),
        (lambda: p_cell(128, 0, 2), "element \\(128, 0\\)"),
        (lambda: fragment("8x8b", 0, 0), "shape '8x8b'"),
        (lambda: fragment("32x32b", 32, 0), "thread 32"),
        (lambda: fragment_registers("16x128b", 128), "x128"),
        (lambda: fragment_registers("32x32b", 3), "power of two"),
        (lambda: fragment_registers("8x8b", 1), "known are"),
        (lambda: operand_address(SmemDescriptor(0, 16, 16, Swizzle.NONE), Major.K, -1, 0, 2), "element"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_tiles_off_their_pattern_are_refused():
    with pytest.raises(MisalignedTile):
        operand_address(SmemDescriptor(0x80, 16, 1024, Swizzle.B128, base_offset=1), Major.K, 0, 0, 2)
