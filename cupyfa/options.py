"""The options of a call that are not arrays: every check on them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import numpy as np

from cupyfa.errors import UnsupportedError, type_name
from cupyfa.operand import LAYOUTS, Layout

__all__ = ["Options", "WindowSize", "check_flag", "check_max_seqlen", "check_options", "with_max_seqlen"]

#: How many keys to the left and to the right of its own a query sees; None: all.
WindowSize = tuple[int | None, int | None]

_LARGEST = float(np.finfo(np.float32).max) / math.log2(math.e)  # the kernel multiplies by log2(e)
_LARGEST_SOFTCAP = 1000.0
_SMALLEST = float(np.finfo(np.float32).tiny)
_UNBOUNDED = (None, None)


class Options(NamedTuple):
    """Checked options; equal options are equal keys.

    Attributes
    ----------
    softmax_scale : float or None
        None: 1/sqrt(head_dim).
    left, right : int or None
        Sides of the window, causal or not; None: unbounded.
    softcap : float or None
        None: off.
    layout : {"BSHD", "BHSD"}
        Of q, k, v and out.
    max_seqlen_q, max_seqlen_k : int or None
        What the caller expects of packed sequences: the first for the choice of a kernel, both for the size of a bias.
    """

    softmax_scale: float | None = None
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    layout: Layout = "BSHD"
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


_PLAIN, _CAUSAL = Options(), Options(right=0)


def check_options(
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = _UNBOUNDED,
    softcap: Any = None,
    layout: Any = "BSHD",
) -> Options:
    """Check the options that are not arrays.

    Parameters
    ----------
    softmax_scale, causal, window_size, softcap, layout
        As in :func:`cupyfa.attention`.

    Returns
    -------
    Options
        The same, in one form.

    Raises
    ------
    TypeError, ValueError
        Naming the option.

    Examples
    --------
    >>> check_options(causal=True, window_size=(128, None))
    Options(softmax_scale=None, left=128, right=0, softcap=None, layout='BSHD', max_seqlen_q=None, max_seqlen_k=None)
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"attention: layout is {layout!r}; it must be 'BSHD' or 'BHSD'")
    plain = softmax_scale is None and softcap is None and layout == "BSHD" and _is_unbounded(window_size)
    if plain and type(causal) is bool:
        return _CAUSAL if causal else _PLAIN  # the usual call
    check_flag("causal", causal)
    left, right = _window(window_size)
    scale = None if softmax_scale is None else _scale(softmax_scale)
    cap = None if softcap is None else _softcap(softcap)
    if scale is not None and cap is not None and abs(scale) / cap > _LARGEST / 2:  # by twice of it
        raise ValueError(
            f"attention: softcap is {softcap!r} with a softmax_scale of {softmax_scale!r}; softmax_scale / softcap "
            f"must be at most {_LARGEST / 2:.4g}"
        )
    return Options(scale, left, 0 if causal else right, cap, cast("Layout", layout))


def check_flag(name: str, value: Any) -> bool:
    """Check that an option is a bool.

    Parameters
    ----------
    name : str
        The argument.
    value
        As the user passed it.

    Returns
    -------
    bool
        The same.

    Raises
    ------
    TypeError
        It is not.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"attention: {name} is {value!r}; it must be True or False")
    return bool(value)


def check_max_seqlen(name: str, value: Any) -> int | None:
    """Check the length of the longest sequence.

    Parameters
    ----------
    name : str
        The argument.
    value
        As in :func:`cupyfa.attention_varlen`.

    Returns
    -------
    int or None
        The same.

    Raises
    ------
    TypeError, ValueError
        It is not an integer, or negative.
    """
    if value is None or (type(value) is int and value >= 0):
        return value
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"attention: {name} is {value!r}; it must be an integer or None")
    if value < 0:
        raise ValueError(f"attention: {name} is {value}; it must be at least 0")
    return int(value)


def with_max_seqlen(options: Options, max_seqlen_q: Any, max_seqlen_k: Any, biased: bool) -> Options:
    """Return options with the lengths of the longest sequences.

    Parameters
    ----------
    options : Options
        Checked.
    max_seqlen_q, max_seqlen_k
        As in :func:`cupyfa.attention_varlen`.
    biased : bool
        Whether there is a bias. Without one nothing depends on the longest keys, and neither should the options, which
        are a key.

    Returns
    -------
    Options
        Checked.

    Raises
    ------
    TypeError, ValueError
        As `check_max_seqlen`.
    """
    of_q, of_k = check_max_seqlen("max_seqlen_q", max_seqlen_q), check_max_seqlen("max_seqlen_k", max_seqlen_k)
    return Options(*options[:-2], of_q, of_k if biased else None)  # _replace takes four times as long


def _is_unbounded(window_size: Any) -> bool:
    return type(window_size) is tuple and len(window_size) == 2 and window_size[0] is None and window_size[1] is None


def _window(window_size: Any) -> WindowSize:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"attention: window_size is {window_size!r}; it must be a pair (left, right)")
    for side in window_size:
        if side is not None and (not isinstance(side, (int, np.integer)) or isinstance(side, bool)):
            raise TypeError(f"attention: window_size is {window_size!r}; each side must be an integer or None")
        if side is not None and side < -1:
            raise ValueError(
                f"attention: window_size is {window_size!r}; each side must be at least 0, or None or -1 for no bound"
            )
    left, right = (None if side is None or side == -1 else int(side) for side in window_size)
    return left, right


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise TypeError(f"attention: {name} is a {type_name(type(value))}; it must be a number or None")
    try:
        return float(value)
    except OverflowError:  # an int beyond float64; the check of the magnitude says what is allowed
        return math.inf if value > 0 else -math.inf


def _scale(softmax_scale: Any) -> float:
    scale = _number("softmax_scale", softmax_scale)
    if not abs(scale) <= _LARGEST:  # NaN compares false
        raise ValueError(f"attention: softmax_scale is {scale}; it must be finite, and at most {_LARGEST:.4g}")
    return scale


def _softcap(softcap: Any) -> float:
    cap = _number("softcap", softcap)
    if not _SMALLEST <= cap < math.inf:
        raise ValueError(
            f"attention: softcap is {cap}; it must be positive, at least {_SMALLEST:.4g}, or None for no cap"
        )
    if cap > _LARGEST_SOFTCAP:  # c (tanh(x) - 1) + c loses what is small beside c
        raise UnsupportedError(
            f"attention: softcap is {cap}; supported are at most {_LARGEST_SOFTCAP:g}: beyond, float32 would show its "
            "rounding in the output"
        )
    return cap
