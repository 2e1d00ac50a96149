"""Deterministic inputs: a hash of a counter, and small integers in every number format."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

# Bytes of -4 ... 4: e4m3 has the bias 7 and three bits of mantissa, e5m2 the bias 15 and two.
E4M3 = np.array([0xC8, 0xC4, 0xC0, 0xB8, 0x00, 0x38, 0x40, 0x44, 0x48], np.uint8)
E5M2 = np.array([0xC4, 0xC2, 0xC0, 0xBC, 0x00, 0x3C, 0x40, 0x42, 0x44], np.uint8)


def words(seed: int, count: int) -> U32:
    """Random 32-bit words: the finaliser of MurmurHash3 over a Weyl sequence."""
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed * 0x85EBCA6B & 0xFFFFFFFF)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        x ^= x >> np.uint32(16)
    return x


def integers(seed: int, count: int, low: int = -4, high: int = 4) -> npt.NDArray[np.int64]:
    return low + (words(seed, count) % np.uint32(high - low + 1)).astype(np.int64)


def encode(values: npt.NDArray[np.int64], dtype: str) -> npt.NDArray[np.generic]:
    """Integers in a format; those of 8 bits take -4 ... 4 only. bfloat16 comes as uint16."""
    match dtype:
        case "e4m3":
            return E4M3[values + 4]
        case "e5m2":
            return E5M2[values + 4]
        case "bfloat16" | "bf16":
            return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        case "f16":
            return values.astype(np.float16)
        case "f32":
            return values.astype(np.float32)
    return values.astype(dtype)


def small(seed: int, count: int, dtype: str, low: int = -4, high: int = 4) -> npt.NDArray[np.generic]:
    """Random small integers in a format."""
    return encode(integers(seed, count, low, high), dtype)
