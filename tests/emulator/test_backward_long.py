"""Kernels beside that of gradients, where a head has more than 2^31 vectors: one CTA, far behind the first one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from nvrtc_tools import import_nvrtc

from cupyfa import compiler
from cupyfa._backward import PostprocessPacking, PreprocessPacking
from cupyfa.emulate import kernel_of
from cupyfa.emulator import EmulatedDevice, Run
from cupyfa.spec import DType, PostprocessSpec, PreprocessSpec

ROWS, HEAD_DIM = 64, 256  # rows of a CTA
FIRST = 2**25  # row: in front of it are 2^31 vectors of 16 bytes
CTA = FIRST // ROWS
LSE, CANARY = 3.0, 7.0


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


class Window(NamedTuple):
    """The part of a long array that the CTA writes, and something in front of it and behind it."""

    array: NDArray[np.float32]
    address: int  # of the whole array, of which nothing else exists

    @classmethod
    def of(cls, device: EmulatedDevice, name: str, row: int) -> Window:
        """With this many numbers in a row of the array."""
        array = np.full((3, ROWS * row), CANARY, np.float32)
        return cls(array, (device.register(array, name=name) - (CTA - 1) * array[0].nbytes) % 2**64)

    def written(self) -> NDArray[np.float32]:
        """What the CTA has written."""
        np.testing.assert_array_equal(self.array[[0, 2]], CANARY)
        return self.array[1]


def run_far_cta(device: EmulatedDevice, spec: PreprocessSpec | PostprocessSpec, params: bytes) -> Run:
    """Run CTA number `CTA` alone: the emulator would take days to get there."""
    compiled = compiler.compile_ptx(spec)
    text = compiled.ptx.replace("%ctaid.x", str(CTA))
    assert text != compiled.ptx
    kernel, traits = device.load(text).kernel(compiled.symbol), kernel_of(spec)[1]
    return kernel.launch(grid=1, block=traits["threads"], shared=traits["shared_bytes"], params=params)


def test_rows_behind_2_31_vectors_are_prepared() -> None:
    device = EmulatedDevice()
    matrix, of_rows = np.ones((1, HEAD_DIM), np.float16), np.full(1, LSE, np.float32)
    lse_log2, delta, dq = (Window.of(device, name, n) for name, n in (("lse_log2", 1), ("delta", 1), ("dq", HEAD_DIM)))
    packing = PreprocessPacking(
        out_strides=(0, 0, 0, 1),  # all rows are one
        dout_strides=(0, 0, 0, 1),
        lse_strides=(0, 0, 0, 0),
        dlse_strides=(0, 0, 0, 0),
        bias_strides=(0, 0, 0, 0),
        sink_stride=0,
        dq_head=(FIRST + 2 * ROWS) * HEAD_DIM,
        turns_head=0,
        tile_m=ROWS,
        lse_factor=float(np.log2(np.e)),
        bias_float32=False,
        seqlen_q=FIRST + ROWS + 5,
        rows=FIRST + 2 * ROWS,
        head_dim_v=HEAD_DIM,
        heads_q=1,
    )
    at_matrix, at_rows = (device.register(x, writable=False) for x in (matrix, of_rows))
    addresses = (at_matrix, at_matrix, at_rows, 0, 0, lse_log2.address, delta.address, *[0] * 3, dq.address, *[0] * 4)
    run = run_far_cta(device, PreprocessSpec(DType.FLOAT16), packing.pack(addresses, vectors=True))
    assert run.verdict == "clean", str(run)
    np.testing.assert_array_equal(dq.written(), 0)
    np.testing.assert_array_equal(delta.written(), HEAD_DIM)
    np.testing.assert_allclose(lse_log2.written(), LSE * np.log2(np.e), rtol=1e-6)


def test_sums_behind_2_31_vectors_are_rounded() -> None:
    device = EmulatedDevice()
    sums = Window.of(device, "sums", HEAD_DIM)
    sums.array[1] = 3.0
    out = np.full((3, ROWS, HEAD_DIM), CANARY, np.float16)
    packing = PostprocessPacking(
        out_strides=(0, HEAD_DIM, 0, 1),
        scale=0.5,
        parts=1,
        part_stride=0,
        seqlen=FIRST + 2 * ROWS,
        head_dim=HEAD_DIM,
        heads=1,
        tiles=CTA + 2,
    )
    at_out = (device.register(out, name="out") - (CTA - 1) * out[0].nbytes) % 2**64
    spec = PostprocessSpec(dtype=DType.FLOAT16, head_dim=HEAD_DIM, tile_m=ROWS)
    run = run_far_cta(device, spec, packing.pack((sums.address, at_out, 0, 0, 0), vectors=True))
    assert run.verdict == "clean", str(run)
    np.testing.assert_array_equal(out[[0, 2]], CANARY)
    np.testing.assert_array_equal(out[1], 1.5)
