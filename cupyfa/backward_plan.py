"""From a problem of gradients and its kernels to launches: grids, tensor maps, workspace and run-time parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from cupyfa._backward import BackwardPacking, PostprocessPacking, PreprocessPacking, SinkPacking
from cupyfa._launch import LaunchGeometry, TensorMapGeometry
from cupyfa.backward_bias import bias_copy, bias_gradient, bias_gradient_ctas, bias_map, bias_strides
from cupyfa.backward_launches import MAPPED, BackwardPlan, BiasGradient, Maps, Place, Rounding
from cupyfa.backward_problem import BackwardProblem
from cupyfa.backward_select import BackwardSelection, bias_gradient_spec
from cupyfa.copies import Copy, copies_of
from cupyfa.errors import UnsupportedError
from cupyfa.operand import Layout, Operand, row_strides, strides_or_zeros
from cupyfa.packing import UNBOUNDED, Packing, packed_map
from cupyfa.select import Device
from cupyfa.spec import Bias, BiasGradientSpec, BwdSpec, PlanSpec, PostprocessSpec, PreprocessSpec, SinkSpec, Spec

__all__ = ["backward_specs", "plan_backward", "plan_with_copies"]

_LOG2_E = math.log2(math.e)
_MOST_CTAS = 2**31 - 1
_MOST_ROWS = 2**31 - 1  # of a head, filled up to tiles
_SPACING = 256  # bytes; parts of the workspace begin at multiples of it
_GRADIENT_ROWS = 64  # a warpgroup stores its own rows
_SMALLEST_PART = 64 * 32  # of a dQ that waits for its turn: elements (the kernel checks that it has no smaller ones)


class _Workspace:
    """Parts one behind the other."""

    def __init__(self, begin: int) -> None:
        self.bytes = begin

    def take(self, size: int) -> Place:
        begin = -(-self.bytes // _SPACING) * _SPACING
        self.bytes = begin + size
        return Place(begin, size)


def backward_specs(problem: BackwardProblem, selection: BackwardSelection) -> tuple[Spec, ...]:
    """Return the kernels of a problem, in the order in which they are launched.

    Parameters
    ----------
    problem : BackwardProblem
        The problem.
    selection : BackwardSelection
        Its main kernel.

    Returns
    -------
    tuple of spec
        Three to seven.
    """
    spec = selection.spec
    planning = (PlanSpec(),) if spec.varlen else ()
    rounded = [PostprocessSpec(dtype=spec.dtype, head_dim=spec.head_dim, tile_m=spec.tile_m)]
    if selection.parts > 1:
        rounded += [
            PostprocessSpec(dtype=spec.dtype, head_dim=head_dim, tile_m=spec.tile_n)
            for head_dim in (spec.head_dim, spec.head_dim_v)
        ]
    sink = () if problem.dsink is None else (SinkSpec(),)
    bias = () if problem.dbias is None else (bias_gradient_spec(spec),)
    return (*planning, PreprocessSpec(spec.dtype), spec, *rounded, *sink, *bias)


def plan_backward(
    problem: BackwardProblem,
    selection: BackwardSelection,
    traits: Callable[[Spec], dict[str, int]],
    device: Device,
    mapped: Mapping[str, Operand],
    begin: int = 0,
) -> BackwardPlan:
    """Return the prepared launches of a problem.

    Parameters
    ----------
    problem : BackwardProblem
        With no empty axis.
    selection : BackwardSelection
        Its kernel.
    traits : callable
        ``traits(spec)`` returns those of a kernel.
    device : Device
        The GPU.
    mapped : Mapping
        Operands of the matrices that TMA takes, by name: the user's, or copies of them; none of what threads write.
    begin : int
        How much of the workspace is in use already.

    Returns
    -------
    BackwardPlan
        Needs only addresses.

    Raises
    ------
    UnsupportedError
        The problem needs more CTAs than a grid has.
    """
    forward, spec = problem.forward, selection.spec
    planning = _planning(problem, spec, device) if spec.varlen else None
    batch = 1 if planning else forward.batch  # of the arrays
    tiles_m, tiles_n = -(-forward.seqlen_q // spec.tile_m), -(-forward.seqlen_k // spec.tile_n)
    if planning is not None:  # at most
        tiles_m, tiles_n = forward.seqlen_q // spec.tile_m + forward.batch + 2, planning.most_tiles
    rows, heads = tiles_m * spec.tile_m, batch * forward.heads_q
    parts = selection.parts
    specs = backward_specs(problem, selection)
    of_kernel = [traits(x) for x in specs]
    (preprocess_tile,) = (x["tile_m"] for x, of in zip(of_kernel, specs, strict=True) if isinstance(of, PreprocessSpec))
    preprocess_ctas = -(-rows // preprocess_tile)
    key_tiles = batch * forward.heads_kv * tiles_n
    grids = [1] * (planning is not None) + [heads * preprocess_ctas, key_tiles * parts, heads * tiles_m]
    grids += [key_tiles] * (2 if parts > 1 else 0) + [forward.heads_q] * (problem.dsink is not None)
    if problem.dbias is not None:
        grids.append(bias_gradient_ctas(problem.dbias, BiasGradientSpec.tile_m, BiasGradientSpec.tile_n))
    if rows > _MOST_ROWS:
        raise UnsupportedError(
            f"attention: {forward.batch} packed sequences of {forward.seqlen_q} rows are {rows} rows in tiles of their "
            f"own; at most {_MOST_ROWS} are supported: make several calls"
        )
    if max(grids) > _MOST_CTAS:
        raise UnsupportedError(
            f"attention: batch {forward.batch} with {forward.heads_q} heads, seqlen_q {forward.seqlen_q} and seqlen_k "
            f"{forward.seqlen_k} makes {max(grids)} CTAs; at most {_MOST_CTAS} are supported: split the batch"
        )
    geometries = tuple(
        LaunchGeometry(
            grid=grid, threads=kernel["threads"], shared_bytes=kernel["shared_bytes"], programmatic=number > 0
        )
        for number, (grid, kernel) in enumerate(zip(grids, of_kernel, strict=True))
    )
    workspace = _Workspace(begin)
    plan = None if planning is None else workspace.take(planning.plan_bytes)
    turns_head = rows * spec.head_dim // _SMALLEST_PART
    lse_log2, delta = workspace.take(4 * heads * rows), workspace.take(4 * heads * rows)
    roundings = [_rounding(problem.dq, tiles_m, spec.head_dim, spec.tile_m, 1, forward.softmax_scale, workspace)]
    if parts > 1:
        for gradient, head_dim, factor in (
            (problem.dk, spec.head_dim, forward.softmax_scale),
            (problem.dv, spec.head_dim_v, 1.0),
        ):
            roundings.append(_rounding(gradient, tiles_n, head_dim, spec.tile_n, parts, factor, workspace))
    bias_rows = workspace.take(4 * heads * rows) if spec.bias is Bias.COLUMN else None
    turns = workspace.take(4 * heads * turns_head) if spec.deterministic else None
    dsink = None if problem.dsink is None else workspace.take(4 * heads * preprocess_ctas)
    per_section = _heads_per_section(spec, tiles_n, batch * forward.heads_kv * parts, device)
    return BackwardPlan(
        specs=specs,
        geometries=geometries,
        planning=planning,
        preprocess=PreprocessPacking(
            out_strides=forward.out.element_strides,
            dout_strides=problem.dout.element_strides,
            lse_strides=row_strides(forward.lse),
            dlse_strides=row_strides(problem.dlse),
            bias_strides=bias_strides(forward.bias),
            sink_stride=strides_or_zeros(forward.sink, 1)[0],
            dq_head=rows * spec.head_dim,
            turns_head=turns_head,
            tile_m=spec.tile_m,
            lse_factor=_LOG2_E if forward.bias is None else 1.0,
            bias_float32=spec.bias_float32,
            seqlen_q=forward.seqlen_q,
            rows=rows,
            head_dim_v=forward.head_dim_v,
            heads_q=forward.heads_q,
        ),
        backward=_scores(problem, spec, (tiles_m, tiles_n), selection.heads_per_part, parts, per_section),
        roundings=tuple(roundings),
        sink=None
        if problem.dsink is None
        else SinkPacking(dsink_stride=problem.dsink.element_strides[0], batch=batch, parts_head=preprocess_ctas),
        dbias=None
        if problem.dbias is None
        else _bias_gradient(problem, problem.dbias, bias_gradient_spec(spec), rows, mapped),
        maps=_maps(mapped, spec),
        row_vectors=forward.out.has_vectors and problem.dout.has_vectors,
        plan=plan,
        lse_log2=lse_log2,
        delta=delta,
        bias_rows=bias_rows,
        turns=turns,
        dsink=dsink,
        workspace_bytes=workspace.bytes,
    )


def _scores(
    problem: BackwardProblem,
    spec: BwdSpec | BiasGradientSpec,
    tiles: tuple[int, int],
    heads_per_part: int,
    parts: int,
    heads_per_section: int,
) -> BackwardPacking:
    """Return what a kernel has to know of scores and of its tiles. `tiles`: of queries and of keys, of a head."""
    forward = problem.forward
    scale, cap = forward.softmax_scale, forward.softcap
    slope_batch, slope_head = strides_or_zeros(forward.alibi_slopes, 2)
    diagonal = 0 if forward.packed is not None else forward.seqlen_k - forward.seqlen_q
    logit_scale = scale if cap is None else 2 * cap
    return BackwardPacking(
        alibi_stride_batch=slope_batch,
        alibi_stride_head=slope_head,
        bias_strides=bias_strides(forward.bias),
        scale_log2=logit_scale * _LOG2_E,
        scale=scale,
        softcap_slope=0.0 if cap is None else 2 * _LOG2_E * scale / cap,
        softcap_log2=(cap or 0.0) * _LOG2_E,
        logit_scale=logit_scale,
        softcap=cap or 0.0,
        seqlen_q=forward.seqlen_q,
        seqlen_k=forward.seqlen_k,
        last_diagonal=0 if forward.right is None else diagonal + forward.right,
        first_diagonal=0 if forward.left is None else diagonal - forward.left,
        heads_q=forward.heads_q,
        heads_kv=forward.heads_kv,
        heads_per_part=heads_per_part,
        parts=parts,
        tiles_m=tiles[0],
        tiles_n=tiles[1],
        heads_per_section=heads_per_section,
    )


def _bias_gradient(
    problem: BackwardProblem, dbias: Operand, spec: BiasGradientSpec, rows: int, mapped: Mapping[str, Operand]
) -> BiasGradient:
    read = {name: x for name, x in mapped.items() if name not in ("dk", "dv")}
    packing = bias_gradient(dbias, problem.forward.batch)
    tiles = rows // spec.tile_m, -(-problem.forward.seqlen_k // spec.tile_n)
    return BiasGradient(_scores(problem, spec, tiles, 1, 1, 1), _maps(read, spec), packing)


def plan_with_copies(
    problem: BackwardProblem,
    selection: BackwardSelection,
    traits: Callable[[Spec], dict[str, int]],
    device: Device,
    layout: Layout,
    unaligned: Collection[str],
) -> tuple[BackwardPlan, tuple[Copy, ...]]:
    """Return the prepared launches of a problem, and the copies of what TMA cannot take, before their workspace.

    Parameters
    ----------
    problem, selection, traits, device
        As for `plan_backward`.
    layout : {"BSHD", "BHSD"}
        Of the user's arrays.
    unaligned : collection of str
        The matrices that TMA cannot take for their addresses.

    Returns
    -------
    tuple
        The plan, and the copies: almost always none, and none of what threads write.
    """
    by_threads = ("dk", "dv") if selection.parts > 1 else ()  # from sums, as dq: a copy would be written over them
    given = problem.operands.given()
    matrices = {name: given[name] for name in given if name in MAPPED and name not in (*by_threads, "bias")}
    copies = copies_of(problem.forward, matrices.values(), layout, unaligned, 0)
    if (of_bias := bias_copy(problem, copies[-1].end if copies else 0)) is not None:
        copies = (*copies, of_bias)
    if problem.bias_kind is Bias.TILE:
        matrices["bias"] = given["bias"]
    mapped = {**matrices, **{copy.name: copy.operand for copy in copies}}
    begin = copies[-1].end if copies else 0
    return plan_backward(problem, selection, traits, device, mapped, begin), copies


def _planning(problem: BackwardProblem, spec: BwdSpec, device: Device) -> Packing:
    """Return what the plan of packed sequences depends on: it lists key tiles, so queries and keys change places."""
    forward = problem.forward
    group = forward.heads_q // forward.heads_kv
    bytes_of_row = 2 * (spec.head_dim + spec.head_dim_v) + 4 * spec.head_dim  # of Q, dO and the sum of dQ
    return Packing(
        sequences=forward.batch,
        rows_q=0,
        rows_k=0,
        q_step=0,
        k_step=0,
        total_q=forward.seqlen_k,
        total_k=forward.seqlen_q,
        tile_m=spec.tile_n,
        tile_n=spec.tile_m,
        window=int(min(forward.window, UNBOUNDED)),
        heads_q=forward.heads_kv,
        heads_per_kv=1,
        keys_in_l2=device.l2_bytes // 2 // (group * bytes_of_row),
        multiprocessors=device.multiprocessors,
        tiles_grow=spec.causal and not spec.window,
        longest_first=True,
    )


def _rounding(
    gradient: Operand, tiles: int, head_dim: int, tile: int, parts: int, scale: float, workspace: _Workspace
) -> Rounding:
    """Take room for the sums of a gradient, in tiles of rows with a padded head_dim, and say what becomes of them."""
    batch, seqlen, heads, columns = gradient.shape
    part = batch * heads * tiles * tile * head_dim
    packing = PostprocessPacking(
        out_strides=gradient.element_strides,
        scale=scale,
        parts=parts,
        part_stride=part,
        seqlen=seqlen,
        head_dim=columns,
        heads=heads,
        tiles=tiles,
    )
    return Rounding(gradient.name, packing, workspace.take(4 * parts * part), gradient.has_vectors)


def _heads_per_section(spec: BwdSpec, tiles_n: int, heads: int, device: Device) -> int:
    """Return how many key/value heads are side by side: where tiles differ in length, as many as fill the GPU once."""
    if not spec.causal or spec.window:
        return 1
    return max(1, min(heads, device.multiprocessors // tiles_n))


def _maps(mapped: Mapping[str, Operand], spec: BwdSpec | BiasGradientSpec) -> Maps:
    return tuple(_tensor_map(mapped[name], spec, name) if name in mapped else None for name in MAPPED)


def _tensor_map(matrix: Operand, spec: BwdSpec | BiasGradientSpec, name: str) -> TensorMapGeometry:
    if name == "bias":
        return bias_map(matrix, spec.tile_m)
    batch, seqlen, heads, head_dim = matrix.shape
    rows = {"q": spec.tile_m, "dout": spec.tile_m, "k": spec.tile_n, "v": spec.tile_n}.get(name, _GRADIENT_ROWS)
    if isinstance(spec, BwdSpec) and spec.varlen:
        return packed_map(matrix, True, (64, rows))
    to_batch, to_row, to_head, _ = matrix.tma_strides
    return TensorMapGeometry(
        spec.dtype.value, (head_dim, seqlen, heads, batch), (to_row, to_head, to_batch), (64, rows)
    )
