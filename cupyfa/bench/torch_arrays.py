"""Arrays of CuPy as tensors of torch that share their memory, and back.

16-bit integers cross the border: not every pair of versions exchanges bfloat16.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from cupyfa.bench.problems import Inputs

__all__ = ["from_torch", "tensors", "to_torch"]


def to_torch(array: Any) -> Any:
    """View a CuPy array as a tensor.

    Parameters
    ----------
    array : cupy.ndarray
        float16, bfloat16 or float32.

    Returns
    -------
    torch.Tensor
        In the same memory.
    """
    torch = importlib.import_module("torch")
    integers = {2: np.int16, 4: np.int32}[array.dtype.itemsize]
    return torch.from_dlpack(array.view(integers)).view(getattr(torch, array.dtype.name))


def from_torch(tensor: Any, dtype: Any) -> Any:
    """View a tensor as a CuPy array.

    Parameters
    ----------
    tensor : torch.Tensor
        Of 16-bit elements; one that is not contiguous is copied.
    dtype : numpy.dtype
        Its dtype in CuPy.

    Returns
    -------
    cupy.ndarray
        Of the same shape.
    """
    import cupy

    torch = importlib.import_module("torch")
    return cupy.from_dlpack(tensor.detach().contiguous().view(torch.int16)).view(dtype)


def tensors(inputs: Inputs) -> tuple[Any, Any, Any]:
    """View the inputs as tensors.

    Parameters
    ----------
    inputs : Inputs
        CuPy arrays.

    Returns
    -------
    tuple of torch.Tensor
        q, k and v, (batch, seqlen, heads, head_dim).
    """
    return to_torch(inputs.q), to_torch(inputs.k), to_torch(inputs.v)
