"""Tensor maps of the emulator.

The driver's 128 bytes are opaque and cannot be made without a driver. The emulator's have the same size and alignment
and hold the same fields in the clear (``core/tensormap.hpp``), so that parameters are packed by the same code.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from cupyfa.emulator.arguments import integer

__all__ = ["ELEMENT_TYPES", "encode", "extent"]

#: CUtensorMapDataType: name -> (number, bytes).
ELEMENT_TYPES = {
    "uint8": (0, 1),
    "uint16": (1, 2),
    "uint32": (2, 4),
    "int32": (3, 4),
    "uint64": (4, 8),
    "int64": (5, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
}
_MAGIC = 0x4D545543
_FILLS = {"zero": 0, "nan": 1}


def extent(*, dtype: str, shape: Sequence[int], strides: Sequence[int], **_: Any) -> int:
    """Return the bytes from a tensor's address to the end of its last element, by the fields of :func:`encode`.

    Addresses are added modulo 2^64: that is how a dimension can count backwards.
    """
    rows = sum((n - 1) * stride for n, stride in zip(shape[1:], strides, strict=True))
    return (rows + shape[0] * ELEMENT_TYPES[dtype][1]) % 2**64


def encode(
    address: int,
    *,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    swizzle: int = 128,
    fill: str = "zero",
) -> bytes:
    """Return the 128 bytes of a tiled tensor map, after the checks that the driver makes.

    Parameters
    ----------
    address : int
        Of the tensor in global memory, 16-byte aligned.
    dtype : str
        Element type, a key of :data:`ELEMENT_TYPES`.
    shape, box : sequence of int
        Elements of the tensor and of one copy, innermost first, 1 to 5 dimensions.
    strides : sequence of int
        Bytes from one index to the next along the dimensions 1 and up, multiples of 16.
    element_strides : sequence of int, optional
        Traversal strides, 1 to 8; all 1 by default.
    swizzle : {0, 32, 64, 128}
        Bytes of the swizzle span. Rows of a box begin at its multiples, also where they are narrower.
    fill : {"zero", "nan"}
        What elements outside the tensor read as.

    Returns
    -------
    bytes
        The map.
    """
    for what, values in (
        ("shape", shape),
        ("strides", strides),
        ("box", box),
        ("element_strides", element_strides or ()),
    ):
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise TypeError(f"tensor map: {what} is a {type(values).__name__}; it must be a sequence of int")
        for value in values:
            integer(value, f"tensor map: an entry of {what}")
    rank = len(shape)
    steps = [1] * rank if element_strides is None else list(element_strides)

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"tensor map: {what}")

    need(dtype in ELEMENT_TYPES, f"dtype is {dtype!r}; it must be one of {', '.join(ELEMENT_TYPES)}")
    number, size = ELEMENT_TYPES[dtype]
    need(1 <= rank <= 5, f"shape has {rank} dimensions; there must be 1 to 5")
    need(len(strides) == rank - 1, f"{len(strides)} strides for {rank} dimensions; there must be {rank - 1}")
    need(len(box) == rank and len(steps) == rank, f"box and element_strides must have {rank} entries")
    need(integer(address, "tensor map: address") % 16 == 0, f"address {address:#x} is not a multiple of 16")
    need(0 <= address < 1 << 64, f"address {address:#x} is not a 64-bit address")
    need(all(1 <= n <= 1 << 32 for n in shape), f"shape {tuple(shape)}: every size must be 1 to 2^32")
    need(all(n % 16 == 0 and 0 <= n < 1 << 40 for n in strides), f"strides {tuple(strides)} are not multiples of 16")
    need(all(1 <= n <= 256 for n in box), f"box {tuple(box)}: every size must be 1 to 256")
    need(all(1 <= n <= 8 for n in steps), f"element_strides {tuple(steps)} must be 1 to 8")
    need(swizzle in (0, 32, 64, 128), f"swizzle is {swizzle}; it must be 0, 32, 64 or 128")
    need(box[0] * size % 16 == 0, f"the inner box has {box[0] * size} bytes; it must be a multiple of 16")
    need(
        not swizzle or box[0] * size <= swizzle, f"the inner box has {box[0] * size} bytes, the swizzle spans {swizzle}"
    )
    need(fill in _FILLS, f"fill is {fill!r}; it must be 'zero' or 'nan'")
    need(fill == "zero" or "float" in dtype, f"NaN fill needs a floating-point dtype, not {dtype}")

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[1] * (count - len(values))]

    return struct.pack(
        "<IBBBBQ5Q4Q5I5I",
        _MAGIC,
        number,
        rank,
        swizzle,
        _FILLS[fill],
        address,
        *padded(shape, 5),
        *padded(strides, 4),
        *padded(box, 5),
        *padded(steps, 5),
    )
