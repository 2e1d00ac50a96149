"""A call of attention by its shapes: its options, and its arrays as the checks see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyfa.operand import Operand
from cupyfa.options import Options, check_max_seqlen, check_options, with_max_seqlen

__all__ = ["options_and_operands"]

_ARGUMENTS = (
    "q",
    "k",
    "v",
    "dtype",
    "sink",
    "alibi_slopes",
    "bias",
    "bias_dtype",
    "seqused_q",
    "seqused_k",
    "sequences",
    "max_seqlen_q",
    "max_seqlen_k",
    "config",
)
_OPTIONS = ("softmax_scale", "causal", "window_size", "softcap", "layout")


def options_and_operands(number: int, call: Mapping[str, Any]) -> tuple[Options, dict[str, Operand]]:
    """Return what a call is, but for its outputs.

    Parameters
    ----------
    number : int
        Of the call, for messages.
    call : Mapping
        As for :func:`cupyfa.warmup`.

    Returns
    -------
    options : Options
        Checked.
    operands : dict
        By the names of the arguments: contiguous, on device 0.

    Raises
    ------
    TypeError, ValueError
        Something is missing, or is no option.
    """
    for name in ("q", "k", "dtype"):
        if name not in call:
            raise TypeError(f"warmup: call {number} has no {name}; it needs the shapes q and k, and a dtype")
    for name in call:
        if name not in (*_ARGUMENTS, *_OPTIONS):
            known = ", ".join((*_ARGUMENTS, *_OPTIONS))
            raise TypeError(
                f"warmup: call {number} has {name}; its arguments are {known}, and for gradients dout, deterministic"
            )
    options = check_options(**{name: call[name] for name in _OPTIONS if name in call})
    biased = call.get("bias") is not None
    options = with_max_seqlen(options, call.get("max_seqlen_q"), call.get("max_seqlen_k"), biased)
    shapes = {"q": call["q"], "k": call["k"], "v": call.get("v", call["k"])}
    sequences = check_max_seqlen("sequences", call.get("sequences"))
    axes = "4 axes, or 3 and sequences beside it" if sequences is None else "3 axes, because there are sequences"
    for name, shape in shapes.items():
        if not isinstance(shape, (tuple, list)):
            raise TypeError(f"warmup: call {number}: {name} is {shape!r}; it must be a shape")
        if len(shape) != (4 if sequences is None else 3):
            raise ValueError(f"warmup: call {number}: {name} has shape {tuple(shape)}; it must have {axes}")
    operands = {name: Operand.contiguous(name, tuple(shape), call["dtype"], 0) for name, shape in shapes.items()}
    if sequences is not None:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            operands[name] = Operand.contiguous(name, (sequences + 1,), np.int32, 0)
    packed = sequences is not None
    heads = operands["q"].shape[-2] if packed else operands["q"].in_bshd(options.layout).shape[2]
    for name in ("sink", "alibi_slopes"):
        if call.get(name):
            operands[name] = Operand.contiguous(name, (heads,), np.float32, 0)
    batch = sequences if sequences is not None else operands["q"].shape[0]
    for name in ("seqused_q", "seqused_k"):
        if call.get(name):
            operands[name] = Operand.contiguous(name, (batch,), np.int32, 0)
    if biased:
        operands["bias"] = Operand.contiguous("bias", tuple(call["bias"]), call.get("bias_dtype", np.float32), 0)
    return options, operands
