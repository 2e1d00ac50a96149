"""Geometry, addresses, lane bands and the S/P/O map of tensor memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell.tmem import (
    COLUMNS,
    LANES,
    AddressOutOfView,
    LaneNotOwned,
    MapExceedsCapacity,
    UnknownBase,
    check_lanes,
    decode,
    encode,
    forward_map,
    known_base,
    lane_band,
    logical_columns,
    size_bytes,
)


def test_capacity_and_granule():
    assert size_bytes() == 262_144 == 256 * 1024
    assert size_bytes(32) == 16_384 == 16 * 1024
    assert size_bytes(0) == 0


@pytest.mark.parametrize("columns", [-1, 513, 1024])
def test_a_pair_is_not_one_memory_of_1024_columns(columns):
    with pytest.raises(AddressOutOfView, match="one CTA's view has 512"):
        size_bytes(columns)


def test_example_address():
    assert encode(37, 384) == 2_425_216
    assert decode(2_425_216) == (37, 384)


def test_every_cell_has_an_address_of_its_own():
    addresses = {encode(lane, column): (lane, column) for lane in range(LANES) for column in range(COLUMNS)}
    assert len(addresses) == LANES * COLUMNS
    assert all(decode(address) == cell for address, cell in addresses.items())


@pytest.mark.parametrize(("lane", "column"), [(-1, 0), (128, 0), (0, -1), (0, 512), (0, 1023)])
def test_encode_refuses_what_is_outside_the_view(lane, column):
    with pytest.raises(AddressOutOfView):
        encode(lane, column)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(-(2**32), 2**32))
def test_decode_inverts_encode_or_refuses(address):
    try:
        cell = decode(address)
    except AddressOutOfView:
        assert not (0 <= address >> 16 < LANES and address & 0xFFFF < COLUMNS)
    else:
        assert encode(*cell) == address


def test_four_warps_cover_the_lanes_once():
    bands = [lane_band(warp) for warp in range(4)]
    assert bands == [range(32), range(32, 64), range(64, 96), range(96, 128)]
    assert sorted(lane for band in bands for lane in band) == list(range(LANES))
    # Warps of other warpgroups see the same rows if they agree modulo 4: correction warp 8 shares rows with softmax 0.
    assert all(lane_band(warp) == bands[warp % 4] for warp in range(16))


def test_warp_0_may_not_load_lane_64():
    with pytest.raises(LaneNotOwned, match="warp 0 touches lane 64"):
        check_lanes(0, range(64, 65))


def test_one_warp_cannot_cover_all_lanes():
    with pytest.raises(LaneNotOwned, match="warp 0 touches lane 32"):
        check_lanes(0, range(LANES))
    assert sum(lane not in lane_band(0) for lane in range(LANES)) == 96


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(0, 15), st.integers(0, 127), st.integers(1, 128))
def test_lane_ownership(warp, first, count):
    lanes = range(first, min(first + count, LANES))
    if set(lanes) <= set(lane_band(warp)):
        check_lanes(warp, lanes)
    else:
        with pytest.raises(LaneNotOwned):
            check_lanes(warp, lanes)


def test_bad_warps_and_lanes():
    with pytest.raises(ValueError, match="negative"):
        lane_band(-1)
    with pytest.raises(AddressOutOfView, match="lane 128"):
        check_lanes(3, range(96, 129))


def test_map_of_the_specification():
    layout = forward_map(128, 128, 2)
    assert [(r.name, r.begin, r.end, r.width) for r in layout.regions] == [
        ("S0", 0, 128, 128),
        ("S1", 128, 256, 128),
        ("P0", 64, 128, 64),
        ("P1", 192, 256, 64),
        ("O0", 256, 384, 128),
        ("O1", 384, 512, 128),
    ]
    assert layout.columns == 512


def test_fp8_probabilities_start_in_the_middle_and_are_half_as_wide():
    layout = forward_map(128, 128, 2, p_bits=8)
    assert [(r.begin, r.width) for r in layout.P] == [(64, 32), (192, 32)]


@pytest.mark.parametrize(("q_stages", "head_dim_v", "columns"), [(2, 128, 512), (1, 192, 448), (2, 192, 640)])
def test_capacity_rows(q_stages, head_dim_v, columns):
    assert logical_columns(128, head_dim_v, q_stages) == columns
    if columns <= COLUMNS:
        assert forward_map(128, head_dim_v, q_stages).columns == columns
    else:
        with pytest.raises(MapExceedsCapacity, match="needs 640 columns"):
            forward_map(128, head_dim_v, q_stages)


@pytest.mark.parametrize("p_bits", [8, 16])
@pytest.mark.parametrize("q_stages", [1, 2])
def test_map_for_every_tile(q_stages, p_bits):
    fitting = 0
    for tile_n in range(16, 257, 16):
        for head_dim_v in range(8, 513, 8):
            if 2 * tile_n + q_stages * head_dim_v > 512:
                with pytest.raises(MapExceedsCapacity):
                    forward_map(tile_n, head_dim_v, q_stages, p_bits)
                continue
            fitting += 1
            layout = forward_map(tile_n, head_dim_v, q_stages, p_bits)
            owners = np.zeros(COLUMNS, dtype=int)
            for region in layout.S + layout.O:  # these live together: no column may belong to two
                owners[region.begin : region.end] += 1
            assert owners.max() == 1
            assert owners.sum() == layout.columns == logical_columns(tile_n, head_dim_v, q_stages)
            for i, (S, P) in enumerate(zip(layout.S, layout.P, strict=True)):
                assert S.begin == i * tile_n
                assert S.contains(P)
                assert P.begin - S.begin == tile_n // 2
                assert (P.width - 1) * 32 < tile_n * p_bits <= P.width * 32
                assert (P.end == S.end) == (p_bits == 16)
            assert [O.begin for O in layout.O] == [2 * tile_n + i * head_dim_v for i in range(q_stages)]
    assert fitting > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 128, 1), "must be positive"),
        ((128, -1, 1), "must be positive"),
        ((128, 128, 3), "q_stages 3"),
        ((127, 128, 1), "must be even"),
        ((128, 128, 1, 4), "p_bits 4"),
    ],
)
def test_bad_maps(arguments, message):
    with pytest.raises(ValueError, match=message):
        forward_map(*arguments)


def test_only_the_whole_memory_starts_at_a_known_base():
    assert known_base(512) == 0
    for columns in (32, 64, 128, 256):
        with pytest.raises(UnknownBase, match=f"{columns} columns may start anywhere"):
            known_base(columns)
