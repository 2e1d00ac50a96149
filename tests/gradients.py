"""What the tests of gradients share: calls with guarded outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyfa
from cupyfa.oracles.backward import dbias_shape
from cupyfa.testing import BackwardCase, Guarded, guarded_empty


def guarded_gradients(arrays: dict[str, Any], options: dict[str, Any], xp: Any = np) -> dict[str, Guarded]:
    """Poisoned outputs between canaries, by the names of the arguments."""
    like = {name: arrays[name] for name in "qkv"} | {
        name: options[name] for name in ("sink", "bias") if name in options
    }
    shapes = {name: dbias_shape(x) if name == "bias" else x.shape for name, x in like.items()}
    return {f"d{name}": guarded_empty(shapes[name], x.dtype, xp) for name, x in like.items()}


def call(case: BackwardCase, **more: Any) -> Any:
    """The gradients of a case in guarded outputs, which are returned themselves and are all that is written."""
    arrays, options = case.make_arrays(), case.call_options
    before = {name: x.copy() for name, x in arrays.items()}
    function = cupyfa.attention_varlen_backward if case.packed else cupyfa.attention_backward
    guarded = guarded_gradients(arrays, options)
    outputs = {name: x.array for name, x in guarded.items()}
    result = function(**arrays, **options, **outputs, **more)
    for name, array in result._asdict().items():
        assert array is outputs.get(name)
    for name, x in guarded.items():
        x.check(name)
    for name, x in arrays.items():
        np.testing.assert_array_equal(x.view(np.uint8), before[name].view(np.uint8))
    return result
