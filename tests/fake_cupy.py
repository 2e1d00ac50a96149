"""A CuPy whose device memory is the host's, to follow a call up to its launch without a GPU."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest


class Array:
    """As much of `cupy.ndarray` as a call uses; `host` is the same memory as an array of NumPy."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "nbytes", "ndim", "shape", "size", "strides"):
            return getattr(self.host, name)
        raise AttributeError(name)

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.host.ctypes.data, device_id=0)

    def get(self) -> Any:
        return self.host.copy()

    def view(self, dtype: Any) -> Array:
        return Array(self.host.view(dtype))

    def reshape(self, shape: tuple[int, ...]) -> Array:
        assert self.host.flags.c_contiguous  # or it would be a copy
        return Array(self.host.reshape(shape))

    def __getitem__(self, index: Any) -> Array:
        return Array(self.host[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.host[index] = value.host if isinstance(value, Array) else value


class Stream:
    """The only stream: number 7."""

    ptr = 7
    capturing = False

    def is_capturing(self) -> bool:
        return self.capturing


def empty(shape: Any, dtype: Any) -> Array:
    return Array(np.empty(shape, dtype))


def install(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Be `cupy` for the rest of a test; returns the current stream."""
    stream = Stream()
    module: Any = types.ModuleType("cupy")
    module.ndarray, module.empty = Array, empty
    runtime = types.SimpleNamespace(getDevice=lambda: 0)
    module.cuda = types.SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return stream
