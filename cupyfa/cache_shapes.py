"""A call of attention over a cache by its shapes: which kernels it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyfa.cache_options import CacheArrays, check_cache_options
from cupyfa.cache_problem import CacheProblem
from cupyfa.decode_plan import decode_specs
from cupyfa.decode_select import decode_config, select_decode
from cupyfa.operand import Operand
from cupyfa.options import check_max_seqlen
from cupyfa.select import Device
from cupyfa.spec import Spec

__all__ = ["specs_of_cache_call"]

_MATRICES = ("q", "k_cache", "v_cache", "k", "v")
_ARGUMENTS = (*_MATRICES, "dtype", "page_table", "cache_batch_idx", "sequences", "sink", "alibi_slopes", "config")


def specs_of_cache_call(number: int, call: Mapping[str, Any], device: Device) -> tuple[Spec, ...]:
    """Return the kernels of a call.

    Parameters
    ----------
    number : int
        Of the call, for messages.
    call : Mapping
        As for :func:`cupyfa.warmup`.
    device : Device
        The GPU.

    Returns
    -------
    tuple of spec
        In the order in which they are launched.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As the call would.
    """
    for name in ("q", "k_cache", "dtype"):
        if name not in call:
            raise TypeError(f"warmup: call {number} has no {name}; it needs the shapes q and k_cache, and a dtype")
    try:
        options = check_cache_options(**{name: value for name, value in call.items() if name not in _ARGUMENTS})
    except TypeError as error:
        if str(error).startswith("attention: "):
            raise
        raise TypeError(f"warmup: call {number}: {error}") from None
    shapes = {name: call[name] for name in _MATRICES if call.get(name) is not None}
    shapes.setdefault("v_cache", shapes["k_cache"])
    if "k" in shapes:
        shapes.setdefault("v", (*shapes["k"][:-1], shapes["v_cache"][-1]))
    operands = {name: Operand.contiguous(name, tuple(shape), call["dtype"], 0) for name, shape in shapes.items()}
    sequences = check_max_seqlen("sequences", call.get("sequences"))
    batch = operands["q"].shape[0] if sequences is None else sequences

    def add(name: str, shape: tuple[int, ...], dtype: Any) -> None:
        operands[name] = Operand.contiguous(name, shape, dtype, 0)

    add("cache_seqlens", (batch,), np.int32)
    if sequences is not None:
        add("cu_seqlens_q", (batch + 1,), np.int32)
    if call.get("page_table") is not None:
        add("page_table", tuple(call["page_table"]), np.int32)
    if call.get("cache_batch_idx"):
        add("cache_batch_idx", (batch,), np.int32)
    for name in ("sink", "alibi_slopes"):
        if call.get(name):
            add(name, (operands["q"].shape[-2],), np.float32)
    problem = CacheProblem.of(CacheArrays(**operands), options, want_lse=False, current_device=0)
    return decode_specs(problem, select_decode(problem, device, decode_config(call.get("config"))))
