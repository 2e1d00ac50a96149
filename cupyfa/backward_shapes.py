"""A call for gradients by its shapes: which kernels it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyfa.backward_plan import backward_specs
from cupyfa.backward_problem import BackwardArrays, BackwardProblem
from cupyfa.backward_select import backward_config, select_backward
from cupyfa.call_shapes import options_and_operands
from cupyfa.operand import Operand
from cupyfa.options import check_flag
from cupyfa.select import Device
from cupyfa.spec import Spec

__all__ = ["specs_of_backward_call"]

#: Beside those of the forward call.
_ARGUMENTS = ("dout", "deterministic")


def specs_of_backward_call(number: int, call: Mapping[str, Any], device: Device) -> tuple[Spec, ...]:
    """Return the kernels of a call.

    Parameters
    ----------
    number : int
        Of the call, for messages.
    call : Mapping
        As for :func:`cupyfa.warmup`, with ``dout``.
    device : Device
        The GPU.

    Returns
    -------
    tuple of spec
        In the order in which they are launched.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As the call would.
    """
    deterministic = check_flag("deterministic", call.get("deterministic", False))
    forward = {name: value for name, value in call.items() if name not in _ARGUMENTS}
    options, operands = options_and_operands(number, forward)
    if not isinstance(call["dout"], (tuple, list)):
        raise TypeError(f"warmup: call {number}: dout is {call['dout']!r}; it must be a shape, that of the output")
    q = operands["q"]
    for name in ("dout", "out"):
        operands[name] = Operand.contiguous(name, tuple(call["dout"]), q.dtype, 0)
    of_rows: tuple[int, ...] = (q.shape[-2], q.shape[0])
    if "cu_seqlens_q" not in operands:
        batch, seqlen, heads, _ = q.in_bshd(options.layout).shape
        of_rows = (batch, heads, seqlen)
    operands["lse"] = Operand.contiguous("lse", of_rows, np.float32, 0)
    problem = BackwardProblem.of(BackwardArrays(**operands), options, deterministic=deterministic, current_device=0)
    return backward_specs(problem, select_backward(problem, device, backward_config(call.get("config"))))
