"""Copies that the H200 refuses: what it says about each is kept, and the emulator must report an error as well.

Each ends the process that runs it. An empty text means that the hardware did it all the same.
"""

from __future__ import annotations

from dataclasses import replace

from . import tma_load, tma_store
from .case import Case

FAMILY = "refused"
Row = tuple[int, ...]


def load(name: str, dtype: str, row: Row, *, at: int = 0, entry: str = "") -> Case:
    shape, box = (48, 11, 5)[: len(row)], (16, 4, 2)[: len(row)]
    case = tma_load.load_case(name, dtype, shape, box, rows=[row], at=(at,))
    return replace(case, name=f"{FAMILY}/{name}", entry=entry or case.entry)


def store(name: str, dtype: str, row: Row, *, at: int = 0, entry: str = "store_2d", number: str = "") -> Case:
    case = tma_store.case(name, entry, dtype, (48, 11), (16, 4), rows=[row], at=(at,), number=number)
    return replace(case, name=f"{FAMILY}/{name}")


def cases() -> list[Case]:
    return [
        load("inner_8_bytes", "bfloat16", (4, 1)),
        load("inner_4_bytes", "float32", (1, 1)),
        load("inner_1_byte", "uint8", (1,)),
        load("inner_negative", "uint16", (-4, 1)),
        load("inner_outside", "uint16", (-20, 1)),
        load("inner_3d", "float64", (1, 1, 1)),
        store("store_inner_8_bytes", "bfloat16", (4, 1)),
        store("store_inner_outside", "float32", (49, 1)),
        store("reduce_inner_4_bytes", "float32", (1, 1), entry="add_2d", number="f32"),
        store("store_negative_inner", "float32", (-4, 1)),
        store("store_negative_outer", "float32", (0, -1)),
        store("reduce_negative_outer", "float32", (0, -1), entry="add_2d", number="f32"),
        load("shared_64", "float32", (0, 1), at=64),
        load("shared_16", "float32", (0, 1), at=16),
        store("store_shared_64", "float32", (0, 1), at=64),
        store("store_shared_16", "float32", (0, 1), at=16),
        load("rank_2_of_3", "float32", (0, 1, 1), entry="load_2d"),
        load("rank_3_of_2", "float32", (0, 1), entry="load_3d"),
        store("reduction_of_bytes", "uint8", (0, 1), entry="add_2d"),
        store("reduction_of_doubles", "float64", (0, 1), entry="add_2d"),
        store("reduction_xor_floats", "float32", (0, 1), entry="xor_2d"),
        store("reduction_inc_signed", "int32", (0, 1), entry="inc_2d", number="<i4"),
        store("reduction_add_signed_64", "int64", (0, 1), entry="add_2d", number="<i8"),
    ]
