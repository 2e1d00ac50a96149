"""The exchange of dS between the two CTAs of a pair, as data movement and as a protocol (specification 0x0A).

Each CTA has dS for its own keys and all query rows, but a row of dQ sums over the keys of both. So the pair trades:
every CTA keeps one half of its rows and sends the other, and ends up with half the rows over all keys. The protocol
around the copy counts bytes on the receiver's barrier; a relay warp passes the news on to the CTA that issues the
product. FlashAttention-4, arXiv 2603.05451, section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from ..violations import ContractViolation

__all__ = [
    "Fault",
    "Transfer",
    "admit_pair",
    "check_transfers",
    "fault_errors",
    "half",
    "repack",
    "transfers",
    "two_cta_dq",
    "IncompleteExchange",
    "PairMismatch",
    "WrongHalf",
]

Array = npt.NDArray[np.floating]
PAIR = (0, 1)


class WrongHalf(ContractViolation):
    """A CTA got rows that it does not own; bytes and shapes look right all the same (specification 0x0A)."""


class IncompleteExchange(ContractViolation):
    """A CTA does not have all keys of the rows that it owns (specification 0x0A)."""


class PairMismatch(ContractViolation):
    """The two CTAs of a pair work on different key columns; each would wait for the other forever (0x0A)."""


class Fault(Enum):
    """Ways in which an exchange goes wrong without any shape being wrong (specification 0x0A)."""

    OMITTED = "the peer's half is never added"
    WRONG_HALF = "the peer's half has the rows that the peer keeps"
    SWAPPED_KEYS = "dS of one CTA meets K of the other"


def half(rows: int, rank: int) -> slice:
    """Return the query rows that a CTA owns after the exchange (specification 0x0A).

    Parameters
    ----------
    rows : int
        Query rows of the tile; must be even.
    rank : int
        CTA of the pair, 0 or 1.

    Returns
    -------
    slice
        The lower half for rank 0, the upper for rank 1.

    Examples
    --------
    >>> half(128, 1)
    slice(64, 128, None)
    """
    if rows < 2 or rows % 2 or rank not in PAIR:
        raise ContractViolation(f"exchange: rows {rows} must be positive and even, and rank {rank} 0 or 1")
    return slice(rank * rows // 2, (rank + 1) * rows // 2)


@dataclass(frozen=True)
class Transfer:
    """A block of dS that one CTA holds for the product, and where it came from (specification 0x0A).

    Attributes
    ----------
    source, owner : int
        CTA that computed the block, CTA that uses it.
    rows : slice
        Query rows.
    """

    source: int
    owner: int
    rows: slice


def transfers(rows: int) -> list[Transfer]:
    """List the four blocks of dS after a right exchange; two stayed, two were sent (specification 0x0A).

    Parameters
    ----------
    rows : int
        Query rows.

    Returns
    -------
    list of Transfer
        Both key halves for each owner, with the owner's rows.
    """
    return [Transfer(source, owner, half(rows, owner)) for owner in PAIR for source in PAIR]


def check_transfers(blocks: Iterable[Transfer], rows: int) -> None:
    """Check that each CTA has all keys for exactly the rows it owns (specification 0x0A).

    Parameters
    ----------
    blocks : iterable of Transfer
        What each CTA has.
    rows : int
        Query rows.

    Raises
    ------
    WrongHalf
        If a block has rows of the other CTA.
    IncompleteExchange
        If the keys of one CTA are missing.

    Examples
    --------
    >>> check_transfers(transfers(128), 128)
    >>> check_transfers(transfers(128)[:3], 128)
    Traceback (most recent call last):
    ...
    cupyfa.oracles.blackwell.exchange.IncompleteExchange: CTA 1 has no dS for the keys of CTA 1
    """
    have: set[tuple[int, int]] = set()
    for block in blocks:
        if block.rows != half(rows, block.owner):
            raise WrongHalf(
                f"CTA {block.owner} owns rows {half(rows, block.owner)}, but got {block.rows} from CTA {block.source}"
            )
        have.add((block.owner, block.source))
    for owner in PAIR:
        for source in PAIR:
            if (owner, source) not in have:
                raise IncompleteExchange(f"CTA {owner} has no dS for the keys of CTA {source}")


def repack(dS: Sequence[Array]) -> tuple[Array, Array]:
    """Exchange the halves: column partition in, row partition out (specification 0x0A).

    Parameters
    ----------
    dS : sequence of numpy.ndarray
        Two arrays ``(m, n)``: dS of CTA 0 and 1, each for all rows and its own keys.

    Returns
    -------
    tuple of numpy.ndarray
        Two arrays ``(m / 2, 2 n)``: rows that CTA 0 and 1 own, for all keys. Nothing is computed, so nothing is
        rounded.

    Examples
    --------
    >>> whole = np.arange(8.0).reshape(2, 4)
    >>> repack((whole[:, :2], whole[:, 2:]))[1]
    array([[4., 5., 6., 7.]])
    """
    _check_pair("dS", dS)
    rows = dS[0].shape[0]
    first, second = (np.concatenate([part[half(rows, rank)] for part in dS], axis=1) for rank in PAIR)
    return first, second


def two_cta_dq(
    dS: Sequence[Array], K: Sequence[Array], *, softmax_scale: float = 1.0, fault: Fault | None = None
) -> Array:
    """Compute ``dQ = softmax_scale * dS K`` as a pair does, each CTA its half of the rows over all keys (0x0A).

    Parameters
    ----------
    dS : sequence of numpy.ndarray
        Two arrays ``(m, n)``, one per CTA.
    K : sequence of numpy.ndarray
        Two arrays ``(n, d)``, one per CTA.
    softmax_scale : float, optional
        Factor on the scores.
    fault : Fault, optional
        What goes wrong.

    Returns
    -------
    numpy.ndarray
        ``(m, d)``.

    Examples
    --------
    >>> dS, K = (np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]])), (np.array([[1.0]]), np.array([[10.0]]))
    >>> two_cta_dq(dS, K).ravel(), two_cta_dq(dS, K, fault=Fault.OMITTED).ravel()
    (array([31., 42.]), array([ 1., 40.]))
    """
    _check_operands(dS, K)
    rows = dS[0].shape[0]
    if fault is None:
        keys = np.concatenate(K)
        return softmax_scale * np.concatenate([own @ keys for own in repack(dS)])
    result = []
    for rank in PAIR:
        own, peer = dS[rank][half(rows, rank)], dS[1 - rank][half(rows, rank)]
        own_keys, peer_keys = K[rank], K[1 - rank]
        if fault is Fault.OMITTED:
            result.append(own @ own_keys)
        elif fault is Fault.WRONG_HALF:
            result.append(own @ own_keys + dS[1 - rank][half(rows, 1 - rank)] @ peer_keys)
        else:
            result.append(own @ peer_keys + peer @ own_keys)
    return softmax_scale * np.concatenate(result)


def fault_errors(dS: Sequence[Array], K: Sequence[Array], *, softmax_scale: float = 1.0) -> dict[str, float]:
    """Measure what each fault does to dQ (specification 0x0A).

    Parameters
    ----------
    dS, K : sequence of numpy.ndarray
        As for `two_cta_dq`.
    softmax_scale : float, optional
        Factor on the scores.

    Returns
    -------
    dict
        Largest absolute error of dQ by fault, ``"none"`` for the right exchange.
    """
    _check_operands(dS, K)
    direct = softmax_scale * (np.concatenate(dS, axis=1) @ np.concatenate(K))
    cases: dict[str, Fault | None] = {"none": None, **{fault.name: fault for fault in Fault}}
    return {
        name: float(np.abs(two_cta_dq(dS, K, softmax_scale=softmax_scale, fault=fault) - direct).max())
        for name, fault in cases.items()
    }


def admit_pair(columns: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Check that both CTAs of a pair visit the same sparse key columns in the same order (specification 0x0A).

    Parameters
    ----------
    columns : sequence of sequence of int
        Column indices of CTA 0 and of CTA 1.

    Returns
    -------
    tuple of int
        The common columns.

    Raises
    ------
    PairMismatch
        If they differ.

    Examples
    --------
    >>> admit_pair([[0, 3], [0, 3]])
    (0, 3)
    """
    if len(columns) != len(PAIR):
        raise ContractViolation(f"exchange: columns of {len(columns)} CTAs; a pair has {len(PAIR)}")
    first, second = (tuple(c) for c in columns)
    if first != second:
        raise PairMismatch(f"CTA 0 visits key columns {first}, CTA 1 {second}")
    return first


def _check_operands(dS: Sequence[Array], K: Sequence[Array]) -> None:
    _check_pair("dS", dS)
    _check_pair("K", K)
    if dS[0].shape[1] != K[0].shape[0]:
        raise ContractViolation(f"exchange: dS has {dS[0].shape[1]} keys per CTA, K has {K[0].shape[0]}")


def _check_pair(name: str, pair: Sequence[Array]) -> None:
    if len(pair) != len(PAIR) or any(x.ndim != 2 for x in pair) or pair[0].shape != pair[1].shape:
        shapes = [x.shape for x in pair]
        raise ContractViolation(f"exchange: {name} must be two matrices of one shape, not {shapes}")
