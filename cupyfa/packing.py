"""Sequences whose lengths are arrays: what their plan depends on, and how large it can be.

The lengths are on the device, and only the device ever looks at them: ``cuda/plan.cu`` turns them into the tiles that
the kernel computes. What the host knows, the shapes, bounds their number.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from cupyfa._launch import (
    PACKED_ROWS,
    PARAMETER_SIZES,
    Function,
    LaunchGeometry,
    TensorMapGeometry,
    launch,
    pack_plan,
    plan_bytes,
)
from cupyfa.operand import Addresses, Operand, rows_to_next
from cupyfa.problem import Problem
from cupyfa.select import Device, Selection

__all__ = ["UNBOUNDED", "Packing", "Planner", "packed_map", "packed_tiles", "read_plan"]

#: Keys of a window that has no end: the arrays hold fewer, or so many that they are one class.
UNBOUNDED = 2**30


def packed_tiles(problem: Problem, tile_m: int) -> int:
    """Return the most query tiles that sequences can have whose lengths the host does not know.

    Parameters
    ----------
    problem : Problem
        Planned.
    tile_m : int
        Query rows of a tile.

    Returns
    -------
    int
        Of one head. Each sequence, and each gap before, between and behind them, may end with a tile that is not full.
    """
    return _most_tiles(problem.rows[0], problem.batch, tile_m)


def _most_tiles(total_q: int, sequences: int, tile_m: int) -> int:
    return total_q // tile_m + min(total_q, 2 * sequences + 1)


def packed_map(operand: Operand, packed: bool, box: tuple[int, int]) -> TensorMapGeometry:
    """Return the tensor map of a matrix whose sequences end where the device says: see ``FwdParams``.

    Parameters
    ----------
    operand : Operand
        In BSHD order.
    packed : bool
        Whether it is a batch of 1, with the sequences one behind the other.
    box : tuple of int
        Columns and rows.

    Returns
    -------
    TensorMapGeometry
        Of five dimensions.
    """
    batch, seqlen, heads, head_dim = operand.shape
    to_batch, to_row, to_head, _ = operand.tma_strides
    row = to_row if seqlen > 1 else to_batch  # the step to the next batch is a row where sequences have one
    rows = seqlen if packed else (batch - 1) * (rows_to_next(operand) or 0) + seqlen
    shape = (head_dim, PACKED_ROWS, heads, rows + 1, PACKED_ROWS + 1)
    return TensorMapGeometry(operand.dtype.name, shape, (row, to_head, row, 2**34 - row), box)


_PACKED_TILE = np.dtype(
    [(name, np.int32) for name in ("q_begin", "seqlen_q", "k_begin", "seqlen_k", "sequence")]
    + [(name, np.uint32) for name in ("first", "heads_per_section", "padding")]
)


def read_plan(buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """Return the tiles of a plan.

    Parameters
    ----------
    buffer : numpy.ndarray
        uint8; the memory of a ``Plan``.

    Returns
    -------
    numpy.ndarray
        A row for each tile, with the fields of ``PackedTile``.
    """
    header = PARAMETER_SIZES["Plan"] - PARAMETER_SIZES["PackedTile"]
    count = int(buffer[:4].view(np.uint32)[0]) if buffer.size else 0
    return buffer[header : header + count * _PACKED_TILE.itemsize].view(_PACKED_TILE)


@dataclasses.dataclass(frozen=True)
class Packing:
    """All that a plan depends on, except for the lengths; calls with equal packings can share a plan.

    Attributes
    ----------
    sequences, total_q, total_k : int
        Sizes.
    rows_q, rows_k : int
        Rows of each sequence; 0 if they are packed.
    q_step, k_step : int
        Rows from one to the next; likewise.
    tile_m, tile_n : int
        Tile of the kernel.
    window : int
        The most keys that a row sees.
    heads_q, heads_per_kv : int
        Query heads, and how many of them share keys.
    keys_in_l2 : int
        How many keys of a head half of L2 holds.
    multiprocessors : int
        Of the device.
    tiles_grow, longest_first : bool
        As in ``PlanParams``.
    """

    sequences: int
    rows_q: int
    rows_k: int
    q_step: int
    k_step: int
    total_q: int
    total_k: int
    tile_m: int
    tile_n: int
    window: int
    heads_q: int
    heads_per_kv: int
    keys_in_l2: int
    multiprocessors: int
    tiles_grow: bool
    longest_first: bool

    @classmethod
    def of(cls, problem: Problem, selection: Selection, device: Device) -> Packing:
        """Return the packing of a problem.

        Parameters
        ----------
        problem : Problem
            Planned.
        selection : Selection
            Its kernel.
        device : Device
            The GPU.

        Returns
        -------
        Packing
            What its plan depends on.
        """
        spec = selection.spec
        bytes_of_key = (problem.head_dim + problem.head_dim_v) * problem.q.dtype.itemsize
        return cls(
            sequences=problem.batch,
            rows_q=0 if problem.packed else problem.seqlen_q,
            rows_k=0 if problem.packed else problem.seqlen_k,
            q_step=0 if problem.packed else rows_to_next(problem.q) or 0,
            k_step=0 if problem.packed else rows_to_next(problem.k) or 0,
            total_q=problem.rows[0],
            total_k=problem.rows[1],
            tile_m=spec.tile_m,
            tile_n=spec.tile_n,
            window=int(min(problem.window, UNBOUNDED)),
            heads_q=problem.heads_q,
            heads_per_kv=problem.heads_q // problem.heads_kv,
            keys_in_l2=device.l2_bytes // 2 // bytes_of_key,
            multiprocessors=device.multiprocessors,
            tiles_grow=spec.causal and not spec.window,
            longest_first=spec.longest_first,
        )

    @property
    def most_tiles(self) -> int:
        """The most tiles that a plan can have, of one head."""
        return _most_tiles(self.total_q, self.sequences, self.tile_m)

    @property
    def plan_bytes(self) -> int:
        """The size of a plan."""
        return plan_bytes(self.most_tiles)

    def pack(self, addresses: Addresses, plan: int) -> bytes:
        """Return the parameters of the kernel that makes a plan.

        Parameters
        ----------
        addresses : Addresses
            Of a call.
        plan : int
            Where the plan goes.

        Returns
        -------
        bytes
            ``PlanParams``.
        """
        lengths = (addresses.cu_seqlens_q, addresses.cu_seqlens_k, addresses.seqused_q, addresses.seqused_k)
        return pack_plan(lengths, plan, **self.__dict__)


@dataclasses.dataclass(frozen=True)
class Planner:
    """The kernel that makes plans, prepared for one packing: only addresses and the stream are missing.

    Attributes
    ----------
    packing : Packing
        What its plans depend on.
    function : Function
        The kernel.
    geometry : LaunchGeometry
        One CTA.
    """

    packing: Packing
    function: Function
    geometry: LaunchGeometry

    @classmethod
    def of(cls, packing: Packing, function: Function, traits: dict[str, int]) -> Planner:
        """Return a prepared launch.

        Parameters
        ----------
        packing : Packing
            What its plans depend on.
        function : Function
            The kernel.
        traits : dict
            The kernel's traits.

        Returns
        -------
        Planner
            Ready to launch.
        """
        return cls(packing, function, LaunchGeometry(grid=1, threads=traits["threads"], shared_bytes=0))

    def __call__(self, addresses: Addresses, plan: int, stream: int) -> None:
        """Launch on a stream.

        Parameters
        ----------
        addresses : Addresses
            Of a call.
        plan : int
            Where the plan goes.
        stream : int
            CUstream.
        """
        launch(self.function, self.geometry, stream, self.packing.pack(addresses, plan))
