"""The values of lengths that are arrays: only the device has them, unless somebody waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyfa.problem import Problem

__all__ = ["check_lengths"]


def check_lengths(lengths: dict[str, Any], problem: Problem) -> None:
    """Check the values of the lengths of sequences, on the host.

    Parameters
    ----------
    lengths : dict
        cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k: NumPy arrays, or None. Without packed sequences, only the
        last two matter.
    problem : Problem
        Planned.

    Raises
    ------
    ValueError
        Naming the array and the index.
    """
    of_bias = (0, 0) if problem.bias is None else problem.bias.shape[2:]
    sides = (("q", problem.seqlen_q, "rows"), ("k", problem.seqlen_k, "keys"))
    for (side, total, rows), most in zip(sides, of_bias, strict=True):
        name, used_name = f"cu_seqlens_{side}", f"seqused_{side}"
        used = lengths[used_name]
        if problem.packed is None:
            offsets, end = np.arange(problem.batch + 1, dtype=np.int64) * total, problem.batch * total
        else:
            offsets, end = lengths[name].astype(np.int64), total
        sizes = np.diff(offsets)
        for i in np.flatnonzero(sizes < 0)[:1]:
            raise ValueError(f"attention: {name}[{i + 1}] is {offsets[i + 1]}, less than {name}[{i}], {offsets[i]}")
        for i in np.flatnonzero((offsets < 0) | (offsets > end))[:1]:
            raise ValueError(f"attention: {name}[{i}] is {offsets[i]}; it must be from 0 to the {total} rows of {side}")
        if used is not None:
            for i in np.flatnonzero((used < 0) | (used > sizes))[:1]:
                raise ValueError(
                    f"attention: {used_name}[{i}] is {used[i]}; it must be from 0 to {sizes[i]}, the rows of the "
                    "sequence"
                )
        lengths_used = sizes if used is None else used
        if problem.bias is not None and lengths_used.max(initial=0) > most:
            i = lengths_used.argmax()
            raise ValueError(
                f"attention: bias has {most} {rows} but sequence {i} has {lengths_used[i]}; it must have 1, or as many "
                "as the longest sequence"
            )
