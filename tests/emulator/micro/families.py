"""The list of families. A family is what one process runs on the GPU: an error there loses no other family."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from . import (
    approximate,
    atomics,
    bulk,
    control,
    convert,
    floats,
    integer,
    matrix,
    mbarrier,
    refused,
    tma_load,
    tma_store,
    warp,
    wgmma,
)
from .case import Case

FAMILIES: dict[str, Callable[[], list[Case]]] = {
    "wgmma_half": wgmma.half_cases,
    "wgmma_single": wgmma.single_cases,
    "wgmma_registers": wgmma.register_cases,
    "wgmma_fp8": wgmma.fp8_cases,
    "wgmma_special": wgmma.special_cases,
    "tma_load": tma_load.cases,
    "tma_store": tma_store.cases,
    "bulk": bulk.cases,
    "matrix": matrix.cases,
    "warp": warp.cases,
    "integer": integer.cases,
    "mbarrier": mbarrier.cases,
    "convert": convert.cases,
    "floats": floats.cases,
    "approximate": approximate.cases,
    "atomics": atomics.cases,
    "control": control.cases,
}
# Not compared with goldens as the others are.
APART: dict[str, Callable[[], list[Case]]] = {"refused": refused.cases}


@cache
def cases_of(family: str) -> list[Case]:
    """The cases of a family; the name of a case begins with its family's."""
    cases = {**FAMILIES, **APART}[family]()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), family
    return cases
