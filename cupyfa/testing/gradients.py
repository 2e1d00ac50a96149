"""How close gradients must be to the reference: the rule of `cupyfa.testing.tolerance`, for each of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyfa.oracles import backward, dense, packed, packed_backward
from cupyfa.oracles.backward import Gradients
from cupyfa.testing.backward_cases import BackwardCase
from cupyfa.testing.canaries import to_numpy
from cupyfa.testing.case import Case, as_bshd
from cupyfa.testing.tolerance import assert_close, score_magnitude

__all__ = ["assert_gradients_close", "expected_gradients", "expected_of"]

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")

#: What a float32 sum of head_dim products may be off by, in units of the product of the norms; see `assert_lse_close`.
_OF_A_SUM = 2.0**-21


@functools.lru_cache(maxsize=8)
def expected_gradients(case: BackwardCase, seed: int = 0) -> tuple[Gradients, Gradients, Gradients]:
    """Return what the gradients of a case are, and what they may be off by.

    Parameters
    ----------
    case : BackwardCase
        Of any table.
    seed : int, optional
        Seed of its arrays.

    Returns
    -------
    reference : Gradients
        float64, of the out and lse of the case, which are rounded as those of a kernel are; matrices in BSHD order.
    same_precision : Gradients
        Of the same arrays, by the plain algorithm at the precision of the kernels.
    floor : Gradients
        That of `assert_close`.
    """
    arrays: dict[str, Any] = case.make_arrays(seed)
    if isinstance(case.forward, Case):
        arrays |= {name: as_bshd(arrays[name], case.forward.layout) for name in ("dout", "q", "k", "v", "out")}
    return expected_of(arrays, case.options)


def expected_of(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Gradients, Gradients, Gradients]:
    """Return what the gradients of some arrays are, and what they may be off by.

    Parameters
    ----------
    arrays : dict
        dout, q, k, v, out, lse; dlse and the lengths of packed sequences, if there are such. Matrices in BSHD order.
    options : dict
        The keyword arguments that the oracles take.

    Returns
    -------
    reference : Gradients
        float64.
    same_precision : Gradients
        By the plain algorithm at the precision of the kernels.
    floor : Gradients
        That of `assert_close`.

    Notes
    -----
    ``dP - delta`` is a difference of two sums of products of dO and V, or of dO and O, which cancel where a row puts
    its weight on one key: on the first rows under a causal mask for one. What is left there is rounding in the order of
    additions, which for tensor cores is truncation: up to 2^-21 of ``w_i = |dO_i| max|V_j| + |dlse_i|``, as for the
    scores in `assert_lse_close`. So the floor is ``|scale| sum_j P_ij w_i max|K|`` for dQ, and
    ``|scale| sum_i P_ij w_i max|Q_i|`` for dK, times 2^-21; where P is 0 there is none.

    A bias and a sink get sums of ``P (dP - delta)`` that were rounded to nothing less than float32. So they also show
    that P is relative to an lse of scores that err by 2^-21 of `score_magnitude`: for them ``w_i`` is larger by twice
    that magnitude, because ``dP - delta`` may be as large as ``2 w_i``.
    """
    is_packed = "cu_seqlens_q" in arrays
    function = packed_backward.attention_backward if is_packed else backward.attention_backward
    of_sequence: dict[str, Any] = {"of_sequence": backward.same_precision} if is_packed else {}
    plain = packed_backward.attention_backward if is_packed else backward.same_precision
    reference = function(**arrays, **options)
    same_precision = plain(**arrays, **options, **of_sequence)
    return reference, same_precision, _floor(function, arrays, options)


def _sum_of_probabilities(arrays: dict[str, Any], options: dict[str, Any]) -> npt.NDArray[Any]:
    """Return ``sum_j P_ij``, the output for values of 1: 0 in rows that see no key, less than 1 with a sink."""
    ones = np.ones((*arrays["v"].shape[:-1], 1))
    lengths = {name: arrays[name] for name in _LENGTHS if name in arrays}
    if not lengths:
        return dense.attention(arrays["q"], arrays["k"], ones, **options)[0]
    return packed.attention(arrays["q"], arrays["k"], ones, **lengths, **options, of_sequence=dense.attention)[0]


def _floor(function: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Gradients:
    """Return the floor: gradients of a problem with the same probabilities, and weights in place of dO and dlse."""
    dout, q, k, v = (np.nan_to_num(arrays[name].astype(np.float64)) for name in ("dout", "q", "k", "v"))
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    over_keys = tuple(range(k.ndim - 2))

    def of_query_heads(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.repeat(x.max(axis=over_keys, initial=0), heads_q // max(1, heads_kv))

    weight = np.linalg.norm(dout, axis=-1) * of_query_heads(np.linalg.norm(v, axis=-1))
    if "dlse" in arrays:
        weight = weight + np.abs(np.nan_to_num(arrays["dlse"])).swapaxes(-1, -2)
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    rows, keys = (x if x.ndim == 4 else x[None] for x in (q, k))
    magnitude = score_magnitude(rows, keys, scale, options.get("softcap")).reshape(arrays["lse"].shape)
    # With V = 0 and dlse = -x the gradients are dL = P x, and with dO = y also dV = P' y.
    made = {
        "dout": (weight * np.abs(q).max(axis=-1))[..., None],
        "v": np.zeros((*v.shape[:-1], 1)),
        "dlse": -weight.swapaxes(-1, -2) * (1 + 2 * magnitude),
        "out": np.zeros((*dout.shape[:-1], 1)),
    }
    sums = function(**(arrays | made), **options)
    dq = scale * _sum_of_probabilities(arrays, options) * (weight * of_query_heads(np.abs(k).max(axis=-1)))[..., None]
    others = [None if x is None else _OF_A_SUM * np.abs(x) for x in (sums.dsink, sums.dbias)]
    return Gradients(_OF_A_SUM * dq, _OF_A_SUM * scale * sums.dv, np.zeros(()), *others)


def assert_gradients_close(actual: Any, case: BackwardCase, *, seed: int = 0, context: object = None) -> None:
    """Hold gradients to the error that their number formats make unavoidable, see `assert_close`.

    Parameters
    ----------
    actual : Gradients
        dq, dk, dv, dsink and dbias of `cupyfa.attention_backward` or its like, NumPy or CuPy arrays, in the layout of
        the case.
    case : BackwardCase
        What they are the gradients of.
    seed : int, optional
        Seed of its arrays.
    context : object, optional
        Printed on failure; the case by default.

    Raises
    ------
    AssertionError
        Names the gradient and its worst element.
    """
    reference, same_precision, floor = expected_gradients(case, seed)
    for name, array in zip(Gradients._fields, actual, strict=True):
        expected = getattr(reference, name)
        if (array is None) != (expected is None):
            raise AssertionError(f"{name}: got {array}, reference {expected}")
        if expected is None:
            continue
        have = to_numpy(array)
        if isinstance(case.forward, Case) and name in ("dq", "dk", "dv"):
            have = as_bshd(have, case.forward.layout)
        yardstick, allowed = getattr(same_precision, name), getattr(floor, name)
        assert_close(have, expected, yardstick, floor=allowed, what=name, context=case if context is None else context)
