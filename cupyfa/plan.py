"""From a problem and a kernel to a launch: grid, tensor maps and run-time parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyfa._launch import ForwardLauncher, Function, LaunchGeometry, TensorMapGeometry, TileCounters
from cupyfa.errors import UnsupportedError
from cupyfa.operand import Operand, rows_to_next, strides_or_zeros
from cupyfa.packing import packed_map, packed_tiles
from cupyfa.problem import Problem
from cupyfa.scales import Scales
from cupyfa.schedule import heads_per_section
from cupyfa.select import Device

__all__ = ["fill_without_keys", "plan_forward"]

_MAX_TILES = 2**31 - 1


def plan_forward(
    problem: Problem, traits: dict[str, int], function: Function, device: Device, counters: TileCounters | None = None
) -> ForwardLauncher:
    """Return a prepared launch of a forward kernel.

    Parameters
    ----------
    problem : Problem
        With no empty axis.
    traits : dict
        The kernel's traits.
    function : Function
        The kernel.
    device : Device
        The GPU.
    counters : TileCounters, optional
        Of the kernel, if its tiles are drawn.

    Returns
    -------
    ForwardLauncher
        Needs only addresses and a stream.
    """
    if not problem.planned:
        tiles_m = -(-problem.seqlen_q // traits["tile_m"])
        heads_total = problem.batch * problem.heads_q
    else:  # at most; the plan knows better
        tiles_m, heads_total = packed_tiles(problem, traits["tile_m"]), problem.heads_q
    tiles = heads_total * tiles_m
    if tiles > _MAX_TILES:
        raise UnsupportedError(
            f"attention: batch {problem.batch} * heads {problem.heads_q} * {tiles_m} query tiles are {tiles} tiles; "
            f"at most {_MAX_TILES} are supported: split the batch"
            if not problem.planned
            else f"attention: {problem.heads_q} heads * {tiles_m} query tiles are {tiles} tiles; at most {_MAX_TILES} "
            "are supported: split the batch"
        )
    diagonal = 0 if problem.planned else problem.seqlen_k - problem.seqlen_q
    q_step, o_step = (rows_to_next(x) or 0 if problem.used else 0 for x in (problem.q, problem.out))
    scales = Scales.of(problem.softmax_scale, problem.softcap)
    bias_rows, bias_keys = (0, 0) if problem.bias is None else problem.bias.shape[2:]
    cols = traits["box_cols"]
    return ForwardLauncher(
        function=function,
        geometry=LaunchGeometry(
            grid=min(tiles, device.multiprocessors) if traits["persistent"] else tiles,
            threads=traits["threads"],
            shared_bytes=traits["shared_bytes"],
            cluster_size=traits["cluster_size"],
            programmatic=problem.planned,  # it starts while its plan is being made
        ),
        q=_tensor_map(problem, problem.q, (cols, traits["tile_m"])),
        k=_tensor_map(problem, problem.k, (cols, traits["tile_n"])),
        v=_tensor_map(problem, problem.v, (cols, traits["tile_n"])),
        o=_tensor_map(problem, problem.out, (cols, traits["tile_m"])),
        bias=_bias_map(problem.bias, traits) if problem.bias is not None and traits["bias_box_cols"] else None,
        lse_strides=strides_or_zeros(problem.lse, 3),
        sink_stride=strides_or_zeros(problem.sink, 1)[0],
        alibi_strides=strides_or_zeros(problem.alibi_slopes, 2),
        bias_strides=strides_or_zeros(problem.bias, 4),
        bias_rows=bias_rows,
        bias_keys=bias_keys,
        **scales._asdict(),
        softcap=problem.softcap or 0.0,
        last_diagonal=0 if problem.right is None else diagonal + problem.right,
        first_diagonal=0 if problem.left is None else diagonal - problem.left,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        q_step=q_step,
        o_shift=o_step - q_step,
        heads_q=problem.heads_q,
        heads_per_kv=problem.heads_q // problem.heads_kv,
        heads_total=heads_total,
        tiles_m=tiles_m,
        tiles=tiles,
        heads_per_section=1 if problem.planned else heads_per_section(problem, traits, device),
        counters=counters,
    )


def fill_without_keys(out: Any, lse: Any, sink: Any) -> None:
    """Write the result of a problem that has no key, or no row.

    Parameters
    ----------
    out : array
        Becomes 0.
    lse : array or None
        (batch, heads_q, seqlen_q); becomes the sink of each head.
    sink : array or None
        (heads_q,); None: -inf.
    """
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf if sink is None else sink[:, None]


def _tensor_map(problem: Problem, operand: Operand, box: tuple[int, int]) -> TensorMapGeometry:
    if problem.planned:
        return packed_map(operand, problem.packed is not None, box)
    batch, seqlen, heads, head_dim = operand.shape
    to_batch, to_row, to_head, _ = operand.tma_strides
    return TensorMapGeometry(problem.dtype.value, (head_dim, seqlen, heads, batch), (to_row, to_head, to_batch), box)


def _bias_map(bias: Operand, traits: dict[str, int]) -> TensorMapGeometry:
    """Return the map of a bias: an axis along which it is the same for all has one index."""
    batch, heads, rows, _ = (size if stride else 1 for size, stride in zip(bias.shape, bias.strides, strict=True))
    strides = [stride or 16 for stride in bias.strides]
    return TensorMapGeometry(
        bias.dtype.name,
        (bias.shape[3], rows, heads, batch),
        (strides[2], strides[1], strides[0]),
        (traits["bias_box_cols"], traits["bias_box_rows"]),
        swizzle=traits["bias_swizzle"],
    )
