"""Fragments, swizzles and descriptors: bijections, and that the ways to say one thing agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.hopper.descriptors import Descriptor, k_major, k_major_addresses, mn_major, mn_major_addresses
from cupyfa.oracles.hopper.swizzle import Swizzle, panel_addresses, stmatrix_addresses, swizzled
from cupyfa.oracles.hopper.wgmma import a_fragment, accumulator, fp8_key_order

exact = settings(deadline=None, derandomize=True, max_examples=100)
SWIZZLES = [Swizzle.B128, Swizzle.B64, Swizzle.B32]


def is_bijection(coordinates, rows, columns):
    flat = coordinates.reshape(-1, 2)
    return np.array_equal(np.sort(flat[:, 0] * columns + flat[:, 1]), np.arange(rows * columns))


# --- Fragments ---


@pytest.mark.parametrize("columns", range(8, 257, 8))
def test_accumulator_is_a_bijection(columns):
    assert is_bijection(accumulator(columns), 64, columns)


@pytest.mark.parametrize(("bits", "columns"), [(16, 16), (8, 32)])
def test_a_fragment_is_a_bijection(bits, columns):
    assert is_bijection(a_fragment(bits), 64, columns)


def test_a_thread_owns_two_rows_and_a_row_a_quad():
    rows = accumulator(128)[:, :, 0]
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        assert set(rows[thread]) == {16 * warp + lane // 4, 16 * warp + lane // 4 + 8}
    owners = {row: set(np.nonzero((rows == row).any(axis=1))[0]) for row in range(64)}
    assert all(len(quad) == 4 and max(quad) - min(quad) == 3 for quad in owners.values())  # shuffles by 1 and 2


@pytest.mark.parametrize("columns", [16, 80, 128, 176])
def test_scores_are_the_operand_of_the_next_product(columns):
    """Packed in pairs, accumulators 8k .. 8k+7 are registers a0 .. a3 of k-step k: P never moves between threads."""
    scores, operand = accumulator(columns), a_fragment(16)
    for step in range(columns // 16):
        packed = scores[:, 8 * step : 8 * step + 8].reshape(128, 4, 2, 2)
        assert np.array_equal(packed, operand + np.array([0, 16 * step]))


def test_fp8_operand_needs_another_key_order():
    scores, operand = accumulator(32), a_fragment(8)
    assert not np.array_equal(scores.reshape(128, 4, 4, 2), operand)  # the identity of 16 bit does not hold
    order = fp8_key_order()
    assert order[:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert np.array_equal(order[16:], order[:16] + 16)  # each group of 16 by itself
    assert np.array_equal(np.sort(order), np.arange(32))
    h, t, b, e = np.meshgrid(range(2), range(4), range(2), range(2), indexing="ij")
    assert np.array_equal(order[16 * h + 4 * t + 2 * b + e], 16 * h + 8 * b + 2 * t + e)


def test_fp8_product_with_permuted_v_is_the_product():
    rng = np.random.default_rng(0)
    P, V = rng.integers(-4, 5, (64, 32)), rng.integers(-4, 5, (32, 8))
    order = fp8_key_order()
    assert np.array_equal(P[:, order] @ V[order], P @ V)
    assert not np.array_equal(P[:, order] @ V, P @ V)  # with V in natural order it is another number


# --- Swizzles ---


@pytest.mark.parametrize("mode", list(Swizzle))
def test_swizzle_is_its_own_inverse_and_stays_in_its_atom(mode):
    address = np.arange(4096)
    there = swizzled(address, mode)
    assert np.array_equal(swizzled(there, mode), address)
    assert np.array_equal(np.sort(there), address)
    assert np.array_equal(there // max(128, mode.atom_bytes), address // max(128, mode.atom_bytes))
    assert np.array_equal(there % 16, address % 16)  # chunks of 16 bytes move as they are


@pytest.mark.parametrize("mode", SWIZZLES)
def test_swizzle_spreads_a_column_over_the_banks(mode):
    """Eight rows of one 16-byte column touch all 32 banks: that is what it is for."""
    column = panel_addresses(0, 8, mode.row_bytes // 2, 2, mode)[:, 0]
    banks = {(int(address) + 4 * word) // 4 % 32 for address in column for word in range(4)}
    assert len(banks) == 32
    plain = np.arange(8) * mode.row_bytes
    assert len({(int(address) + 4 * word) // 4 % 32 for address in plain for word in range(4)}) < 32


@pytest.mark.parametrize(("mode", "chunk_of_row"), [
    (Swizzle.B128, lambda row: row % 8),
    (Swizzle.B64, lambda row: row // 2 % 4),
    (Swizzle.B32, lambda row: row // 4 % 2),
])  # fmt: skip
def test_chunks_move_by_the_row(mode, chunk_of_row):
    tile = panel_addresses(0, 16, mode.row_bytes // 2, 2, mode)
    for row in range(16):
        assert [(int(a) - row * mode.row_bytes) // 16 for a in tile[row, ::8]] == [
            chunk ^ chunk_of_row(row) for chunk in range(mode.row_bytes // 16)
        ]


# --- Tiles and descriptors ---


@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize(("rows", "columns", "itemsize"), [(64, 128, 2), (80, 256, 2), (128, 64, 2), (112, 128, 1)])
def test_a_tile_is_a_bijection_onto_its_bytes(rows, columns, itemsize, mode):
    tile = panel_addresses(4096, rows, columns, itemsize, mode)
    every = (tile[..., None] + np.arange(itemsize)).ravel()
    assert np.array_equal(np.sort(every), 4096 + np.arange(rows * columns * itemsize))


@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("rows", [64, 80, 128])
def test_k_major_descriptors_read_the_tile(rows, itemsize, mode):
    """Every k-step of every panel: start + 32 bytes per step, + a panel after the last."""
    columns, k = 256, 32 // itemsize
    tile = panel_addresses(2048, rows, columns, itemsize, mode)
    per_panel = mode.row_bytes // 32
    for step in range(columns // k):
        panel, inside = divmod(step, per_panel)
        descriptor = k_major(2048, mode).advanced(panel * rows * mode.row_bytes + 32 * inside)
        assert np.array_equal(k_major_addresses(descriptor, rows, itemsize), tile[:, step * k : (step + 1) * k])


@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize(("keys", "columns"), [(64, 64), (80, 256), (112, 192), (128, 128), (176, 128)])
def test_mn_major_descriptors_read_the_same_tile_transposed(keys, columns, mode):
    """V as TMA wrote it, [key][column], is an N-major B: 16 rows of keys per step, panels by the leading offset."""
    tile = panel_addresses(1024, keys, columns, 2, mode)
    for step in range(keys // 16):
        descriptor = mn_major(1024, keys, mode).advanced(step * 16 * mode.row_bytes)
        assert np.array_equal(mn_major_addresses(descriptor, columns), tile[16 * step : 16 * (step + 1)])


@pytest.mark.parametrize("warpgroup", range(3))
def test_a_warpgroup_starts_64_rows_further_on(warpgroup):
    tile = panel_addresses(0, 192, 64, 2)
    descriptor = k_major(0).advanced(64 * warpgroup * 128)
    assert np.array_equal(k_major_addresses(descriptor, 64, 2), tile[64 * warpgroup : 64 * (warpgroup + 1), :16])


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (128, 128), (192, 64), (128, 256)])
def test_stmatrix_stores_the_accumulators_where_they_belong(rows, columns):
    """Registers r of k-step k hold 8 x 8 matrices; lane l points to row l mod 8 of matrix l / 8."""
    tile, scores = panel_addresses(0, rows, columns, 2), accumulator(columns)
    for step in range(columns // 16):
        addresses = stmatrix_addresses(0, rows, step)
        for matrix in range(4):
            for thread in range(128):
                warp, lane = divmod(thread, 32)
                # After the store, thread `lane` of the warp has put its pair into row lane / 4 of the matrix.
                row_address = addresses[32 * warp + 8 * matrix + lane // 4]
                pair = scores[thread, 8 * step + 2 * matrix : 8 * step + 2 * matrix + 2]
                written = [row_address + 4 * (lane % 4) + 2 * e for e in range(2)]
                assert written == [tile[row, column] for row, column in pair]


@exact
@given(
    *[st.integers(0, 2**14 - 1).map(lambda x: 16 * x)] * 3,
    st.integers(0, 7),
    st.sampled_from(list(Swizzle)),
)
def test_descriptor_round_trip(start, leading, stride, base, mode):
    descriptor = Descriptor(start, leading, stride, base, mode)
    bits = descriptor.encode()
    assert Descriptor.decode(bits) == descriptor
    assert bits & 0x3FFF == start >> 4
    assert bits >> 16 & 0x3FFF == leading >> 4
    assert bits >> 32 & 0x3FFF == stride >> 4
    assert bits >> 49 & 7 == base
    assert bits >> 62 == mode


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 47, 48, 52, 61])
def test_descriptor_has_bits_that_mean_nothing(bit):
    with pytest.raises(ValueError, match="bits outside the fields"):
        Descriptor.decode(1 << bit)


@exact
@given(st.integers(0, 2**14 - 1), st.integers(0, 2**14 - 1))
def test_a_step_is_an_addition_to_the_low_word(start, offset):
    """Shared memory ends below 2^18, so no address carries into the next field."""
    if start + offset >= 2**14:
        with pytest.raises(ValueError, match="below 2\\^18"):
            k_major(16 * start).advanced(16 * offset)
    else:
        before, after = k_major(16 * start).encode(), k_major(16 * start).advanced(16 * offset).encode()
        assert after == before + offset


def test_golden_descriptors():
    """Offsets in units of 16 bytes: 64, 32, 16 rows of an atom; a panel of 128 keys is 1024."""
    assert [k_major(0, mode).encode() >> 32 & 0x3FFF for mode in SWIZZLES] == [64, 32, 16]
    assert mn_major(0, 128).encode() == 1 << 62 | 64 << 32 | 1024 << 16
    assert k_major(0x2400).advanced(32).encode() == 1 << 62 | 64 << 32 | 1 << 16 | 0x242


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accumulator(4), "N is 4"),
        (lambda: accumulator(264), "N is 264"),
        (lambda: a_fragment(32), "A has 32 bits"),
        (lambda: Descriptor(8, 16, 16), "start is 8"),
        (lambda: Descriptor(2**18, 16, 16), "below 2\\^18"),
        (lambda: Descriptor(0, 16, 16, 8), "base offset 8"),
        (lambda: k_major(0, Swizzle.NONE), "core matrices"),
        (lambda: mn_major(0, 64, Swizzle.NONE), "change places"),
        (lambda: mn_major(0, 8), "8 rows of K"),
        (lambda: panel_addresses(512, 8, 64, 2), "no multiple of 1024"),
        (lambda: panel_addresses(0, 8, 65, 2), "do not fill panels"),
        (lambda: panel_addresses(0, 0, 64, 2), "0 rows"),
        (lambda: panel_addresses(0, 8, 64, 0), "itemsize 0"),
        (lambda: panel_addresses(0, 8, 64, 2, 128), "the mode is 128"),
        (lambda: swizzled(0, 128), "the mode is 128; one of Swizzle.NONE, Swizzle.B128"),
        (lambda: swizzled(0, 1), "the mode is 1"),
        (lambda: swizzled(-1, Swizzle.B128), "byte addresses are integers from 0 on"),
        (lambda: swizzled(1.5, Swizzle.B128), "not float64"),
        (lambda: Descriptor(0, 16, 16, swizzle=2), "the mode is 2"),
        (lambda: Descriptor.decode(-1), "not a 64-bit word"),
        (lambda: Descriptor.decode(2**64), "not a 64-bit word"),
        (lambda: k_major(0, 64), "the mode is 64"),
        (lambda: mn_major(0, 64, 64), "the mode is 64"),
        (lambda: k_major_addresses(k_major(0), 0, 2), "0 rows"),
        (lambda: k_major_addresses(k_major(0), 8, 4), "4-byte elements"),
        (lambda: mn_major_addresses(mn_major(0, 16), 0), "0 columns"),
        (lambda: stmatrix_addresses(0, 8, 0), "rows 8 one of 8 from 64 on"),
        (lambda: stmatrix_addresses(0, 64, -1), "step -1"),
        (lambda: stmatrix_addresses(64, 64, 0), "start 64"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
