"""NVRTC without a GPU, for tests that look at more than `cupyfa.compiler` returns."""

from __future__ import annotations

import re
from typing import Any

import pytest

NEEDS_NVRTC = "needs the cuda-bindings and nvidia-cuda-nvrtc packages: pip install 'cupyfa[compile]'"


def import_nvrtc() -> Any:
    """The nvrtc module of cuda-bindings with a library behind it, or a skip."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason=NEEDS_NVRTC)
    try:
        nvrtc.nvrtcVersion()
    except (RuntimeError, ImportError, OSError) as error:
        pytest.skip(f"{NEEDS_NVRTC} ({type(error).__name__}: {error})")
    return nvrtc


def compile_ptx(source: str, *flags: str) -> str:
    """The PTX of a source text."""
    nvrtc = import_nvrtc()

    def call(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (function.__name__, status, log())
        return values[0] if values else None

    def log() -> str:
        (_, size) = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, buffer)
        return buffer.decode()

    (_, program) = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, None, None)
    call(nvrtc.nvrtcCompileProgram, program, len(flags), [flag.encode() for flag in flags])
    ptx = bytearray(call(nvrtc.nvrtcGetPTXSize, program))
    call(nvrtc.nvrtcGetPTX, program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode().rstrip("\0")


def initialiser(ptx: str, symbol: str) -> bytes:
    """The bytes of a variable with an initialiser in PTX, which leaves out trailing zeros."""
    match = re.search(rf"\.b8 \w*{symbol}\w*\[(\d+)\] = \{{([^}}]*)\}}", ptx)
    assert match is not None, f"no {symbol} with bytes in\n{ptx}"
    return bytes(int(byte) for byte in match[2].split(",")).ljust(int(match[1]), b"\0")
