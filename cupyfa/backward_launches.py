"""The prepared launches of a call for gradients: what is left when all but the addresses is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from cupyfa._backward import (
    BackwardPacking,
    BiasGradientPacking,
    PostprocessPacking,
    PreprocessPacking,
    SinkPacking,
)
from cupyfa._launch import LaunchGeometry, TensorMapGeometry
from cupyfa.backward_problem import BackwardArrays
from cupyfa.operand import TMA_ALIGNMENT, Addresses
from cupyfa.packing import Packing
from cupyfa.spec import Spec

__all__ = ["MAPPED", "BackwardPlan", "BiasGradient", "Maps", "Place", "Rounding"]

#: The arrays with a tensor map, in the order of ``BackwardPacking.pack``.
MAPPED = ("q", "k", "v", "dout", "dk", "dv", "bias")
_NO_MAP = bytes(128)  # a tensor map that no thread reads


class Place(NamedTuple):
    """A part of the workspace.

    Attributes
    ----------
    begin, size : int
        In bytes.
    """

    begin: int
    size: int


class Rounding(NamedTuple):
    """How a gradient becomes of sums in the workspace.

    Attributes
    ----------
    name : str
        Of the gradient.
    packing : PostprocessPacking
        The parameters of the launch.
    sums : Place
        Where they are.
    vectors : bool
        Whether its rows are vectors of 16 bytes, if they begin at a multiple of that.
    """

    name: str
    packing: PostprocessPacking
    sums: Place
    vectors: bool


Maps = tuple[TensorMapGeometry | None, ...]


class BiasGradient(NamedTuple):
    """The launch that computes the gradient of a bias.

    Attributes
    ----------
    scores : BackwardPacking
        What it has in common with the main kernel.
    maps : tuple of TensorMapGeometry or None
        As of `BackwardPlan`.
    packing : BiasGradientPacking
        All else.
    """

    scores: BackwardPacking
    maps: Maps
    packing: BiasGradientPacking


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """All launches of a call: only addresses are missing.

    Attributes
    ----------
    specs : tuple of Spec
        The kernels.
    geometries : tuple of LaunchGeometry
        Of each.
    planning, preprocess, backward, sink
        Their parameters; the first is there for packed sequences, and sink may be None.
    roundings : tuple of Rounding
        Of dq, and of dk and dv where their sums are in parts.
    dbias : BiasGradient or None
        Of a bias.
    maps : tuple of TensorMapGeometry or None
        Of q, k, v, dout, dk, dv and bias; None for dk and dv where their sums are in parts, and for a bias that threads
        load.
    row_vectors : bool
        Whether rows of out and dout are vectors of 16 bytes, if they begin at a multiple of that.
    plan, lse_log2, delta, bias_rows, turns, dsink : Place
        In the workspace; plan and the last three may be None.
    workspace_bytes : int
        All of it.
    """

    specs: tuple[Spec, ...]
    geometries: tuple[LaunchGeometry, ...]
    planning: Packing | None
    preprocess: PreprocessPacking
    backward: BackwardPacking
    sink: SinkPacking | None
    roundings: tuple[Rounding, ...]
    dbias: BiasGradient | None
    maps: Maps
    row_vectors: bool
    plan: Place | None
    lse_log2: Place
    delta: Place
    bias_rows: Place | None
    turns: Place | None
    dsink: Place | None
    workspace_bytes: int

    @property
    def parts(self) -> dict[str, int]:
        """What the workspace holds beside copies, and the bytes of each."""
        sums = {f"sums of {rounding.name}": rounding.sums for rounding in self.roundings}
        places = {"plan": self.plan, "lse": self.lse_log2, "delta": self.delta, **sums}
        places |= {"bias": self.bias_rows, "turns": self.turns, "sums of dsink": self.dsink}
        return {name: place.size for name, place in places.items() if place is not None}

    def pack(
        self,
        encode: Callable[[TensorMapGeometry, int], bytes],
        at: BackwardArrays[int],
        copied: BackwardArrays[int],
        workspace: int,
    ) -> list[bytes]:
        """Return the parameters of each kernel.

        Parameters
        ----------
        encode : callable
            ``encode(geometry, address)`` returns the 128 bytes of a tensor map.
        at : BackwardArrays of int
            Addresses; None or 0 for an array that there is not.
        copied : BackwardArrays of int
            The same, with those of copies in place of what TMA cannot take.
        workspace : int
            Address of the workspace.

        Returns
        -------
        list of bytes
            Packed structs.
        """

        def place(part: Place | None) -> int:
            return 0 if part is None else workspace + part.begin

        plan, lse_log2, delta = map(place, (self.plan, self.lse_log2, self.delta))
        turns, dsink, bias_rows = map(place, (self.turns, self.dsink, self.bias_rows))
        bias = at.bias or 0
        sums = {rounding.name: place(rounding.sums) for rounding in self.roundings}
        rows = (at.cu_seqlens_q or 0, at.seqused_q or 0, plan)

        def encoded(maps: Maps) -> tuple[bytes, ...]:
            return tuple(
                _NO_MAP if x is None else encode(x, getattr(copied, name)) for x, name in zip(maps, MAPPED, strict=True)
            )

        parts = (sums.get("dk", 0), sums.get("dv", 0))
        of_scores = (lse_log2, delta, sums["dq"], turns, at.alibi_slopes or 0, *parts, plan, bias, bias_rows)
        packed = [] if self.planning is None else [self.planning.pack(_keys_for_queries(at), plan)]
        packed += [
            self.preprocess.pack(
                (
                    *(at.out, at.dout, at.lse, at.dlse or 0, at.sink or 0, lse_log2, delta, dsink),
                    *(bias if bias_rows else 0, bias_rows, sums["dq"], turns, *rows),
                ),
                self.row_vectors and not (at.out | at.dout) % TMA_ALIGNMENT,
            ),
            self.backward.pack(encoded(self.maps), of_scores),
        ]
        for name, packing, _, vectors in self.roundings:
            address = getattr(at, name)
            packed.append(packing.pack((sums[name], address, *rows), vectors and not address % TMA_ALIGNMENT))
        if self.sink is not None:
            packed.append(self.sink.pack(dsink, at.dsink or 0))
        if self.dbias is not None:
            scores = self.dbias.scores.pack(encoded(self.dbias.maps), of_scores)
            packed.append(self.dbias.packing.pack(scores, at.dbias or 0))
        return packed


def _keys_for_queries(at: BackwardArrays[int]) -> Addresses:
    """Return the lengths as the plan takes them."""
    return Addresses(
        q=0,
        k=0,
        v=0,
        out=0,
        cu_seqlens_q=at.cu_seqlens_k or 0,
        cu_seqlens_k=at.cu_seqlens_q or 0,
        seqused_q=at.seqused_k or 0,
        seqused_k=at.seqused_q or 0,
    )
