"""Who holds which byte: FP8 operands of Hopper's matrix instructions (specification 0x06).

FP8 WGMMA takes both operands K-major: contiguous along the axis that it sums over. Two things follow for ``P @ V``.

*P* comes out of ``Q @ K.T`` in accumulator registers, and must go into operand-A registers. In 16 bit the two maps
agree. In 8 bit they do not: of 16 key columns a thread owns ``{2t, 2t+1, 8+2t, 9+2t}`` and must supply
``{4t, ..., 4t+3}``. Three repairs: pack what is there and give V's keys the same order (`KEY_ORDER`, exact because
``P @ V = P[:, s] @ V[s, :]``); put the rows of K into the inverse order, so that the accumulator itself comes out
right (`K_ROW_ORDER`); or move bytes between the four threads of a quad (`shuffle_to_operand_a`).

*V* arrives contiguous along ``d``, but ``P @ V`` sums over keys. `transpose_block` does what FlashAttention-3's
producer does with a 16 x 16 piece: ``ldmatrix.trans`` moves pairs of bytes, ``prmt`` separates them, ``stmatrix``
stores (arXiv 2407.08608, appendix B.8). Its result has exactly `KEY_ORDER` along keys, and `FEATURE_ORDER` along ``d``.

Notation: ``g = lane // 4``, ``t = lane % 4``; a warp owns 16 rows of a 64-row instruction.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..violations import ContractViolation, check_range, check_shape

__all__ = [
    "FEATURE_ORDER",
    "KEY_ORDER",
    "K_ROW_ORDER",
    "IllegalTransposeShape",
    "NotKMajor",
    "accumulator_coordinate",
    "byte_perm",
    "check_operand",
    "operand_a_coordinate",
    "ordered_keys",
    "pack_in_place",
    "shuffle_to_operand_a",
    "transpose_block",
    "transpose_shape",
    "transpose_tile",
]

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.intp]

LANES = 32


class NotKMajor(ContractViolation):
    """An FP8 matrix instruction gets an operand that is not contiguous along the axis that it sums over (0x06)."""


class IllegalTransposeShape(ContractViolation):
    """The in-kernel transpose of V does not exist for this tile (0x06)."""


def _check_bytes(where: str, shape: tuple[int | str, ...], **arrays: Bytes) -> None:
    check_shape(where, shape, **arrays)
    for name, array in arrays.items():
        if array.dtype != np.uint8:
            raise ContractViolation(f"{where}: {name} is {array.dtype}; it must be uint8")


def accumulator_coordinate(lane: int, i: int) -> tuple[int, int]:
    """Return where float32 accumulator register `i` of a lane lies in its warp's 16 rows (0x06).

    ``row = g + 8 * ((i >> 1) & 1)``, ``column = 8 * (i >> 2) + 2 * t + (i & 1)``.

    Parameters
    ----------
    lane : int
        0 to 31.
    i : int
        Register, 0 to N / 2 - 1 for an instruction with N columns.

    Returns
    -------
    tuple of int
        Row and column.

    Examples
    --------
    >>> [accumulator_coordinate(1, i)[1] for i in (0, 1, 4, 5)]  # the columns of row 0 that lane 1 owns
    [2, 3, 10, 11]
    """
    check_range("accumulator", 0, LANES - 1, lane=lane)
    check_range("accumulator", 0, 127, i=i)  # N is at most 256
    g, t = divmod(lane, 4)
    return g + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * t + (i & 1)


def operand_a_coordinate(lane: int, register: int, byte: int) -> tuple[int, int]:
    """Return where a byte of the 8-bit operand A lies in its warp's 16 rows and 32 reduction columns (0x06).

    Registers a0 and a1 hold rows g and g + 8 of columns ``4t .. 4t+3``; a2 and a3 the same of columns 16 higher.

    Parameters
    ----------
    lane : int
        0 to 31.
    register : int
        0 to 3.
    byte : int
        0 to 3, least significant first.

    Returns
    -------
    tuple of int
        Row and column.

    Examples
    --------
    >>> [operand_a_coordinate(1, 0, byte)[1] for byte in range(4)]
    [4, 5, 6, 7]
    """
    check_range("operand A", 0, LANES - 1, lane=lane)
    check_range("operand A", 0, 3, register=register, byte=byte)
    g, t = divmod(lane, 4)
    return g + 8 * (register & 1), 16 * (register >> 1) + 4 * t + byte


def _key_order() -> Index:
    """Operand column ``4t + 2b + e`` holds key ``8b + 2t + e`` when a thread packs what it owns."""
    position = np.arange(16)
    t, b, e = position >> 2, (position >> 1) & 1, position & 1
    order: Index = 8 * b + 2 * t + e
    return order


KEY_ORDER: Index = _key_order()
"""Key that stands at each position of a group of 16 when P is packed in place; V must have its keys in this order."""

K_ROW_ORDER: Index = np.argsort(KEY_ORDER)
"""Key to put into each of 16 rows of K in shared memory, so that packing in place yields the natural key order."""

FEATURE_ORDER: Index = np.concatenate([np.arange(0, 16, 2), np.arange(1, 16, 2)])
"""Feature of V that stands in each of 16 rows of the transposed tile: even ones first."""


def ordered_keys(keys: int, order: Index = KEY_ORDER) -> Index:
    """Extend an order of 16 to `keys` columns: the paired permutation of ``P @ V = P[:, s] @ V[s, :]`` (0x06).

    Parameters
    ----------
    keys : int
        A multiple of 16.
    order : numpy.ndarray, optional
        A permutation of 0 .. 15.

    Returns
    -------
    numpy.ndarray
        Shape ``(keys,)``: ``s``.

    Raises
    ------
    ValueError
        If `keys` is no multiple of 16.

    Examples
    --------
    >>> ordered_keys(16).tolist()
    [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    """
    if keys < 0 or keys % 16:
        raise ValueError(f"fp8: {keys} keys are no multiple of 16")
    if not np.array_equal(np.sort(order, axis=None), np.arange(16)) or np.ndim(order) != 1:
        raise ContractViolation("fp8: order is no permutation of 0 .. 15")
    return (np.arange(0, keys, 16)[:, None] + order).ravel()


def pack_in_place(accumulator: Bytes) -> Bytes:
    """Turn the 16 probabilities that a thread owns in 32 columns into operand-A registers, without moving any (0x06).

    ``a0 = {S0 S1 S4 S5}, a1 = {S2 S3 S6 S7}, a2 = {S8 S9 S12 S13}, a3 = {S10 S11 S14 S15}``: FlashAttention-3 swaps
    the middle pairs (`permute_Cregs_fp8`) and reinterprets. The columns then come in the order of `KEY_ORDER`.

    Parameters
    ----------
    accumulator : numpy.ndarray
        uint8, shape ``(32 lanes, 16 registers)``: the accumulator, already rounded to FP8.

    Returns
    -------
    numpy.ndarray
        uint8, shape ``(32 lanes, 4 registers, 4 bytes)``.

    Examples
    --------
    >>> pack_in_place(np.tile(np.arange(16, dtype=np.uint8), (32, 1)))[0].tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    """
    check_shape("pack_in_place", (LANES, 16), accumulator=accumulator)
    pairs = accumulator.reshape(LANES, 2, 2, 2, 2)  # (lane, half of the columns, column group of 8, row, e)
    return pairs.swapaxes(2, 3).reshape(LANES, 4, 4)


def byte_perm(x: npt.ArrayLike, y: npt.ArrayLike, selector: int) -> npt.NDArray[np.uint32]:
    """Pick four of the eight bytes of two words, as ``prmt.b32`` (``__byte_perm``) does (0x06).

    Parameters
    ----------
    x, y : array_like of int
        Words; bytes 0 to 3 are those of `x`, 4 to 7 those of `y`, least significant first.
    selector : int
        Four nibbles; the lowest selects the lowest byte of the result. Values above 7 are not used here.

    Returns
    -------
    numpy.ndarray
        uint32.

    Examples
    --------
    >>> [hex(int(byte_perm(0x33221100, 0x77665544, s))) for s in (0x6420, 0x7531)]
    ['0x66442200', '0x77553311']
    """
    if selector & 0x8888 or selector >> 16:
        raise ValueError(f"fp8: selector {selector:#x} is not four digits of 0 to 7")
    if np.shape(x) != np.shape(y):
        raise ContractViolation(f"byte_perm: x {np.shape(x)} and y {np.shape(y)} must have one shape")
    both = np.asarray(x).astype(np.uint64) | (np.asarray(y).astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(both)
    for n in range(4):
        source = (selector >> (4 * n)) & 7
        result |= ((both >> np.uint64(8 * source)) & np.uint64(0xFF)) << np.uint64(8 * n)
    return result.astype(np.uint32)


def _words(register_bytes: Bytes) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(register_bytes).view("<u4")[..., 0].astype(np.uint32)


def shuffle_to_operand_a(accumulator: Bytes) -> Bytes:
    """Move bytes between the threads of each quad so that operand A has its keys in natural order (0x06).

    FlashAttention-3's way when V is already K-major (`permute_Aregs_fp8`): per 8 columns' worth of registers two
    shuffles with the lane maps ``{0, 3, 1, 2}`` and its neighbour ``^ 1``, and two byte permutations.

    Parameters
    ----------
    accumulator : numpy.ndarray
        uint8, shape ``(32 lanes, 16 registers)``.

    Returns
    -------
    numpy.ndarray
        uint8, shape ``(32 lanes, 4 registers, 4 bytes)``.
    """
    _check_bytes("shuffle_to_operand_a", (LANES, 16), accumulator=accumulator)
    words = _words(accumulator.reshape(LANES, 4, 4))  # consecutive registers, reinterpreted
    lane = np.arange(LANES)
    quad = lane % 4
    outer = (quad == 0) | (quad == 3)
    source = lane - quad + np.array([0, 3, 1, 2])[quad]
    result = np.empty_like(words)
    for pair in (0, 2):
        upper, lower = words[:, pair], words[:, pair + 1]
        first, second = np.where(outer, upper, lower), np.where(outer, lower, upper)
        first, second = first[source], second[source ^ 1]  # what the lanes receive
        result[:, pair] = np.where(outer, byte_perm(first, second, 0x5410), byte_perm(first, second, 0x1054))
        result[:, pair + 1] = np.where(outer, byte_perm(first, second, 0x7632), byte_perm(first, second, 0x3276))
    return result.astype("<u4").view(np.uint8).reshape(LANES, 4, 4)


def transpose_block(V: Bytes) -> Bytes:
    """Transpose a 16 x 16 piece of V as the producer warp does, permutations included (0x06).

    ``ldmatrix.x2.trans`` on 16-bit units: lane (g, t) gets units of column g from keys ``2t, 2t+1`` (first register)
    and ``8+2t, 9+2t`` (second); a unit is the features ``2g, 2g+1``. ``prmt`` 0x6420 gathers the even features, 0x7531
    the odd ones. ``stmatrix.x2`` stores lane (g, t)'s register as bytes ``4t .. 4t+3`` of row g.

    Parameters
    ----------
    V : numpy.ndarray
        uint8, shape ``(16 keys, 16 features)``.

    Returns
    -------
    numpy.ndarray
        uint8, shape ``(16, 16)``: ``result[n, p] = V[KEY_ORDER[p], FEATURE_ORDER[n]]``.

    Examples
    --------
    >>> V = np.arange(256, dtype=np.uint8).reshape(16, 16)
    >>> np.array_equal(transpose_block(V), V[KEY_ORDER][:, FEATURE_ORDER].T)
    True
    """
    _check_bytes("transpose_block", (16, 16), V=V)
    units = np.ascontiguousarray(V).view("<u2")  # (16 keys, 8 pairs of features)
    g, t = np.divmod(np.arange(LANES), 4)
    first, second = (
        units[base + 2 * t, g].astype(np.uint32) | (units[base + 2 * t + 1, g].astype(np.uint32) << np.uint32(16))
        for base in (0, 8)
    )
    result = np.empty((16, 16), np.uint8)
    for base, selector in ((0, 0x6420), (8, 0x7531)):
        stored = byte_perm(first, second, selector).astype("<u4").view(np.uint8).reshape(LANES, 4)
        result[base + g[:, None], 4 * t[:, None] + np.arange(4)] = stored
    return result


def transpose_tile(V: Bytes) -> Bytes:
    """Transpose a whole tile, 16 x 16 at a time (0x06).

    Parameters
    ----------
    V : numpy.ndarray
        uint8, shape ``(keys, features)``, both multiples of 16.

    Returns
    -------
    numpy.ndarray
        uint8, shape ``(features, keys)``: K-major for ``P @ V``.
    """
    _check_bytes("transpose_tile", ("keys", "features"), V=V)
    keys, features = V.shape
    if keys % 16 or features % 16:
        raise IllegalTransposeShape(f"fp8: a V tile of {keys} keys x {features} features; both must be multiples of 16")
    result = np.empty((features, keys), np.uint8)
    for key in range(0, keys, 16):
        for feature in range(0, features, 16):
            result[feature : feature + 16, key : key + 16] = transpose_block(V[key : key + 16, feature : feature + 16])
    return result


def transpose_shape(head_dim_v: int, tile_n: int) -> tuple[int, int]:
    """Return the block, features by keys, in which a tile of V is transposed.

    FlashAttention-3's templates ask for ``d_v % 32 == 0``, ``tile_n % 32 == 0`` and one of the two divisible by 64:
    64 x 32 if ``d_v`` is, else 32 x 64 (specification 0x06).

    Parameters
    ----------
    head_dim_v, tile_n : int
        Features and keys of the tile.

    Returns
    -------
    tuple of int
        Features and keys per block.

    Raises
    ------
    IllegalTransposeShape
        If the conditions fail.

    Examples
    --------
    >>> transpose_shape(128, 224), transpose_shape(96, 128)
    ((64, 32), (32, 64))
    """
    check_range("transpose_shape", 1, head_dim_v=head_dim_v, tile_n=tile_n)
    if head_dim_v % 32 or tile_n % 32 or (head_dim_v % 64 and tile_n % 64):
        raise IllegalTransposeShape(
            f"fp8: a V tile of {tile_n} keys x {head_dim_v} features; both must be multiples of 32 and one of 64"
        )
    return (64, 32) if head_dim_v % 64 == 0 else (32, 64)


def check_operand(gemm: str, operand: str, contiguous: str) -> None:
    """Raise unless an FP8 matrix instruction can read this operand from shared memory (0x06).

    Parameters
    ----------
    gemm : {"QK", "PV"}
        The first sums over features, the second over keys.
    operand : {"Q", "K", "V"}
        Which tensor.
    contiguous : {"features", "keys"}
        Its contiguous axis in shared memory. TMA can tile and swizzle it, but not exchange it.

    Raises
    ------
    NotKMajor
        If the contiguous axis is not the one that is summed over.

    Examples
    --------
    >>> check_operand("QK", "K", "features")
    >>> check_operand("PV", "V", "features")
    Traceback (most recent call last):
    cupyfa.oracles.fp8.layout.NotKMajor: ...
    """
    reduction = {("QK", "Q"): "features", ("QK", "K"): "features", ("PV", "V"): "keys"}.get((gemm, operand))
    if reduction is None or contiguous not in ("features", "keys"):
        raise ValueError(f"fp8: no operand {operand!r} of {gemm!r} that is contiguous along {contiguous!r}")
    if contiguous != reduction:
        raise NotKMajor(f"fp8: {operand} of {gemm} is contiguous along {contiguous}; FP8 WGMMA sums over {reduction}")
