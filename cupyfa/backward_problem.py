"""From arrays to the problem of their gradients: every check on what the user passed beside the forward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from cupyfa.checks import (
    OF_OUT,
    are_apart,
    check_devices,
    check_given,
    check_output,
    check_strides,
    check_unshared,
    of_lse,
)
from cupyfa.operand import LENGTHS, TMA_ALIGNMENT, Arrays, Operand
from cupyfa.options import Options
from cupyfa.problem import Problem
from cupyfa.spec import Bias

__all__ = [
    "GRADIENTS",
    "BackwardArrays",
    "BackwardProblem",
    "check_backward_alignment",
    "check_backward_overlap",
    "check_backward_workspace",
    "fill_empty",
    "gradient_shape",
    "with_gradients",
]

#: What is written.
GRADIENTS = ("dq", "dk", "dv", "dsink", "dbias")
_MATRICES = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")

T = TypeVar("T")
U = TypeVar("U")


class BackwardArrays(NamedTuple, Generic[T]):
    """All array arguments of a call, or something about each: its operand, its geometry, its address.

    Attributes
    ----------
    dout, q, k, v, out, lse, dlse, sink, alibi_slopes, bias
        What is read; None for an array that was not passed.
    dq, dk, dv, dsink, dbias
        What is written.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        Lengths of packed sequences.
    """

    dout: T
    q: T
    k: T
    v: T
    out: T
    lse: T
    dlse: T | None = None
    sink: T | None = None
    alibi_slopes: T | None = None
    bias: T | None = None
    dq: T | None = None
    dk: T | None = None
    dv: T | None = None
    dsink: T | None = None
    dbias: T | None = None
    cu_seqlens_q: T | None = None
    cu_seqlens_k: T | None = None
    seqused_q: T | None = None
    seqused_k: T | None = None

    def map(self, function: Callable[[str, T], U]) -> BackwardArrays[U]:
        """Return ``function(name, x)`` for each of them, None where there is none."""
        named = zip(self._fields, self, strict=True)
        return BackwardArrays(*(None if x is None else function(name, x) for name, x in named))  # type: ignore[arg-type]

    def given(self) -> dict[str, T]:
        """Return those that are there, by name."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}


@dataclasses.dataclass(frozen=True)
class BackwardProblem:
    """A problem of gradients; equal problems need equal kernels and equal parameters, except for addresses.

    Attributes
    ----------
    forward : Problem
        That whose gradients are wanted: its sizes, options and inputs, with the caller's out and lse.
    dout : Operand
        With the axes (batch, seqlen, heads, head_dim), as all matrices; packed, a batch of 1.
    dlse : Operand or None
        (batch, heads_q, seqlen_q); packed, a batch of 1.
    dq, dk, dv : Operand
        Like q, k, v.
    dsink : Operand or None
        (heads_q,).
    dbias : Operand or None
        With four axes: the sizes of the bias as it was passed, but 1 with a stride of 0 along axes on which it repeats.
    deterministic : bool
        Whether the bits may depend on nothing but the arguments.
    """

    forward: Problem
    dout: Operand
    dlse: Operand | None
    dq: Operand
    dk: Operand
    dv: Operand
    dsink: Operand | None
    dbias: Operand | None
    deterministic: bool

    @classmethod
    def of(
        cls, operands: BackwardArrays[Operand], options: Options, *, deterministic: bool, current_device: int | None
    ) -> BackwardProblem:
        """Check arguments and return the problem that they pose.

        Parameters
        ----------
        operands : BackwardArrays of Operand
            As the user passed them, in the layout of the options. A gradient that is None will be allocated contiguous.
        options : Options
            As :func:`cupyfa.options.check_options` returns them.
        deterministic : bool
            As the user passed it.
        current_device : int or None
            The current CUDA device, None for NumPy.

        Returns
        -------
        BackwardProblem
            All matrices in BSHD order.

        Raises
        ------
        TypeError
            An argument has the wrong type or dtype.
        ValueError
            An argument has the wrong shape, memory layout or device, or a value out of range.
        UnsupportedError
            The arguments are meaningful, but no kernel fits them.
        """
        given = operands.given()
        if operands.cu_seqlens_q is None and operands.cu_seqlens_k is None:
            for name in ("seqused_q", "seqused_k"):
                if name in given:
                    raise TypeError(
                        f"attention: gradients take {name} of packed sequences only, which have cu_seqlens_q and "
                        "cu_seqlens_k"
                    )
        shared: dict[str, Any] = {
            name: given.get(name) for name in ("q", "k", "v", "sink", "alibi_slopes", "bias", *LENGTHS)
        }
        forward = Problem.from_operands(Arrays(**shared), options, want_lse=False, current_device=current_device)
        q, out_shape, lse_shape = operands.q, (*operands.q.shape[:-1], operands.v.shape[-1]), forward.lse_shape
        for name in ("dout", "out"):
            check_given(given[name], out_shape, q.dtype, OF_OUT)
        for name in ("lse", "dlse"):
            if name in given:
                check_given(given[name], lse_shape, np.dtype(np.float32), of_lse(lse_shape))
        gradients: dict[str, Any] = _gradients(operands)
        checked = operands._replace(**gradients)
        check_devices(q, checked.given())
        if q.device is not None:
            for name, operand in checked.given().items():
                if name not in _MATRICES:
                    check_strides(operand)
        matrices = {name: getattr(checked, name) for name in _MATRICES}
        rows = {"lse": operands.lse, "dlse": operands.dlse}
        if forward.packed is None:
            matrices = {name: operand.in_bshd(options.layout) for name, operand in matrices.items()}
        else:
            matrices = {name: operand.broadcast_to((1, *operand.shape)) for name, operand in matrices.items()}
            rows = {name: None if x is None else x.broadcast_to((1, *x.shape)) for name, x in rows.items()}
        dbias = gradients["dbias"]
        return cls(
            forward=dataclasses.replace(forward, out=matrices["out"], lse=rows["lse"]),
            dout=matrices["dout"],
            dlse=rows["dlse"],
            dq=matrices["dq"],
            dk=matrices["dk"],
            dv=matrices["dv"],
            dsink=gradients["dsink"],
            dbias=None if dbias is None else _with_four_axes(dbias),
            deterministic=deterministic,
        )

    @functools.cached_property
    def operands(self) -> BackwardArrays[Operand]:
        """All operands, in the order of `BackwardArrays`."""
        operands = []
        for name in BackwardArrays._fields:
            owner = self if hasattr(self, name) else self.forward.packed if name in LENGTHS else self.forward
            operands.append(getattr(owner, name, None))
        return BackwardArrays(*operands)

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Bytes from the first element of each array to its ends, in that order; (0, 0) for one that is not there."""
        return tuple((0, 0) if operand is None else operand.span for operand in self.operands)

    @functools.cached_property
    def alignments(self) -> tuple[int, ...]:
        """Where each array has to begin, in that order: at multiples of so many bytes, a power of 2."""
        return tuple(
            1 if operand is None else TMA_ALIGNMENT if name in _MATRICES else operand.dtype.itemsize
            for name, operand in zip(BackwardArrays._fields, self.operands, strict=True)
        )

    @property
    def bias_kind(self) -> Bias:
        """Which axes the bias of the kernels has: rows and columns, or one of them for all."""
        if self.forward.bias is None:
            return Bias.NONE
        *_, row, key = self.forward.bias.strides
        return Bias.TILE if row and key else Bias.ROW if key else Bias.COLUMN

    @property
    def is_empty(self) -> bool:
        """Whether all gradients are 0, or have no elements: there is no row, or no key."""
        return self.forward.is_empty


def _gradients(operands: BackwardArrays[Operand]) -> dict[str, Operand | None]:
    """Return the operands of what is written: checked, those that will be allocated among them."""
    wanted: dict[str, tuple[tuple[int, ...], np.dtype[Any], str]] = {}
    for name in ("q", "k", "v"):
        like: Operand = getattr(operands, name)
        wanted[f"d{name}"] = like.shape, like.dtype, f"the shape of {name}"
    if operands.sink is not None:
        wanted["dsink"] = operands.sink.shape, np.dtype(np.float32), "(heads_q,)"
    if operands.bias is not None:
        meaning = "the shape of bias, with 1 where it repeats"
        wanted["dbias"] = gradient_shape(operands.bias), operands.bias.dtype, meaning
    gradients: dict[str, Operand | None] = {}
    for name in GRADIENTS:
        operand: Operand | None = getattr(operands, name)
        if name not in wanted:
            if operand is not None:
                raise ValueError(f"attention: {name} is the gradient of {name[1:]}, and there is none")
            gradients[name] = None
            continue
        shape, dtype, meaning = wanted[name]
        if operand is None:
            operand = Operand.contiguous(name, shape, dtype, operands.q.device)
        check_output(operand, shape, dtype, meaning)
        gradients[name] = operand
    return gradients


def gradient_shape(bias: Operand) -> tuple[int, ...]:
    """Return the shape of the gradient of a bias.

    Parameters
    ----------
    bias : Operand
        As the user passed it.

    Returns
    -------
    tuple of int
        Its own, with one index along an axis that a view repeats.
    """
    return tuple(1 if size > 1 and not stride else size for size, stride in zip(bias.shape, bias.strides, strict=True))


def _with_four_axes(dbias: Operand) -> Operand:
    missing = (0,) * (4 - len(dbias.shape))
    strides = tuple(stride if size > 1 else 0 for stride, size in zip(dbias.strides, dbias.shape, strict=True))
    return dataclasses.replace(dbias, shape=(1,) * len(missing) + dbias.shape, strides=missing + strides)


def with_gradients(
    empty: Callable[..., Any], arrays: BackwardArrays[Any], problem: BackwardProblem
) -> BackwardArrays[Any]:
    """Return the arrays with the gradients that the user did not pass.

    Parameters
    ----------
    empty : Callable
        ``empty(shape, dtype)`` makes an array.
    arrays : BackwardArrays
        As the user passed them.
    problem : BackwardProblem
        Theirs.

    Returns
    -------
    BackwardArrays
        With all gradients.
    """
    missing: dict[str, Any] = {
        f"d{name}": empty(x.shape, x.dtype)
        for name, x in (("q", arrays.q), ("k", arrays.k), ("v", arrays.v), ("sink", arrays.sink))
        if x is not None and getattr(arrays, f"d{name}") is None
    }
    if arrays.bias is not None and arrays.dbias is None and problem.dbias is not None:
        missing["dbias"] = empty(problem.dbias.shape[4 - arrays.bias.ndim :], arrays.bias.dtype)
    return arrays._replace(**missing)


def check_backward_alignment(problem: BackwardProblem, addresses: BackwardArrays[int]) -> tuple[str, ...]:
    """Check where the arrays begin.

    Parameters
    ----------
    problem : BackwardProblem
        The checked problem.
    addresses : BackwardArrays of int
        Of all arrays, gradients included; None or 0 for one that has none.

    Returns
    -------
    tuple of str
        The matrices that TMA cannot take from there: almost always none.

    Raises
    ------
    ValueError
        An array that threads read or write where it is does not begin at a multiple of the size of its numbers.
    """
    beside = [(a or 0) & (step - 1) for a, step in zip(addresses, problem.alignments, strict=True)]
    if not any(beside):
        return ()  # the usual case
    unaligned = []
    for name, operand in problem.operands.given().items():
        address = getattr(addresses, name) or 0
        if name in _MATRICES:
            if address % TMA_ALIGNMENT:
                unaligned.append(name)
        elif address % operand.dtype.itemsize:
            raise ValueError(
                f"attention: {name} begins at address {address:#x}; it must be a multiple of {operand.dtype.itemsize} "
                f"bytes ({'a new array' if name in GRADIENTS else 'a copy'} is aligned)"
            )
    return tuple(unaligned)


def check_backward_overlap(problem: BackwardProblem, addresses: BackwardArrays[int]) -> None:
    """Check that no gradient shares memory with another array.

    Parameters
    ----------
    problem : BackwardProblem
        The checked problem.
    addresses : BackwardArrays of int
        Of all arrays, gradients included; None or 0 for one that has none.

    Raises
    ------
    ValueError
        Naming both arrays.
    """
    if are_apart(addresses, problem.spans):
        return  # the usual case
    placed = [(x, a) for name, x in problem.operands.given().items() if (a := getattr(addresses, name))]
    read = [pair for pair in placed if pair[0].name not in GRADIENTS]
    written = [pair for pair in placed if pair[0].name in GRADIENTS]
    for n, (operand, address) in enumerate(written):
        check_unshared(operand, address, [*read, *written[:n]])


def check_backward_workspace(problem: BackwardProblem, addresses: BackwardArrays[int], begin: int, size: int) -> None:
    """Check that the memory for intermediate results is nobody else's.

    Parameters
    ----------
    problem : BackwardProblem
        The checked problem.
    addresses : BackwardArrays of int
        Of all arrays; None or 0 for one that has none.
    begin, size : int
        Address and bytes of what the call will write there.

    Raises
    ------
    ValueError
        Naming the other array.
    """
    end = begin + size
    for a, (low, high) in zip(addresses, problem.spans, strict=True):
        if a and a + low < end and begin < a + high:
            break
    else:
        return  # the usual case: nothing lies between its first and its last byte
    memory = Operand.contiguous("workspace", (size,), np.uint8, None)
    others = [(x, a) for name, x in problem.operands.given().items() if (a := getattr(addresses, name))]
    check_unshared(memory, begin, others)


def fill_empty(xp: Any, arrays: BackwardArrays[Any]) -> None:
    """Write the gradients of a problem that has no row, or no key.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    arrays : BackwardArrays
        With all gradients: they become 0, but for that of a sink, which is the lse of each row then, unless it is -inf.
    """
    for name in GRADIENTS:
        if (gradient := getattr(arrays, name)) is not None:
            gradient[...] = 0
    if arrays.dsink is not None and arrays.dlse is not None:
        dlse = arrays.dlse.sum(axis=(0, 2)) if arrays.cu_seqlens_q is None else _sum_of_sequences(xp, arrays)
        arrays.dsink[...] = dlse * (arrays.sink != -np.inf)


def _sum_of_sequences(xp: Any, arrays: BackwardArrays[Any]) -> Any:
    """Return the sum of dlse of each head over the rows of packed sequences; 0 if their offsets are not in order.

    No operation waits for a GPU.
    """
    offsets: Any = arrays.cu_seqlens_q
    of_keys: Any = arrays.cu_seqlens_k
    rows, sequences = xp.arange(arrays.q.shape[0], dtype=np.int32), len(offsets) - 1
    if not sequences:
        return 0
    in_order = xp.asarray(True)
    for of, size in ((offsets, len(rows)), (of_keys, len(arrays.k))):
        in_order = in_order & (of[0] >= 0) & (of[1:] >= of[:-1]).all() & (of[-1] <= size)
    used = offsets[1:] - offsets[:-1]
    if arrays.seqused_q is not None:
        used = xp.minimum(arrays.seqused_q, used)
    sequence = xp.searchsorted(offsets, rows, side="right") - 1  # of each row; of empty ones the last that begins there
    there = xp.clip(sequence, 0, sequences - 1)
    inside = (sequence == there) & (rows - offsets[there] < used[there]) & in_order
    return xp.where(inside, arrays.dlse, 0).sum(axis=1)
