"""A GPU that is none: NumPy stands for CuPy."""

import contextlib
import sys
import types

import numpy as np


def fake_cupy(capability):
    """What tells whether kernels can run here; None: there is no device."""
    device = types.SimpleNamespace(compute_capability=capability, pci_bus_id="0000:01:00.0")
    cuda = types.SimpleNamespace(is_available=lambda: capability is not None, Device=lambda: device)
    return types.SimpleNamespace(cuda=cuda)


def install_fake_gpu(monkeypatch):
    """Make arrays of NumPy, without torch and without a clock that can be read."""
    cupy = fake_cupy("90")
    cupy.cuda.Stream = types.SimpleNamespace(null=contextlib.nullcontext())
    for name in ("empty", "arange", "asarray"):
        setattr(cupy, name, getattr(np, name))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
