"""Which thread holds which byte, and the permutations that follow from it (specification 0x06)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.formats import E4M3FN
from cupyfa.oracles.fp8.layout import (
    FEATURE_ORDER,
    K_ROW_ORDER,
    KEY_ORDER,
    IllegalTransposeShape,
    NotKMajor,
    accumulator_coordinate,
    byte_perm,
    check_operand,
    operand_a_coordinate,
    ordered_keys,
    pack_in_place,
    shuffle_to_operand_a,
    transpose_block,
    transpose_shape,
    transpose_tile,
)

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
ALL_BYTES = [(lane, register, byte) for lane in range(32) for register in range(4) for byte in range(4)]


def to_accumulator(tile):
    """Give a (16, 32) tile to the threads as accumulator registers."""
    return np.array([[tile[accumulator_coordinate(lane, i)] for i in range(16)] for lane in range(32)], tile.dtype)


def from_operand_a(registers):
    """Read the (16, 32) operand that the matrix unit sees."""
    tile = np.zeros((16, 32), registers.dtype)
    for lane, register, byte in ALL_BYTES:
        tile[operand_a_coordinate(lane, register, byte)] = registers[lane, register, byte]
    return tile


def random_bytes(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def small_values(shape, seed=0):
    """Integers that E4M3 holds exactly, so that products are exact."""
    return np.random.default_rng(seed).integers(-8, 9, shape)


# Maps are bijections


@pytest.mark.parametrize("columns", [8, 32, 224])
def test_accumulator_map_is_a_bijection(columns):
    owned = {accumulator_coordinate(lane, i) for lane in range(32) for i in range(columns // 2)}
    assert owned == {(row, column) for row in range(16) for column in range(columns)}


def test_operand_map_is_a_bijection():
    assert {operand_a_coordinate(*b) for b in ALL_BYTES} == {(row, column) for row in range(16) for column in range(32)}


@pytest.mark.parametrize("order", [KEY_ORDER, K_ROW_ORDER, FEATURE_ORDER], ids=["keys", "rows", "features"])
def test_orders_are_permutations(order):
    assert sorted(order) == list(range(16))
    assert sorted(ordered_keys(224, order)) == list(range(224))
    assert np.array_equal(ordered_keys(48, order) // 16, np.arange(48) // 16)  # no key leaves its group of 16


def test_printed_orders():
    assert KEY_ORDER.tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    for position in range(16):
        t, b, e = position >> 2, (position >> 1) & 1, position & 1
        assert position == 4 * t + 2 * b + e
        assert KEY_ORDER[position] == 8 * b + 2 * t + e
        assert K_ROW_ORDER[8 * b + 2 * t + e] == 4 * t + 2 * b + e
    for n in range(16):
        assert FEATURE_ORDER[n] == (2 * n if n < 8 else 2 * (n - 8) + 1)
    with pytest.raises(ValueError, match="multiple of 16"):
        ordered_keys(40)


# P: from accumulator to operand A


def test_ownership_differs():
    held = {accumulator_coordinate(1, i)[1] for i in (0, 1, 4, 5)}
    wanted = {operand_a_coordinate(1, 0, byte)[1] for byte in range(4)}
    assert held == {2, 3, 10, 11}
    assert wanted == {4, 5, 6, 7}


@given(st.integers(0, 2**32))
@PROPERTY
def test_packing_in_place_permutes_keys(seed):
    tile = random_bytes((16, 32), seed)
    assert np.array_equal(from_operand_a(pack_in_place(to_accumulator(tile))), tile[:, ordered_keys(32)])


@given(st.integers(0, 2**32))
@PROPERTY
def test_quad_shuffle_restores_the_natural_order(seed):
    tile = random_bytes((16, 32), seed)
    assert np.array_equal(from_operand_a(shuffle_to_operand_a(to_accumulator(tile))), tile)


def test_permuted_rows_of_k_restore_the_natural_order():
    Q, K = small_values((16, 64)), small_values((32, 64), 1)
    S = Q @ K[ordered_keys(32, K_ROW_ORDER)].T  # what the instruction computes from the permuted tile
    accumulator = to_accumulator(S)
    for lane in range(32):
        for i in range(16):
            row = accumulator_coordinate(lane, i)[0]
            key = 16 * (i >> 3) + 4 * (lane % 4) + 2 * ((i >> 2) & 1) + (i & 1)  # the column that a mask compares
            assert accumulator[lane, i] == (Q @ K.T)[row, key]
    assert np.array_equal(from_operand_a(pack_in_place(accumulator)), Q @ K.T)


def test_converting_without_repair_scrambles():
    tile = random_bytes((16, 32))
    reinterpreted = to_accumulator(tile).reshape(32, 4, 4)  # right number of bytes, right type
    got = from_operand_a(reinterpreted)
    assert sorted(got.ravel()) == sorted(tile.ravel())
    assert (got != tile).mean() > 0.5
    assert (got != tile[:, ordered_keys(32)]).mean() > 0.4  # and no order of keys explains it: rows are mixed
    rows = np.zeros((16, 32), np.uint8) + np.arange(16, dtype=np.uint8)[:, None]
    mixed = from_operand_a(to_accumulator(rows).reshape(32, 4, 4))
    assert any(len(set(row)) > 1 for row in mixed)


# P @ V = P[:, s] @ V[s, :]


@given(st.integers(0, 2**32), st.sampled_from([16, 32, 224]))
@PROPERTY
def test_paired_permutation_is_exact(seed, keys):
    P, V = small_values((16, keys), seed), small_values((keys, 32), seed + 1)
    s = ordered_keys(keys)
    assert np.array_equal(P[:, s] @ V[s], P @ V)


def test_paired_permutation_in_float64():
    # Reindexing changes the order of additions and nothing else. The specification prints 2.22e-16: one rounding
    # error of a sum below 2.
    rng = np.random.default_rng(0)
    P = rng.dirichlet(np.ones(32), 32)
    V = rng.uniform(-1, 1, (32, 32))
    s = ordered_keys(32)
    error = np.abs(P[:, s] @ V[s] - P @ V).max()
    assert error <= 2.0**-52
    assert f"{2.0**-52:.2e}" == "2.22e-16"


@pytest.mark.parametrize("which", ["P", "V"])
def test_permuting_only_one_is_silently_wrong(which):
    P, V = small_values((16, 32), 1), small_values((32, 32), 2)
    s = ordered_keys(32)
    got = P[:, s] @ V if which == "P" else P @ V[s]
    assert got.shape == (P @ V).shape
    assert np.abs(got - P @ V).max() > 20


# V: the transpose


def test_selectors():
    pair_of_words = np.uint32(0x13121110), np.uint32(0x17161514)
    assert hex(int(byte_perm(*pair_of_words, 0x6420))) == "0x16141210"
    assert hex(int(byte_perm(*pair_of_words, 0x7531))) == "0x17151311"
    for selector in (0x8420, 0x16420):
        with pytest.raises(ValueError, match="selector"):
            byte_perm(*pair_of_words, selector)


@given(st.integers(0, 2**32))
@PROPERTY
def test_transpose_has_both_orders(seed):
    V = random_bytes((16, 16), seed)
    assert np.array_equal(transpose_block(V), V[KEY_ORDER][:, FEATURE_ORDER].T)


@pytest.mark.parametrize(("keys", "features"), [(32, 64), (224, 128), (64, 96)])
def test_transposed_tile(keys, features):
    V = random_bytes((keys, features))
    want = V[ordered_keys(keys)][:, ordered_keys(features, FEATURE_ORDER)].T
    assert np.array_equal(transpose_tile(V), want)


def test_the_whole_path_from_p_registers_to_output():
    # P packed in place, V transposed by the producer, O unscrambled by FEATURE_ORDER: exactly P @ V.
    P, V = abs(small_values((16, 32))), small_values((32, 64), 1)
    operand = from_operand_a(pack_in_place(to_accumulator(E4M3FN.encode(P.astype(float)))))
    B = transpose_tile(E4M3FN.encode(V.astype(float)))  # (features, keys)
    O = E4M3FN.decode(operand) @ E4M3FN.decode(B).T
    restored = np.empty_like(O)
    restored[:, ordered_keys(64, FEATURE_ORDER)] = O
    assert np.array_equal(restored, P @ V)
    assert not np.array_equal(O, P @ V)


def test_a_thread_holds_four_neighbouring_output_features():
    # So that the epilogue needs no shuffle: within 16 columns, lane t owns features 4t .. 4t+3.
    for lane in range(32):
        columns = [accumulator_coordinate(lane, i)[1] for i in (0, 1, 4, 5)]
        assert sorted(FEATURE_ORDER[columns]) == [4 * (lane % 4) + n for n in range(4)]


def test_head_contiguous_v_read_as_k_major():
    with pytest.raises(NotKMajor):
        check_operand("PV", "V", "features")
    P, V = small_values((16, 32)), small_values((32, 32), 1)
    wrong = P @ V.T  # the bytes of V taken for its transpose: shapes agree
    assert wrong.shape == (P @ V).shape
    assert np.abs(wrong - P @ V).max() > 20


def test_operands_that_arrive_as_they_must():
    check_operand("QK", "Q", "features")
    check_operand("QK", "K", "features")
    check_operand("PV", "V", "keys")
    for operand in "QK":
        with pytest.raises(NotKMajor):
            check_operand("QK", operand, "keys")
    for bad in (("PV", "K", "keys"), ("QK", "K", "rows")):
        with pytest.raises(ValueError, match="no operand"):
            check_operand(*bad)


@pytest.mark.parametrize("head_dim_v", range(16, 289, 16))
@pytest.mark.parametrize("tile_n", [16, 32, 48, 96, 128, 160, 224])
def test_transpose_shapes(head_dim_v, tile_n):
    legal = head_dim_v % 32 == 0 and tile_n % 32 == 0 and (head_dim_v % 64 == 0 or tile_n % 64 == 0)
    if not legal:
        with pytest.raises(IllegalTransposeShape):
            transpose_shape(head_dim_v, tile_n)
        return
    features, keys = transpose_shape(head_dim_v, tile_n)
    assert (features, keys) == ((64, 32) if head_dim_v % 64 == 0 else (32, 64))
    assert head_dim_v % features == 0
    assert tile_n % keys == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accumulator_coordinate(99, 0), r"lane is 99; it must be in 0 .. 31"),
        (lambda: accumulator_coordinate(0, 128), r"i is 128"),
        (lambda: operand_a_coordinate(0, 4, 0), r"register is 4"),
        (lambda: operand_a_coordinate(0, 0, -1), r"byte is -1"),
        (lambda: ordered_keys(-16), r"-16 keys"),
        (lambda: ordered_keys(16, np.zeros(16, np.intp)), r"no permutation"),
        (lambda: pack_in_place(np.zeros((32, 8), np.uint8)), r"accumulator has shape \(32, 8\); it must be \(32, 16\)"),
        (lambda: shuffle_to_operand_a(np.zeros((32, 16), np.int64)), r"accumulator is int64"),
        (lambda: transpose_block(np.zeros((16, 8), np.uint8)), r"V has shape \(16, 8\)"),
        (lambda: transpose_block(np.zeros((16, 16), np.float32)), r"V is float32"),
        (lambda: transpose_tile(np.zeros((16, 24), np.uint8)), r"multiples of 16"),
        (lambda: transpose_shape(0, 64), r"head_dim_v is 0"),
        (lambda: byte_perm(np.zeros(2, np.uint32), np.zeros(3, np.uint32), 0), r"must have one shape"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
