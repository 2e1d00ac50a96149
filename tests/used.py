"""Batches of which each sequence uses a part: a table of cases, their references, and the comparison with them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.oracles import dense, packed
from cupyfa.testing import as_bshd, assert_close, assert_lse_close, random_array, score_magnitude


@dataclasses.dataclass(frozen=True)
class UsedCase:
    """A call of `attention` with lengths. What is behind the keys that are used is NaN, in k and in v."""

    id: str
    seqlen_q: int
    seqlen_k: int
    used_q: tuple[int, ...] | None
    used_k: tuple[int, ...] | None
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    layout: str = "BSHD"
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    sink: bool = False
    alibi: bool = False
    bias: str | None = None  # its dtype; "gathered": float32 where TMA does not take it
    view: str | None = None  # "sliced": k is the beginning of longer rows; "seqlen first": q is (seqlen, batch, ...)

    @property
    def batch(self) -> int:
        return len(self.used_q or self.used_k or ())

    @property
    def lengths(self) -> dict[str, Any]:
        given = {"seqused_q": self.used_q, "seqused_k": self.used_k}
        return {name: np.int32(used) for name, used in given.items() if used is not None}

    @property
    def options(self) -> dict[str, Any]:
        """What is no matrix and no length, as NumPy arrays."""
        options: dict[str, Any] = {"causal": self.causal, "window_size": self.window_size, "softcap": self.softcap}
        if self.sink:
            options["sink"] = random_array((self.heads_q,), np.float32, 11)
        if self.alibi:
            options["alibi_slopes"] = np.abs(random_array((self.batch, self.heads_q), np.float32, 12)) / 8
        if self.bias is not None:
            dtype = np.dtype(np.float32 if self.bias == "gathered" else self.bias)
            options["bias"] = random_array((self.batch, self.heads_q, self.seqlen_q, self.seqlen_k), dtype, 13)
        return options

    def call(self, xp: Any = np) -> dict[str, Any]:
        """All arguments of the call."""
        sizes = (self.seqlen_q, self.heads_q, self.head_dim), (self.seqlen_k, self.heads_kv, self.head_dim)
        sizes += ((self.seqlen_k, self.heads_kv, self.head_dim_v or self.head_dim),)
        matrices = [random_array((self.batch, *size), np.dtype(self.dtype), i) for i, size in enumerate(sizes)]
        for i, used in enumerate(self.used_k or ()):
            for matrix in matrices[1:]:
                matrix[i, max(used, 0) :] = np.nan
        q, k, v = (xp.asarray(x.view(np.uint16)).view(x.dtype) for x in matrices)
        if self.view == "seqlen first":
            q = xp.ascontiguousarray(q.view(np.uint16).swapaxes(0, 1)).view(q.dtype).swapaxes(0, 1)
        if self.view == "sliced":
            longer = xp.zeros((self.batch, self.seqlen_k + 9, *k.shape[2:]), np.uint16)
            longer[:, : self.seqlen_k] = k.view(np.uint16)
            k = longer.view(k.dtype)[:, : self.seqlen_k]
        if self.layout == "BHSD":
            q, k, v = (xp.ascontiguousarray(x.view(np.uint16).swapaxes(1, 2)).view(x.dtype) for x in (q, k, v))
        arrays = self.lengths | self.options
        if self.bias == "gathered":
            arrays["bias"] = np.concatenate([arrays["bias"], np.zeros((*arrays["bias"].shape[:3], 1), np.float32)], -1)
        there = {name: _to(xp, x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
        if self.bias == "gathered":
            there["bias"] = there["bias"][..., :-1]
        return {"q": q, "k": k, "v": v, "layout": self.layout, **there}


def _to(xp: Any, x: Any) -> Any:
    return xp.asarray(x.view(np.uint16)).view(x.dtype) if x.dtype == ml_dtypes.bfloat16 else xp.asarray(x)


USED_CASES = (
    UsedCase("both", 200, 260, (200, 70, 0), (260, 100, 130)),
    UsedCase("keys only", 130, 260, None, (0, 100, 260, 128), head_dim=128),
    UsedCase("rows only", 300, 100, (1, 300, 128), None, head_dim=96, dtype="float16", causal=True),
    UsedCase("beyond both ends", 100, 140, (-3, 101, 100), (141, -1, 7), sink=True),
    UsedCase("heads first", 200, 260, (200, 7, 129), (260, 128, 1), head_dim=128, layout="BHSD", causal=True),
    UsedCase("seqlen first", 150, 200, (150, 20), (130, 200), view="seqlen first", window_size=(40, 10)),
    UsedCase("sliced", 150, 200, (150, 20), (130, 200), view="sliced", softcap=4.0),
    UsedCase("slopes", 150, 200, (150, 20), (130, 200), 6, 3, 256, alibi=True, causal=True),
    UsedCase("other head_dim", 140, 200, (140, 20), (130, 200), head_dim=192, head_dim_v=128),
    UsedCase("bias", 150, 200, (150, 20), (130, 200), bias="float32", causal=True),
    UsedCase("bias of 16 bits", 150, 200, (150, 20), (130, 200), head_dim=128, bias="bfloat16", window_size=(64, 0)),
    UsedCase("gathered bias", 150, 199, (150, 20), (130, 199), bias="gathered", sink=True),
    UsedCase("one row", 1, 300, (1, 0, 1), (300, 200, 1), heads_q=8, head_dim=128, causal=True),
    UsedCase("one key", 140, 1, (140, 3, 5), (1, 1, 0)),
    UsedCase("one sequence", 150, 200, (100,), (128,), layout="BHSD", causal=True),
)


@functools.cache
def reference(case: UsedCase) -> tuple[Any, Any, Any, float]:
    """Output and LSE, the plain algorithm's output, and the magnitude of the scores; in BSHD order."""
    arguments = case.call()
    layout = arguments.pop("layout")
    matrices = {name: as_bshd(arguments.pop(name), layout) for name in "qkv"}
    out, lse = packed.of_batch(**matrices, **arguments, of_sequence=dense.attention)
    plain, _ = packed.of_batch(**matrices, **arguments, of_sequence=dense.same_precision)
    q, k = (np.nan_to_num(matrices[name].astype(np.float32)) for name in "qk")
    return out, lse, plain, score_magnitude(q, k, None, case.softcap)


def hold_to_oracle(case: UsedCase, out: Any, lse: Any) -> None:
    expected, expected_lse, plain, magnitude = reference(case)
    assert_close(as_bshd(out, case.layout), expected, plain, context=case)
    assert_lse_close(lse, expected_lse, score_magnitude=magnitude, context=case)
