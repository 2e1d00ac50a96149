"""FlashAttention-4's forward kernels for the peer test: have them compiled, pack their parameters, run them.

The kernels are compiled on demand by `fa4_dump.py`, in this interpreter or in the one that `CUPYFA_FA4_PYTHON` names.
Only their interface is known here: what each parameter means, the grid, and what their host code writes into a tensor
map. How they compute is what the emulator has to find out from their PTX.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyfa.emulator.device import EmulatedDevice
from cupyfa.testing import Case

DUMP = Path(__file__).with_name("fa4_dump.py")
OTHER_PYTHON = os.environ.get("CUPYFA_FA4_PYTHON")
PYTHON = OTHER_PYTHON or sys.executable
QUERIES_PER_CTA = 256  # two tiles of 128 rows
L2_BYTES = 50 << 20  # what the longest-first order takes the L2 cache to be


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter that has the packages, which warn about much; another one must not see this one's modules."""
    command = [PYTHON, "-W", "ignore", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or not OTHER_PYTHON}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=environment)


@functools.cache
def why_unavailable() -> str | None:
    """Why the kernels cannot be compiled; None where they can."""
    code = "import flash_attn.cute.flash_fwd_sm100, cutlass, torch; from torch._subclasses import FakeTensorMode"
    try:
        attempt = _python("-c", code)
    except OSError as error:
        return f"CUPYFA_FA4_PYTHON={PYTHON} cannot be run: {error}"
    if attempt.returncode == 0:
        return None
    error = attempt.stderr.strip().rpartition("\n")[2]
    return f"needs flash-attn-4, in this interpreter or in the one that CUPYFA_FA4_PYTHON names; {PYTHON}: {error}"


def compile_kernels(folder: Path, names: list[str]) -> None:
    """Have kernels of one CTA count compiled into a folder."""
    attempt = _python(str(DUMP), str(folder), *names)
    assert attempt.returncode == 0, f"{' '.join(attempt.args)}:\n{attempt.stderr[-4000:]}"


def divisor(value: int) -> bytes:
    """The precomputed unsigned division by a number: ``{u32 value, u32 multiplier, u8 shift1, u8 shift2, 2 bytes}``.

    With ``high`` the upper half of ``multiplier * n``, the quotient is ``(high + (n - high >> shift1)) >> shift2``
    (T. Granlund and P. Montgomery, Division by invariant integers using multiplication, 1994, figure 4.1).
    """
    bits = (value - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << bits) - value)) // value + 1
    return struct.pack("<IIBB2x", value, multiplier, min(bits, 1), max(bits - 1, 0))


def coordinates(array: np.ndarray, order: str = "sdhb") -> bytes:
    """The extents of a (batch, seqlen, heads, head_dim) array in another order of its axes."""
    return struct.pack("<4i", *(array.shape["bshd".index(axis)] for axis in order))


@dataclass(frozen=True)
class Result:
    """What a run left behind: the outputs, and the emulator's own account of it."""

    out: np.ndarray
    lse: np.ndarray
    run: Any


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its PTX, and the description that `fa4_dump.py` wrote beside it."""

    ptx: str
    description: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> Kernel:
        text = folder.joinpath(f"{name}.json").read_text()
        return cls(folder.joinpath(f"{name}.ptx").read_text(), json.loads(text))

    @property
    def ctas(self) -> int:
        return int(self.description["cluster"][0])

    def run(self, case: Case, *, sms: int, **options: Any) -> Result:
        """Run the kernel in the emulator on the inputs of a case; `options` go to the launch."""
        device = EmulatedDevice("sm_100a", sms=sms)
        q, k, v = case.make_inputs()
        out = np.full_like(q, np.nan)
        lse = np.full((case.batch, case.heads_q, case.seqlen_q), np.nan, dtype=np.float32)
        arrays = {"q": q, "k": k, "v": v, "out": out}
        addresses = {name: device.register(array, name=name, writable=name == "out") for name, array in arrays.items()}
        lse_address = device.register(lse, name="lse", writable=True)
        values = {
            f"{name}_shape": coordinates(array, "dshb" if name == "v" else "sdhb") for name, array in arrays.items()
        }
        for name, array in arrays.items():
            values[f"{name}_map"] = self._tensor_map(device, f"{name}_map", addresses[name], array, case.dtype)
        strides = (case.seqlen_q, case.heads_q * case.seqlen_q)
        values["lse"] = struct.pack("<Q3i4x2q", lse_address, *lse.shape[::-1], *strides)
        values["scale_log2"] = struct.pack("<f", math.log2(math.e) / math.sqrt(case.head_dim))
        schedule = self._schedule(case)
        values |= {name: struct.pack("<i", value) for name, value in schedule.items()}
        values |= {f"{name}_divisor": divisor(value) for name, value in schedule.items() if value}
        run = device.load(self.ptx).launch(
            self.description["entry"],
            grid=(self._ctas_launched(schedule["tiles"], sms), 1, 1),
            block=tuple(self.description["block"]),
            cluster=tuple(self.description["cluster"]),
            shared=self.description["dynamic_shared"],
            # They leave out tcgen05.wait::ld and tcgen05.fence in places: ptxas makes no instruction of these.
            lenient_tcgen05=True,
            params=[self._pack(parameter, values) for parameter in self.description["parameters"]],
            **options,
        )
        return Result(out, lse, run)

    @staticmethod
    def _pack(parameter: dict[str, Any], values: dict[str, bytes]) -> bytes:
        """The bytes of one parameter; the ones that no instruction reads are zero."""
        name, size = parameter["name"], parameter["size"]
        value = bytes(size) if name.startswith("unused") else values[name]
        assert len(value) == size, (parameter, value)
        return value

    def _tensor_map(self, device: EmulatedDevice, name: str, address: int, array: np.ndarray, dtype: str) -> bytes:
        """The tensor map over (head_dim, seqlen, heads, batch), with the box that the kernel was compiled for."""
        (box,) = (parameter["box"] for parameter in self.description["parameters"] if parameter["name"] == name)
        order = (3, 1, 2, 0)
        return device.tensor_map(
            address,
            dtype=dtype,
            shape=tuple(array.shape[axis] for axis in order),
            strides=tuple(array.strides[axis] for axis in order[1:]),
            box=tuple(box),
            swizzle=128,
        )

    def _schedule(self, case: Case) -> dict[str, int]:
        """The numbers that the tile scheduler takes, some of them also as divisors."""
        blocks = -(-case.seqlen_q // (QUERIES_PER_CTA * self.ctas))
        pairs = case.heads_q * case.batch
        values = {"blocks": blocks, "heads": case.heads_q, "batch": case.batch, "tiles": blocks * pairs, "splits": 1}
        # The longest-first order walks a section at a time: as many heads as have their K and V in the L2 cache.
        section = 1 << (max(1, L2_BYTES // (case.seqlen_k * 2 * case.head_dim * 2)).bit_length() - 1)
        return values | {
            "section": section,
            "section_blocks": section * blocks,
            "residual": max(pairs % section, 1),
            "whole_sections": pairs // section,
        }

    def _ctas_launched(self, tiles: int, sms: int) -> int:
        """The grid: persistent CTAs, as many as there are multiprocessors, or one CTA (or pair) for each tile."""
        if self.description["scheduler"] == "persistent":
            tiles = min(tiles, sms // self.ctas)
        return tiles * self.ctas
