"""What there are kernels for, as a table that is made by asking for each."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.errors import UnsupportedError
from cupyfa.operand import Arrays, Operand
from cupyfa.options import check_options
from cupyfa.problem import Problem
from cupyfa.select import CANDIDATES, H200, Device, select

__all__ = ["support_table"]

_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_SEQLENS = (8192, 512)
_WINDOWS = ((4096, 0), (128, 0), (64, 64))
_BIASES = ("of float32", "as q", "gathered")  # the last is one of float32 that TMA does not take
#: Calls of each column; True stands for an array with a number for each head.
_COLUMNS: dict[str, list[dict[str, Any]]] = {
    "no mask, causal": [{}, {"causal": True}],
    "sink": [{"sink": True}, {"causal": True, "sink": True}],
    "window": [{"window_size": window} for window in _WINDOWS],
    "softcap": [{"softcap": 30.0}, {"causal": True, "softcap": 30.0}],
    "ALiBi": [{"alibi_slopes": True}, {"causal": True, "alibi_slopes": True}],
    "all of them": [
        {"window_size": window, "sink": True, "softcap": 30.0, "alibi_slopes": True} for window in _WINDOWS
    ],
}
_COLUMNS["bias, with any of them"] = [
    call | {"bias": bias} for calls in tuple(_COLUMNS.values()) for call in calls for bias in _BIASES
]
_OF_HEADS = {"sink", "alibi_slopes"}
_DEVICES = {
    "sm_90 (Hopper: H100, H200)": H200,
    "sm_100 (Blackwell: B200)": Device((10, 0), 148, 126 * 2**20),
    "sm_103 (Blackwell: B300)": Device((10, 3), 148, 126 * 2**20),
}


def support_table() -> str:
    """Return what is supported, as Markdown.

    Returns
    -------
    str
        A table with a row for each range of head_dim: for each option the tiles of its kernels, query rows by keys,
        those of long sequences first. Then a line for each GPU.

    Examples
    --------
    >>> print(support_table().splitlines()[6])
    | up to 256 | float16, bfloat16 | 128x64 | 128x64 | 128x64 | 128x64 | 128x64 | 128x64 | 128x48, 128x32 |
    """
    head = ("head_dim", "types", *_COLUMNS)
    lines = [_row(head), _row(["---"] * len(head))]
    for sizes in dict.fromkeys((row.head_dim, row.head_dim_v) for row in CANDIDATES):
        types = [dtype.name for dtype in _DTYPES if _tiles(H200, sizes, dtype, {})]
        cells = []
        for calls in _COLUMNS.values():
            found = [_tiles(H200, sizes, dtype, call) for dtype, call in itertools.product(_DTYPES, calls)]
            cells.append(", ".join(dict.fromkeys(itertools.chain(*found))) or "no")
        lines.append(_row([_name(*sizes), ", ".join(types), *cells]))
    lines.append("")
    for name, device in _DEVICES.items():
        lines.append(f"* {name}: {'yes' if _tiles(device, (128, 128), _DTYPES[0], {}) else 'not yet'}")
    return "\n".join(lines)


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _name(head_dim: int, head_dim_v: int) -> str:
    return f"up to {head_dim}" + (f", of v up to {head_dim_v}" if head_dim_v != head_dim else "")


def _tiles(device: Device, sizes: tuple[int, int], dtype: Any, call: dict[str, Any]) -> list[str]:
    """Return the tiles of a call for long and for short sequences; none where there is no kernel."""
    options = {name: value for name, value in call.items() if name not in _OF_HEADS | {"bias"}}
    tiles = []
    for seqlen in _SEQLENS:
        shapes = {"q": (1, seqlen, 8, sizes[0]), "k": (1, seqlen, 8, sizes[0]), "v": (1, seqlen, 8, sizes[1])}
        operands = {name: Operand.contiguous(name, shape, dtype, 0) for name, shape in shapes.items()}
        for name in _OF_HEADS & call.keys():
            operands[name] = Operand.contiguous(name, (8,), np.float32, 0)
        if "bias" in call:
            of_bias = dtype if call["bias"] == "as q" else np.float32
            bias = Operand.contiguous("bias", (seqlen, seqlen), of_bias, 0)
            operands["bias"] = dataclasses.replace(bias, aligned=call["bias"] != "gathered")
        try:
            checked = check_options(**options)
            problem = Problem.from_operands(Arrays(**operands), checked, want_lse=False, current_device=0)
            spec = select(problem, device).spec
        except UnsupportedError:
            continue
        tiles.append(f"{spec.tile_m}x{spec.tile_n}")
    return list(dict.fromkeys(tiles))
