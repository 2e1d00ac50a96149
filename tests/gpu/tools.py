"""What the GPU tests share: calls with guarded outputs, and their comparison with the oracles."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
import pytest

import cupyfa
from cupyfa.oracles import dense
from cupyfa.testing import as_bshd, assert_close, assert_lse_close, guarded_empty, score_magnitude


def attention_guarded(q: Any, k: Any, v: Any, *, layout: str = "BSHD", **options: Any) -> cupyfa.AttentionResult:
    """Run the kernel into poisoned, guarded outputs; inputs and canaries must be as they were."""
    options = {name: on_device(value) for name, value in options.items()}
    arrays = {"q": q, "k": k, "v": v} | {name: x for name, x in options.items() if isinstance(x, cupy.ndarray)}
    before = [bits(x).copy() for x in arrays.values()]
    batch, seqlen_q, heads_q, _ = as_bshd(q, layout).shape
    out = guarded_empty((*q.shape[:3], v.shape[3]), q.dtype, cupy)
    lse = guarded_empty((batch, heads_q, seqlen_q), np.float32, cupy)
    result = cupyfa.attention(q, k, v, layout=layout, return_lse=True, out=out.array, lse=lse.array, **options)
    assert result.out is out.array
    assert result.lse is lse.array
    cupy.cuda.get_current_stream().synchronize()
    out.check("out")
    lse.check("lse")
    for (name, array), old in zip(arrays.items(), before, strict=True):
        assert bool((bits(array) == old).all()), f"{name} has changed"
    return result


def check(q: Any, k: Any, v: Any, out: Any, lse: Any, *, context: object, layout: str = "BSHD", **options: Any) -> None:
    """Hold a result to the oracles; `lse` may be None."""
    Q, K, V, O = (as_bshd(host(x), layout) for x in (q, k, v, out))
    options = {name: host(value) for name, value in options.items()}
    options = {"softmax_scale": None, "causal": False} | options
    reference, reference_lse = dense.attention(Q, K, V, **options)
    plain, _ = dense.same_precision(Q, K, V, **options)
    assert_close(O, reference, plain, context=context)
    if lse is not None:
        magnitude = score_magnitude(Q, K, options["softmax_scale"], options.get("softcap"))
        assert_lse_close(host(lse), reference_lse, score_magnitude=magnitude, context=context)


def host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def on_device(value: Any) -> Any:
    """An array on the GPU; all else as it is."""
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def bits(array: Any) -> Any:
    """The elements as integers, so that NaN equals NaN and 0 is not -0; a view, whatever the strides."""
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def poison(array: Any) -> Any:
    """Fill with NaN, and return the array. By its bits, which every CuPy kernel can write."""
    bits(array).fill(0x7FFF if array.dtype.itemsize == 2 else 0x7FFFFFFF)
    return array


def is_nan(array: Any) -> Any:
    """As numpy.isnan, by the bits."""
    infinity = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}[array.dtype.name]
    return (bits(array) & (0x7FFF if array.dtype.itemsize == 2 else 0x7FFFFFFF)) > infinity


def assign(target: Any, source: Any) -> None:
    """As ``target[...] = source`` for equal dtypes."""
    bits(target)[...] = bits(source)


def take(array: Any, index: Any, axis: int) -> Any:
    """As numpy.take, on the CPU."""
    return host(bits(array).take(cupy.asarray(index), axis=axis).view(array.dtype))


def require_memory(gibibytes: int) -> None:
    """Skip the test where the GPU has less."""
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory, there are {free / 2**30:.1f}")


def same_bits(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((bits(a) == bits(b)).all())


_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}
"""


def spin(cycles: int = 400_000_000) -> None:
    """Keep the current stream busy for so many cycles: about 0.2 s, unless it is told otherwise."""
    cupy.RawKernel(_SPIN, "spin")((1,), (1,), (np.int64(cycles),))


@contextmanager
def no_allocation() -> Iterator[None]:
    """Fail if CuPy allocates device memory."""

    class Hook(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "no_allocation"

        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def malloc_preprocess(self, **arguments: Any) -> None:
            self.sizes.append(arguments["size"])

    hook = Hook()
    with hook:
        yield
    assert hook.sizes == [], f"allocated {hook.sizes} bytes"


def elf_sections(image: bytes) -> dict[str, bytes]:
    """Sections of a 64-bit little-endian ELF image by name."""
    assert image[:6] == b"\x7fELF\x02\x01"
    (offset,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, offset + i * size) for i in range(count)]
    strings = image[headers[names][4] :]
    sections = {}
    for name, kind, _, _, begin, length in headers:
        content = b"" if kind == 8 else image[begin : begin + length]  # 8: SHT_NOBITS occupies no bytes
        sections[strings[name : strings.index(b"\0", name)].decode()] = content
    return sections
