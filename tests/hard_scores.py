"""Scores that are hard on a softmax with a retained maximum: some never leave its range, some do in every block.

The range of a block's sums ends at 2**60 (bfloat16) or 2**15 (float16) times the weight of the reference. Kernels walk
the key blocks from the last to the first: "grow" means toward the first key.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["FINITE", "KINDS", "POISONED", "harden"]

FINITE = ("constant", "negative", "slow", "growing", "steps", "jumps", "huge")
POISONED = ("NaN in q", "inf in q", "NaN in k", "inf in k", "-inf in k")
KINDS = FINITE + POISONED


def harden(kind: str, q: Any, k: Any, *, block: int = 128) -> tuple[Any, Any]:
    """Change about normal NumPy arrays q and k, (batch, seqlen, heads, head_dim), into ones of a kind."""
    dtype, keys = q.dtype, k.shape[1]
    Q, K = q.astype(np.float32), k.astype(np.float32)
    from_the_end = np.arange(keys)[::-1][None, :, None, None]
    if kind == "constant":
        Q[...] = 0
    elif kind == "negative":
        Q, K = np.abs(Q), -np.abs(K)
    elif kind == "slow":  # by about 7 in base 2 over the whole row: the first reference lasts, in float16 as well
        Q, K = np.abs(Q), np.abs(K) * (1 + 0.7 * from_the_end / max(1, keys - 1))
    elif kind == "growing":
        K *= 1 + 40 * from_the_end / max(1, keys - 1)
    elif kind == "steps":  # by more than 60 in base 2 from block to block, in every row: no reference lasts
        Q, K = np.abs(Q), np.abs(K) * (1 + 12 * (from_the_end // block))
    elif kind == "jumps":
        K[:, np.random.default_rng(7).permutation(keys)[: keys // 3]] *= 30
    elif kind == "huge":
        Q *= 50
    elif kind in POISONED:
        value, _, array = kind.split()
        x = Q if array == "q" else K
        x[0, x.shape[1] // 2, 0, 3] = float(value)
    else:
        raise ValueError(f"hard scores: kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    return Q.astype(dtype), K.astype(dtype)
