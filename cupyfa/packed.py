"""Sequences whose lengths are arrays, as the checks see them: their geometry. The values are the device's."""

from __future__ import annotations

import dataclasses

import numpy as np

from cupyfa.errors import UnsupportedError
from cupyfa.operand import LENGTHS, Arrays, Operand
from cupyfa.options import Options

__all__ = ["Packed", "Used", "check_packed", "check_used"]

_MAX_SEQUENCES = 2**30
_MAX_TOTAL = 2**30  # FwdParams: packed_rows


@dataclasses.dataclass(frozen=True)
class Packed:
    """What the problem of packed sequences has beside the arrays that hold them one behind the other.

    Attributes
    ----------
    cu_seqlens_q, cu_seqlens_k : Operand
        (batch + 1,): where each sequence begins, and where the last one ends.
    seqused_q, seqused_k : Operand or None
        (batch,): how many rows of each are used.
    max_seqlen_q, max_seqlen_k : int or None
        What the caller expects of the longest sequence.
    """

    cu_seqlens_q: Operand
    cu_seqlens_k: Operand
    seqused_q: Operand | None
    seqused_k: Operand | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


@dataclasses.dataclass(frozen=True)
class Used:
    """What the problem of a batch has whose sequences use a part of their rows, or of their keys.

    Attributes
    ----------
    seqused_q, seqused_k : Operand or None
        (batch,): how many rows, and how many keys, of each are used; None: all.
    """

    seqused_q: Operand | None
    seqused_k: Operand | None


def check_used(operands: Arrays[Operand], batch: int) -> Used | None:
    """Check the lengths of the sequences of a batch, as far as the host can know them.

    Parameters
    ----------
    operands : Arrays of Operand
        As the user passed them, without ``cu_seqlens_q`` and ``cu_seqlens_k``.
    batch : int
        How many sequences there are.

    Returns
    -------
    Used or None
        None: all rows and keys are used.

    Raises
    ------
    TypeError, ValueError
        Naming the array.
    """
    given = (operands.seqused_q, operands.seqused_k)
    if given == (None, None):
        return None
    for operand in given:
        if operand is not None:
            _check_lengths_of(operand)
            if operand.shape[0] != batch:
                raise ValueError(
                    f"attention: {operand.name} has {operand.shape[0]} entries; it must have one for each of the "
                    f"{batch} sequences"
                )
    return Used(*given)


def _check_lengths_of(operand: Operand) -> None:
    """Check dtype and axes of an array of lengths."""
    if operand.dtype != np.int32:
        raise TypeError(f"attention: {operand.name} has dtype {operand.dtype}; it must be int32")
    if len(operand.shape) != 1:
        raise ValueError(f"attention: {operand.name} has shape {operand.shape}; it must have one axis")
    if operand.shape[0] > 1 and operand.strides[0] != operand.dtype.itemsize:
        raise ValueError(f"attention: {operand.name} has stride {operand.strides[0]} bytes; it must be contiguous")


def check_packed(operands: Arrays[Operand], options: Options) -> Packed | None:
    """Check the lengths of packed sequences, as far as the host can know them.

    Parameters
    ----------
    operands : Arrays of Operand
        As the user passed them.
    options : Options
        Checked.

    Returns
    -------
    Packed or None
        None: the sequences are not packed.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        Naming the array.
    """
    cu_q, cu_k, used_q, used_k = (getattr(operands, name) for name in LENGTHS)
    if cu_q is None and cu_k is None:
        return None
    if cu_q is None or cu_k is None:
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_k"
        raise TypeError(f"attention: {missing} is None; it must be an array of int32 with batch + 1 entries")
    if options.layout != "BSHD":
        raise ValueError(f"attention: layout is {options.layout!r}; packed sequences have none, it must be 'BSHD'")
    for operand in (cu_q, cu_k, used_q, used_k):
        if operand is not None:
            _check_lengths_of(operand)
    if cu_q.shape[0] == 0 or cu_q.shape[0] > _MAX_SEQUENCES:
        raise ValueError(
            f"attention: cu_seqlens_q has {cu_q.shape[0]} entries; it must have one more than there are sequences, at "
            f"most {_MAX_SEQUENCES}"
        )
    if cu_k.shape != cu_q.shape:
        raise ValueError(
            f"attention: cu_seqlens_k has {cu_k.shape[0]} entries but cu_seqlens_q has {cu_q.shape[0]}; they must be "
            "equal"
        )
    for operand in (used_q, used_k):
        if operand is not None and operand.shape[0] != cu_q.shape[0] - 1:
            raise ValueError(
                f"attention: {operand.name} has {operand.shape[0]} entries; it must have one for each of the "
                f"{cu_q.shape[0] - 1} sequences"
            )
    for operand in (operands.q, operands.k):
        if operand.shape and operand.shape[0] > _MAX_TOTAL:
            raise UnsupportedError(
                f"attention: {operand.name} has {operand.shape[0]} rows; packed sequences may have {_MAX_TOTAL}"
            )
    return Packed(cu_q, cu_k, used_q, used_k, options.max_seqlen_q, options.max_seqlen_k)
