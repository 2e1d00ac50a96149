"""Whether there is a GPU."""

from __future__ import annotations

import functools


@functools.cache
def why_no_gpu() -> str | None:
    """Why GPU tests cannot run here; None where they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None if count else "no CUDA device"
