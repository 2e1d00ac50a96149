"""The two bounds of the tile model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.tile_time import TileTime

TIMES = st.floats(0, 1e6)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(TIMES, TIMES, TIMES, TIMES, TIMES)
def test_bounds(load, qk, softmax, pv, store):
    tile = TileTime(load, qk, softmax, pv, store)
    times = [load, qk, softmax, pv, store]
    assert tile.overlapped == max(times)
    assert tile.serial == pytest.approx(sum(times))
    assert tile.overlapped <= tile.on_one_tensor_core <= tile.serial * (1 + 1e-12)
    assert 1 - 1e-12 <= tile.gain <= 5 + 1e-9
    assert set(tile.bottlenecks) == {n for n, t in vars(tile).items() if t == max(times)}


def test_an_engine_that_is_hidden_costs_nothing():
    slow, fast = TileTime(1, 4, 3, 4, 0), TileTime(1, 4, 1, 4, 0)
    assert slow.overlapped == fast.overlapped == 4
    assert slow.serial - fast.serial == 2
    assert TileTime(1, 4, 9, 4, 0).bottlenecks == ("softmax",)
    assert slow.on_one_tensor_core == 8


def test_times_are_not_negative():
    with pytest.raises(ValueError, match="softmax is -1"):
        TileTime(0, 0, -1, 0, 0)
    with pytest.raises(ValueError, match="load is nan"):
        TileTime(float("nan"), 0, 0, 0, 0)
    assert TileTime(0, 0, 0, 0, 0).gain == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TileTime(-1, 0, 0, 0, 0), r"load is -1; it must not be negative"),
        (lambda: TileTime(0, 0, 0, 0, float("nan")), r"store is nan"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
