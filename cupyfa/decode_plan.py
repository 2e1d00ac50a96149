"""From a cache problem and its kernels to launches: grids, tensor maps and run-time parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from cupyfa._decode import AppendPacking, CacheGeometry, CombinePacking, DecodePacking
from cupyfa._launch import LaunchGeometry, TensorMapGeometry
from cupyfa.cache_options import CacheArrays
from cupyfa.cache_problem import CacheProblem
from cupyfa.decode_select import DecodeSelection
from cupyfa.errors import UnsupportedError
from cupyfa.operand import Operand, row_strides, strides_or_zeros
from cupyfa.scales import Scales
from cupyfa.spec import AppendSpec, CombineSpec, Spec

__all__ = ["DecodePlan", "Step", "decode_specs", "plan_decode"]

_BLOCK = 64
_COLUMNS = 64  # of a box: 128 bytes
_MOST_CTAS = 2**31 - 1
_UNBOUNDED = 2**31 - 1  # side of a window: beyond every key


def decode_specs(problem: CacheProblem, selection: DecodeSelection) -> tuple[Spec, ...]:
    """Return the kernels of a problem, in the order in which they are launched.

    Parameters
    ----------
    problem : CacheProblem
        The problem.
    selection : DecodeSelection
        Its kernel.

    Returns
    -------
    tuple of spec
        One to three.
    """
    append = (AppendSpec(problem.dtype),) if problem.seqlen_new else ()
    combine = (CombineSpec(problem.dtype),) if selection.parts else ()
    return (*append, selection.spec, *combine)


@dataclasses.dataclass(frozen=True)
class Step:
    """A launch of one kernel: only addresses are missing.

    Attributes
    ----------
    spec : Spec
        The kernel.
    geometry : LaunchGeometry
        Grid, block and attributes.
    packing : AppendPacking, DecodePacking or CombinePacking
        Its parameters.
    """

    spec: Spec
    geometry: LaunchGeometry
    packing: AppendPacking | DecodePacking | CombinePacking


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """All launches of a call.

    Attributes
    ----------
    steps : tuple of Step
        In their order.
    k, v : TensorMapGeometry
        Of the caches.
    partial_out_bytes, workspace_bytes : int
        Of the outputs of splits, and with their logarithms.
    """

    steps: tuple[Step, ...]
    k: TensorMapGeometry
    v: TensorMapGeometry
    partial_out_bytes: int
    workspace_bytes: int

    def pack(
        self, encode: Callable[[TensorMapGeometry, int], bytes], at: CacheArrays[int], length: int, workspace: int
    ) -> list[bytes]:
        """Return the parameters of each step.

        Parameters
        ----------
        encode : callable
            ``encode(geometry, address)`` returns the 128 bytes of a tensor map.
        at : CacheArrays of int
            Addresses; None or 0 for an array that there is not.
        length : int
            Keys of every sequence, where there is no `cache_seqlens`.
        workspace : int
            Address of the memory for partial results; 0: none.

        Returns
        -------
        list of bytes
            Packed structs.
        """
        places = (
            at.cache_seqlens or 0, at.page_table or 0, at.cache_batch_idx or 0, at.rotary_cos or 0, at.rotary_sin or 0,
            length,
        )  # fmt: skip
        parts = (workspace, workspace + self.partial_out_bytes) if workspace else (0, 0)
        lse, offsets, sink = at.lse or 0, at.cu_seqlens_q or 0, at.sink or 0
        packed = []
        for step in self.steps:
            packing = step.packing
            if isinstance(packing, DecodePacking):
                addresses = (at.q, at.out or 0, lse, *parts, offsets, sink, at.alibi_slopes or 0)
                packed.append(packing.pack(encode(self.k, at.k_cache), encode(self.v, at.v_cache), places, addresses))
            elif isinstance(packing, AppendPacking):
                packed.append(packing.pack(places, (at.k or 0, at.v or 0, at.k_cache, at.v_cache)))
            else:
                packed.append(packing.pack((*parts, at.out or 0, lse, offsets, sink)))
        return packed


def plan_decode(
    problem: CacheProblem, selection: DecodeSelection, traits: Callable[[Spec], dict[str, int]]
) -> DecodePlan:
    """Prepare the launches of a problem.

    Parameters
    ----------
    problem : CacheProblem
        Checked.
    selection : DecodeSelection
        Its kernel.
    traits : callable
        Returns the traits of a kernel.

    Returns
    -------
    DecodePlan
        Needs only addresses.

    Raises
    ------
    UnsupportedError
        There are too many CTAs.
    """
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    tiles_m = -(-rows // selection.spec.tile_m)
    grid = {
        "append": problem.batch * problem.seqlen_new,
        "decode": tiles_m * selection.splits * problem.heads_kv * problem.batch,
        "combine": problem.batch * problem.heads_q * problem.seqlen_q,
    }
    if max(grid.values()) > _MOST_CTAS:
        raise UnsupportedError(
            f"attention: batch {problem.batch} with {problem.heads_q} heads, seqlen_q {problem.seqlen_q} and "
            f"{selection.splits} splits makes {max(grid.values())} CTAs; at most {_MOST_CTAS} are supported: split the "
            "batch"
        )
    box_rows = _BLOCK if problem.page_size is None else math.gcd(problem.page_size, _BLOCK)
    cache = _cache_geometry(problem)
    of_rows = {
        "out_strides": problem.out.element_strides,
        "lse_strides": row_strides(problem.lse),
        "cu_seqlens_stride": 1,
        "sink_stride": strides_or_zeros(problem.sink, 1)[0],
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "seqlen_q": problem.seqlen_q,
        "total_q": problem.total_q or 0,
        "head_dim_v": problem.head_dim_v,
    }
    steps = []
    if problem.k is not None and problem.v is not None and problem.seqlen_new:
        appending = AppendPacking(
            cache=cache,
            k_strides=problem.k.element_strides,
            v_strides=problem.v.element_strides,
            k_cache_strides=problem.k_cache.element_strides,
            v_cache_strides=problem.v_cache.element_strides,
            batch=problem.batch,
            heads_kv=problem.heads_kv,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
        )
        steps.append(_step(AppendSpec(problem.dtype), appending, grid["append"], traits))
    if problem.seqlen_q and not problem.has_no_output:
        decoding = _decode_packing(problem, selection, cache, tiles_m, box_rows, of_rows)
        steps.append(
            _step(
                selection.spec, decoding, grid["decode"], traits,
                cluster_size=selection.cluster, programmatic=bool(steps),
            )
        )  # fmt: skip
        if selection.parts:
            combining = CombinePacking(parts=selection.parts, **of_rows)  # type: ignore[arg-type]
            steps.append(_step(CombineSpec(problem.dtype), combining, grid["combine"], traits, programmatic=True))
    of_split = problem.batch * problem.heads_q * problem.seqlen_q * 4
    return DecodePlan(
        steps=tuple(steps),
        k=_tensor_map(problem.k_cache, problem, box_rows),
        v=_tensor_map(problem.v_cache, problem, box_rows),
        partial_out_bytes=selection.parts * of_split * problem.head_dim_v,
        workspace_bytes=selection.parts * of_split * (problem.head_dim_v + 1),
    )


def _step(
    spec: Spec,
    packing: AppendPacking | DecodePacking | CombinePacking,
    grid: int,
    traits: Callable[[Spec], dict[str, int]],
    *,
    cluster_size: int = 1,
    programmatic: bool = False,
) -> Step:
    of_kernel = traits(spec)
    geometry = LaunchGeometry(
        grid=grid,
        threads=of_kernel["threads"],
        shared_bytes=of_kernel["shared_bytes"],
        cluster_size=cluster_size,
        programmatic=programmatic,
    )
    return Step(spec, geometry, packing)


def _decode_packing(
    problem: CacheProblem,
    selection: DecodeSelection,
    cache: CacheGeometry,
    tiles_m: int,
    box_rows: int,
    of_rows: dict[str, object],
) -> DecodePacking:
    scales = Scales.of(problem.softmax_scale, problem.softcap)
    slope_batch, slope_head = strides_or_zeros(problem.alibi_slopes, 2)
    return DecodePacking(
        cache=cache,
        q_strides=problem.q.element_strides,
        alibi_stride_batch=slope_batch,
        alibi_stride_head=slope_head,
        scale_log2=scales.scale_log2,
        softcap_slope=scales.softcap_slope,
        softcap=problem.softcap or 0.0,
        negate_scores=problem.softmax_scale < 0,
        q_vectors=problem.q.has_vectors,
        rotate_by_row=problem.rows_turn,
        head_dim=problem.head_dim,
        left=_UNBOUNDED if problem.left is None else problem.left,
        right=_UNBOUNDED if problem.right is None else problem.right,
        heads_kv=problem.heads_kv,
        group=problem.heads_q // problem.heads_kv,
        tiles_m=tiles_m,
        splits=selection.splits,
        blocks_per_split=selection.blocks_per_split,
        box_rows=box_rows,
        **of_rows,  # type: ignore[arg-type]
    )


def _cache_geometry(problem: CacheProblem) -> CacheGeometry:
    def stride(operand: Operand | None, axis: int) -> int:
        return 0 if operand is None else operand.element_strides[axis]

    return CacheGeometry(
        page_size=problem.capacity if problem.page_size is None else problem.page_size,
        pages=problem.cache_rows,
        capacity=problem.capacity,
        appended=problem.seqlen_new,
        seqlens_stride=stride(problem.cache_seqlens, 0),
        table_stride_batch=stride(problem.page_table, 0),
        table_stride_page=stride(problem.page_table, 1),
        batch_idx_stride=stride(problem.cache_batch_idx, 0),
        cos_stride=stride(problem.rotary_cos, 0),
        sin_stride=stride(problem.rotary_sin, 0),
        rotary_dim=problem.rotary_dim,
        positions=problem.rotary_positions,
        interleaved=problem.rotary_interleaved,
    )


def _tensor_map(cache: Operand, problem: CacheProblem, box_rows: int) -> TensorMapGeometry:
    pages, rows, heads, head_dim = cache.shape
    to_page, to_row, to_head, _ = cache.tma_strides
    return TensorMapGeometry(
        problem.dtype.value,
        (head_dim, max(rows, 1), heads, pages),
        (to_row, to_head, to_page),
        (_COLUMNS, box_rows),
        # Each byte is read once, in rows of 128: with 256 the other half of a request is often read twice (8 % slower).
        l2_promotion=128,
    )
