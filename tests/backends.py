"""What can run a kernel in a test: the emulator under each of its schedules, and a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupyfa
from cupyfa import emulate
from cupyfa.emulator import POLICIES
from cupyfa.testing import guarded_empty


@dataclasses.dataclass(frozen=True)
class Backend:
    """A schedule of the emulator, or the device (no policy)."""

    policy: str | None
    seed: int = 0

    def __str__(self) -> str:
        return "device" if self.policy is None else f"{self.policy}-{self.seed}"

    def attention(self, q: Any, k: Any, v: Any, *, sms: int = 1, **options: Any) -> tuple[Any, Any]:
        """Output and LSE of the kernel, from poisoned outputs between canaries; a hazard fails the test."""
        axes = (0, 1, 2) if options.get("layout") == "BHSD" else (0, 2, 1)
        lse_shape = tuple(q.shape[axis] for axis in axes)
        if self.policy is None:
            return self._on_device(q, k, v, lse_shape, options)
        out, lse = guarded_empty((*q.shape[:3], v.shape[3]), q.dtype, np), guarded_empty(lse_shape, np.float32, np)
        prepared = emulate.prepare(q, k, v, out=out.array, lse=lse.array, sms=sms, **options)
        run = prepared.launch(policy=self.policy, seed=self.seed, strict_warpgroup=True, max_instructions=20_000_000)
        assert run.verdict == "clean", run
        out.check("out")
        lse.check("lse")
        return out.array, lse.array

    @staticmethod
    def _on_device(q: Any, k: Any, v: Any, lse_shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        import cupy

        # CuPy has no bfloat16 constructor: the bits travel as integers.
        arrays = [cupy.asarray(x.view(np.uint16)).view(x.dtype) for x in (q, k, v)]
        out, lse = guarded_empty((*q.shape[:3], v.shape[3]), q.dtype, cupy), guarded_empty(lse_shape, np.float32, cupy)
        options = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        cupyfa.attention(*arrays, out=out.array, lse=lse.array, **options)
        cupy.cuda.get_current_stream().synchronize()
        out.check("out")
        lse.check("lse")
        return out.array.view(np.uint16).get().view(q.dtype), lse.array.get()


BACKENDS = [
    *(Backend(policy) for policy in POLICIES),
    pytest.param(Backend(None), marks=pytest.mark.gpu),
]
