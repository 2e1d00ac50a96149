"""What the arrays of a random problem hold."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from hard_scores import FINITE, harden

from cupyfa.testing import random_array

_KINDS = ("normal", "normal", "normal", "sparse", "sparse", "sparse", *FINITE)
#: By which factor a kind makes scores larger, at most.
_GROWTH = {"growing": 41.0, "steps": 130.0, "jumps": 30.0, "huge": 50.0}
#: Of scores in units of those that normal inputs have with the default scale. Beyond, their rounding in float32 shows
#: in a probability of the type, and which way it goes is a matter of the order of additions.
_LARGEST = {"float16": 64.0, "bfloat16": 512.0}


@dataclass(frozen=True)
class Values:
    """How the arrays of a problem are made."""

    kind: str
    amplitude: float  # of q and k
    amplitude_v: float  # and of dout
    special: tuple[str, float] | None  # an array and what one of its elements is
    seed: int

    def make(self, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, np.dtype[Any]]) -> dict[str, Any]:
        """Values for each of these arrays."""
        made = {}
        for number, (name, shape) in enumerate(shapes.items()):
            seed = 16 * self.seed + number
            if name in ("out", "lse"):
                made[name] = np.full(shape, np.nan, dtypes[name])
            elif name in ("sink", "alibi_slopes"):
                made[name] = self._of_heads(name, shape, seed)
            elif name == "bias":
                made[name] = _of_scores(shape, seed).astype(dtypes[name])
            elif self.kind == "sparse":  # small integers, most of them 0: sums are exact, a block left out is gross
                made[name] = np.trunc(random_array(shape, np.float32, seed, amplitude=1.2)).astype(dtypes[name])
            else:
                amplitude = self.amplitude_v if name in ("v", "dout") else self.amplitude
                made[name] = random_array(shape, dtypes[name], seed, amplitude=amplitude)
        if self.kind in FINITE and made["k"].size:
            of_batch = [made[name][(None,) * (4 - made[name].ndim)] for name in "qk"]  # packed ones have three axes
            for name, x in zip("qk", harden(self.kind, *of_batch), strict=True):
                made[name] = x.reshape(made[name].shape)
        if self.special is not None:
            name, value = self.special
            made[name].reshape(-1)[self.seed % made[name].size] = value
        return made

    def _of_heads(self, name: str, shape: tuple[int, ...], seed: int) -> Any:
        values = random_array(shape, np.float32, seed)
        if name == "alibi_slopes":  # from far below to far above what scores vary by; a few are negative
            return np.exp2(4 * values - 4) * np.where(values > 1.5, -1, 1).astype(np.float32)
        return np.select([values > 1.5, values < -1.5], [np.float32(40), np.float32(-np.inf)], 3 * values)


def _of_scores(shape: tuple[int, ...], seed: int) -> Any:
    """As large as scores; some of them hide a key, and some rows have no other."""
    values = random_array(shape, np.float32, seed)
    rows = random_array((*shape[:-1], 1), np.float32, seed + 8)
    return np.where((values > 1.5) | (rows > 1.7), np.float32(-np.inf), 3 * values)


def draw_values(choice: random.Random, dtype: str, scale: float, *, empty: bool) -> Values:
    """Draw how arrays are made.

    `scale` is that of the scores in units of the default one. Arrays that are `empty` have no element to be special.
    """
    kind = choice.choice(_KINDS)
    largest = _LARGEST[dtype] / (_GROWTH.get(kind, 1.0) * max(abs(scale), 0.01))
    special = None
    if not empty and choice.random() < 0.15:
        # A scale of 0 stands for a tiny one: infinity times it is infinite.
        special = choice.choice(("q", "k", "v") if scale else ("v",)), choice.choice((math.nan, math.inf, -math.inf))
    amplitude = min(choice.choice((0.1, 1.0, 1.0, 4.0, 8.0, 20.0)), math.sqrt(largest))
    return Values(kind, amplitude, choice.choice((1.0, 1.0, 1.0, 10.0)), special, choice.randrange(2**40))
