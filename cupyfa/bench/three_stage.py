"""What the compiler makes of the three-stage kernel, tile by tile: ``python -m cupyfa bench ablation --registers``.

The third stage keeps a second S (arXiv 2407.08608, appendix B.3), so the question is which tiles have registers for it.
That needs NVRTC, and no GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from cupyfa.compiler import Compiled, compile_offline
from cupyfa.spec import Bias, DType, FwdSpec, Scheduler

__all__ = ["TILES", "Row", "code_bytes", "measure", "payload", "spec_of", "table"]

#: (head_dim, tile_m, tile_n): the paper's tiles at head_dim 128, 128x128 and 128x176, and smaller ones.
TILES = (
    *((128, 128, tile_n) for tile_n in (176, 128, 112, 96, 80, 64)),
    *((128, 192, tile_n) for tile_n in (80, 64)),
    *((128, 64, tile_n) for tile_n in (128, 112, 96)),
    *((64, 128, tile_n) for tile_n in (144, 128, 96)),
    *((64, 192, tile_n) for tile_n in (96, 80, 64)),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A tile, and what became of its kernels: both element types, causal or not.

    Attributes
    ----------
    spec : FwdSpec
        The first of them.
    registers : int
        Of a thread at launch, the most; setmaxnreg then gives more to the consumers.
    spill_bytes, code_bytes : tuple of int
        The smallest and the largest.
    advisories : tuple of str
        Numbers of ptxas's advisories, of any of them.
    seconds : float
        Of the slowest compilation.
    """

    spec: FwdSpec
    registers: int
    spill_bytes: tuple[int, int]
    code_bytes: tuple[int, int]
    advisories: tuple[str, ...]
    seconds: float


def spec_of(head_dim: int, tile_m: int, tile_n: int, *, dtype: DType, causal: bool) -> FwdSpec:
    """Return a three-stage kernel.

    Parameters
    ----------
    head_dim, tile_m, tile_n : int
        Its tile.
    dtype : DType
        Of the matrices.
    causal : bool
        The mask.

    Returns
    -------
    FwdSpec
        With two slots of Q where they fit beside two of K and V.
    """
    rows = 2 * tile_m + 4 * tile_n
    return FwdSpec(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=2,
        q_stages=2 if 2 * head_dim * rows <= 226 * 1024 else 1,
        varlen=False,
        causal=causal,
        window=False,
        sink=False,
        softcap=False,
        alibi=False,
        bias=Bias.NONE,
        bias_float32=False,
        bias_stages=0,
        negate_scores=False,
        overlap=True,
        three_stage=True,
        speculative=False,
        rescale_threshold=0,
        exp2_fma=0,
        pingpong=False,
        warp_specialized=True,
        scheduler=Scheduler.DYNAMIC,
        longest_first=True,
        setmaxnreg=tile_m > 64,
    )


def payload(spec: FwdSpec) -> tuple[int, int]:
    """Count the registers of a consumer thread.

    Parameters
    ----------
    spec : FwdSpec
        The kernel.

    Returns
    -------
    tuple of int
        O, two S and P, and how many registers there are.
    """
    registers = {1: 255, 2: 232, 3: 160}[spec.tile_m // 64]
    return spec.head_dim_v // 2 + 2 * (spec.tile_n // 2) + spec.tile_n // 4, registers


def code_bytes(cubin: bytes) -> int:
    """Return the size of the machine code in an ELF image.

    Parameters
    ----------
    cubin : bytes
        64-bit, little-endian.

    Returns
    -------
    int
        Bytes of its ``.text`` sections.
    """
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    strings = cubin[headers[names][4] :]
    return sum(length for name, *_, length in headers if strings[name:].startswith(b".text."))


def measure(
    tiles: Iterable[tuple[int, int, int]] = TILES, *, build: Callable[[FwdSpec], Compiled] = compile_offline
) -> Iterator[Row]:
    """Compile the kernels of each tile.

    Parameters
    ----------
    tiles : iterable of tuple, optional
        head_dim, tile_m and tile_n.
    build : callable, optional
        The compiler.

    Yields
    ------
    Row
        In the order of `tiles`.
    """
    for tile in tiles:
        specs = [
            spec_of(*tile, dtype=dtype, causal=causal) for dtype, causal in itertools.product(DType, (False, True))
        ]
        compiled, seconds = [], []
        for spec in specs:
            begin = time.perf_counter()
            compiled.append(build(spec))
            seconds.append(time.perf_counter() - begin)
        spills = [kernel.report.spill_bytes for kernel in compiled]
        code = [code_bytes(kernel.cubin) for kernel in compiled]
        lines = itertools.chain.from_iterable(kernel.report.advisories for kernel in compiled)
        numbers = itertools.chain.from_iterable(re.findall(r"\bC7\d{3}\b", line) for line in lines)
        yield Row(
            specs[0],
            max(kernel.report.registers for kernel in compiled),
            (min(spills), max(spills)),
            (min(code), max(code)),
            tuple(sorted(set(numbers))),
            max(seconds),
        )


def table(rows: Sequence[Row]) -> list[str]:
    """Return rows as a Markdown table.

    Parameters
    ----------
    rows : sequence of Row
        From :func:`measure`.

    Returns
    -------
    list of str
        Its lines.
    """

    def span(bounds: tuple[int, int]) -> str:
        return " to ".join(str(bound) for bound in dict.fromkeys(bounds))

    lines = [
        "| head_dim | tile | O + 2 S + P | of | at launch | bytes spilled | advisories | code, KiB | compiled in, s |",
        "|---:|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        needed, registers = payload(row.spec)
        code = span((round(row.code_bytes[0] / 1024), round(row.code_bytes[1] / 1024)))
        lines.append(
            f"| {row.spec.head_dim} | {row.spec.tile_m}x{row.spec.tile_n} | {needed} | {registers} | {row.registers} | "
            f"{span(row.spill_bytes)} | {', '.join(row.advisories) or 'none'} | {code} | {row.seconds:.1f} |"
        )
    return lines
