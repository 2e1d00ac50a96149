"""Hold the outputs of a random problem to the oracles, special values included."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyfa.oracles import dense
from cupyfa.oracles.mask import block_range, visible
from cupyfa.testing import assert_close, assert_lse_close, score_magnitude


def compare(
    q: Any, k: Any, v: Any, out: Any, lse: Any, *, options: dict[str, Any], tile: tuple[int, int] | None = None
) -> None:
    """Raise AssertionError unless out and lse (or None) are right.

    `tile` is the kernel's: a value that is NaN or infinite may reach all rows with a key of the tiles that visit its
    block (0 * NaN). Without a tile it may reach none but those that see it.
    """
    with np.errstate(all="ignore"):
        specials = np.argwhere(~np.isfinite(v.astype(np.float32)))
        if len(specials):
            v = v.copy()
            v[tuple(specials.T)] = 0
        reference, reference_lse = dense.attention(q, k, v, **options)
        plain, _ = dense.same_precision(q, k, v, **options)
        if len(specials):
            must, may = _reached(specials, out.shape, k.shape, tile, options["causal"], options["window_size"])
            blind = _blinded(options.get("bias"), out.shape, k.shape, options["causal"], options["window_size"])
            must, may = must & ~blind, may | (must & blind)
            special = ~np.isfinite(out.astype(np.float32))
            assert special[must].all(), f"out is finite at {np.argwhere(must & ~special)[0]}, where it sees no number"
            out = np.where(must | (may & special), reference.astype(out.dtype), out)
        assert_close(out, reference, plain, row_factor=row_factor(v))
        if lse is not None:
            # Products in an order of their own need not add up as random ones do: each step of 16 may err.
            steps = -(-q.shape[-1] // 16)
            magnitude = score_magnitude(q, k, options["softmax_scale"], options["softcap"]) * max(1.0, steps / 4)
            if "bias" in options:
                bias = options["bias"].astype(np.float64)
                magnitude = magnitude + np.abs(bias[np.isfinite(bias)]).max(initial=0)
            assert_lse_close(lse, reference_lse, score_magnitude=magnitude)


def row_factor(v: Any) -> float | None:
    """How far beyond the same precision's largest error in a row another one may be; None where that says too little.

    Columns that a stride of 0 makes equal have one error between them.
    """
    columns = len(np.unique(v.reshape(-1, v.shape[-1]).astype(np.float32), axis=1).T)
    return 2.0 if columns >= 32 else 4.0 if columns >= 16 else None


def _blinded(bias: Any, out_shape: tuple[int, ...], k_shape: tuple[int, ...], causal: bool, window_size: Any) -> Any:
    """Which rows have all keys hidden by a bias of -inf; they are 0, or 0 * NaN where they see one of those values."""
    (batch, seqlen_q, heads_q, _), seqlen_k = out_shape, k_shape[1]
    if bias is None:
        return np.False_
    seen = visible(seqlen_q, seqlen_k, causal, window_size=window_size)
    shown = np.broadcast_to(~np.isneginf(bias.astype(np.float32)), (batch, heads_q, seqlen_q, seqlen_k))
    return ~(shown & seen).any(axis=-1).transpose(0, 2, 1)[..., None]


def _reached(
    specials: Any,
    out_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    tile: tuple[int, int] | None,
    causal: bool,
    window_size: Any,
) -> tuple[Any, Any]:
    """Which outputs special values must reach, and which they may."""
    (batch, seqlen_q, heads_q, columns), (_, seqlen_k, heads_kv, _) = out_shape, k_shape
    seen = visible(seqlen_q, seqlen_k, causal, window_size=window_size)
    visited = np.zeros_like(seen)
    if tile is not None:
        tile_m, tile_n = tile
        for row in range(0, seqlen_q, tile_m):
            blocks = block_range(row, row + tile_m, seqlen_q, seqlen_k, tile_n, causal, window_size)
            visited[row : row + tile_m, blocks.first * tile_n : blocks.end * tile_n] = True
        visited &= seen.any(axis=1, keepdims=True)
    reached = []
    for rows in (seen, visited):
        found = np.zeros((batch, seqlen_q, heads_kv, columns), np.bool_)
        for b, key, head, column in specials:
            found[b, :, head, column] |= rows[:, key]
        reached.append(np.repeat(found, heads_q // heads_kv, axis=2))
    return reached[0], reached[1]
