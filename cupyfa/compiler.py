"""How kernels are compiled: the option list, which compilers will do, and compilation without a GPU.

On a GPU, CuPy's RawModule compiles and caches (:mod:`cupyfa.kernels`). NVRTC itself needs neither a GPU nor a driver,
so the same sources with the same options compile anywhere: to look at a kernel, to forbid register spills in a test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from cupyfa.errors import CompileError
from cupyfa.sources import amalgamate
from cupyfa.spec import Spec

__all__ = [
    "Compiled",
    "Ptx",
    "PtxasReport",
    "check_versions",
    "compile_key",
    "compile_offline",
    "compile_ptx",
    "first_error",
    "options",
]

MIN_NVRTC = (12, 9)
MIN_CUPY = (14, 2)

# What CuPy adds to the options of a RawModule, except for its own -arch (NVRTC takes the more specific of two) and its
# include directories (an amalgamated source includes nothing).
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


def options(spec: Spec) -> tuple[str, ...]:
    """Return the compiler options of a spec, for RawModule and for NVRTC alike.

    Parameters
    ----------
    spec : Spec
        The kernel.

    Returns
    -------
    tuple of str
        ``-arch`` names the architecture-specific target: WGMMA, setmaxnreg and others do not exist without the ``a``.
        ``--no-cache`` switches NVRTC's own cache off, which gives a kernel without the report of ptxas; CuPy's cache
        keeps the kernel, and we keep the report.
    """
    return ("-std=c++20", f"-arch={spec.arch}", "--ptxas-options=-v", "-lineinfo", "--no-cache")


def compile_key(spec: Spec) -> tuple[str, ...]:
    """Return everything of ours that decides which binary a spec becomes.

    Parameters
    ----------
    spec : Spec
        The kernel.

    Returns
    -------
    tuple of str
        Name expression, options and source text. CuPy adds the versions of the compiler and of itself.
    """
    return (spec.name_expression, *options(spec), amalgamate(spec.entry))


def check_versions(nvrtc: tuple[int, int], cupy: str | None = None) -> None:
    """Refuse compilers that cannot do it.

    Parameters
    ----------
    nvrtc : tuple of int
        Version of NVRTC, (major, minor).
    cupy : str, optional
        Version of CuPy.

    Raises
    ------
    CompileError
        With what to install.
    """
    if nvrtc < MIN_NVRTC:
        extra = "cuda12" if nvrtc[0] <= 12 else "cuda13"
        raise CompileError(
            f"NVRTC {nvrtc[0]}.{nvrtc[1]} is too old: it refuses a second -arch option, and CuPy always adds one. "
            f"NVRTC 12.9 or newer is needed: pip install --upgrade 'cupyfa[{extra}]'"
        )
    if cupy is not None:
        numbers = re.findall(r"\d+", cupy)
        if (int(numbers[0]), int(numbers[1])) < MIN_CUPY:
            raise CompileError(
                f"CuPy {cupy} is too old: it does not cache kernels with name expressions on disk. CuPy 14.2 or newer "
                "is needed: pip install --upgrade 'cupyfa[cuda13]' (or [cuda12])"
            )


@dataclasses.dataclass(frozen=True)
class PtxasReport:
    """What ptxas says about a kernel.

    Attributes
    ----------
    registers : int
        Per thread at launch; setmaxnreg moves them between the roles afterwards.
    spill_bytes : int
        Stores and loads.
    stack_bytes : int
        Local memory of a thread.
    advisories : tuple of str
        Lines such as C7508 (setmaxnreg ignored) and C7510 to C7515 (WGMMA serialised).
    text : str
        The whole log.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    advisories: tuple[str, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> PtxasReport:
        """Return the report of one kernel from the compiler's log."""
        registers = re.search(r"Used (\d+) registers", text)
        if registers is None:
            raise ValueError(f"the compiler's log holds no ptxas report:\n{text}")
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
        stack = [int(n) for n in re.findall(r"(\d+) bytes stack frame", text)]
        advisories = tuple(line.strip() for line in text.splitlines() if re.search(r"\bC7\d\d\d\b|warning", line, re.I))
        return cls(int(registers[1]), sum(spills), max(stack, default=0), advisories, text)


@dataclasses.dataclass(frozen=True)
class Ptx:
    """A kernel as PTX.

    Attributes
    ----------
    spec : Spec
        The kernel.
    ptx : str
        PTX text.
    symbol, traits_symbol : str
        Mangled names of the kernel and of its ``KernelTraits`` object.
    """

    spec: Spec
    ptx: str
    symbol: str
    traits_symbol: str

    @property
    def traits_bytes(self) -> bytes:
        """The ``KernelTraits`` object, from its initialiser in the PTX."""
        match = re.search(rf"{re.escape(self.traits_symbol)}\[(\d+)\] = \{{([^}}]*)\}}", self.ptx)
        if match is None:
            raise CompileError(f"the PTX of {self.spec} has no {self.traits_symbol}")
        return bytes(int(byte) for byte in match[2].split(",")).ljust(int(match[1]), b"\0")  # PTX omits trailing zeros


@dataclasses.dataclass(frozen=True)
class Compiled(Ptx):
    """A kernel compiled to machine code without a GPU.

    Attributes
    ----------
    cubin : bytes
        ELF image.
    report : PtxasReport
        Registers, spills and advisories.
    nvrtc : tuple of int
        Version of the compiler.
    """

    cubin: bytes
    report: PtxasReport
    nvrtc: tuple[int, int]


def first_error(log: str) -> str:
    """Return the line of a compiler log that says what is wrong, or its first line.

    Parameters
    ----------
    log : str
        Of the front end or of ptxas, which names the cause in a line with ``fatal``.

    Returns
    -------
    str
        One line.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    words = ("static assertion failed", ": error", "fatal", "error")
    causes = [line for word in words for line in lines if word in line]
    return (causes or lines or ["no message"])[0]


def compile_offline(spec: Spec) -> Compiled:
    """Compile a kernel with NVRTC alone: no GPU, no driver, no CuPy.

    Parameters
    ----------
    spec : Spec
        The kernel.

    Returns
    -------
    Compiled
        PTX, cubin and the report of ptxas.

    Raises
    ------
    CompileError
        The package ``cuda-bindings`` or NVRTC is missing, NVRTC is too old, or the kernel does not compile.
    """
    with _program(spec, (*options(spec), *CUPY_OPTIONS)) as compiled:
        nvrtc, program, log, (symbol, traits_symbol) = compiled
        return Compiled(
            spec,
            _ptx(nvrtc, program),
            symbol,
            traits_symbol,
            cubin=_text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
            report=PtxasReport.parse(log),
            nvrtc=_call(nvrtc.nvrtcVersion),
        )


def compile_ptx(spec: Spec) -> Ptx:
    """Compile a kernel to PTX, which takes a tenth of the time that machine code does.

    Parameters
    ----------
    spec : Spec
        The kernel.

    Returns
    -------
    Ptx
        What the emulator runs: the same options but for the target, which is the virtual architecture.

    Raises
    ------
    CompileError
        As :func:`compile_offline`.
    """
    virtual = f"-arch={spec.arch.replace('sm_', 'compute_')}"
    flags = (virtual if flag.startswith("-arch=") else flag for flag in options(spec) if "ptxas" not in flag)
    with _program(spec, (*flags, *CUPY_OPTIONS)) as (nvrtc, program, _, (symbol, traits_symbol)):
        return Ptx(spec, _ptx(nvrtc, program), symbol, traits_symbol)


@contextlib.contextmanager
def _program(spec: Spec, flags: tuple[str, ...]) -> Iterator[tuple[Any, Any, str, tuple[str, str]]]:
    """Compile, and keep the program while it is read: nvrtc, the program, its log, the mangled names."""
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 - optional, and only needed here
    except ImportError as error:
        raise CompileError(
            "compiling without a GPU needs the cuda-bindings package: pip install 'cupyfa[compile]'"
        ) from error

    check_versions(_call(nvrtc.nvrtcVersion))
    program = _call(nvrtc.nvrtcCreateProgram, amalgamate(spec.entry).encode(), spec.entry.encode(), 0, None, None)
    try:
        expressions = (spec.name_expression.encode(), b"&" + spec.traits_expression.encode())
        for expression in expressions:
            _call(nvrtc.nvrtcAddNameExpression, program, expression)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{spec} does not compile: {first_error(log)}", spec=spec, log=log)
        symbol, traits_symbol = (_call(nvrtc.nvrtcGetLoweredName, program, e).decode() for e in expressions)
        yield nvrtc, program, log, (symbol, traits_symbol)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _ptx(nvrtc: Any, program: Any) -> str:
    return _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode().rstrip("\0")


def _call(function: Any, *arguments: Any) -> Any:
    """Call a function of cuda-bindings' nvrtc, which returns its status first."""
    status, *values = function(*arguments)
    if status.value != 0:
        raise CompileError(f"{function.__name__}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _text(program: Any, size: Any, get: Any) -> bytes:
    buffer = bytearray(_call(size, program))
    _call(get, program, buffer)
    return bytes(buffer)
