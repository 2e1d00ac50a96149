"""Command line: ``python -m cupyfa``."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import platform
import sys
import time
from typing import Any

import numpy as np

import cupyfa
from cupyfa import emulate, emulate_command
from cupyfa.bench import ablation, backward, decode, emulator, first_call, forward, host, options
from cupyfa.compiler import MIN_CUPY, MIN_NVRTC
from cupyfa.errors import CompileError
from cupyfa.oracles import dense
from cupyfa.select import CANDIDATES
from cupyfa.support import support_table
from cupyfa.testing import assert_close, assert_lse_close, random_array, score_magnitude
from cupyfa.testing.canaries import to_numpy


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m cupyfa", description=cupyfa.__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, device, compiler and what is supported").set_defaults(
        run=lambda _: info()
    )
    commands.add_parser("demo", help="compute attention on the GPU, or on the CPU, and check it").set_defaults(
        run=lambda _: demo()
    )
    commands.add_parser("support", help="what there are kernels for, as a table").set_defaults(
        run=lambda _: print(support_table())
    )
    emulated = commands.add_parser(
        "emulate",
        help="run a kernel under the emulator and hold it to the oracle",
        description=emulate_command.DESCRIPTION,
    )
    emulate_command.add_arguments(emulated)
    emulated.set_defaults(run=lambda options: emulate_command.run(options, print))
    _add_benchmarks(commands.add_parser("bench", help="time kernels, calls and the emulator"))
    options = parser.parse_args()
    sys.exit(options.run(options))


def _add_benchmarks(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, module, about in (
        ("forward", forward, "the forward pass beside its peers"),
        ("backward", backward, "the gradients beside the backward passes of torch"),
        ("ablation", ablation, "what each part of the forward kernel is worth"),
        ("options", options, "what windows, a softcap, a sink, ALiBi and a bias cost"),
        ("decode", decode, "few queries over long caches, beside the bytes of the caches and cuDNN"),
        ("host", host, "host cost of a warm call"),
        ("first-call", first_call, "time of the first call, compiled and from the disk cache"),
        ("emulator", emulator, "speed of the emulator; needs no GPU"),
    ):
        command = commands.add_parser(name, help=about, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(run=module.run)


def info() -> None:
    """Print versions, device, compiler and the supported matrix."""
    print(f"cupyfa   {cupyfa.__version__}")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "scipy", "ml_dtypes"))
    print(f"python   {platform.python_version()}, {versions}")
    for line in _describe_gpu():
        print(line)
    print("\nforward attention, sm_90a (Hopper)")
    print("  dtype      float16, bfloat16; accumulation in float32")
    print("  head_dim   multiples of 8 up to 256, of v another one than of q and k; computed as multiples of 32")
    print("  options    causal (bottom-right), windows, softcap, sink, ALiBi, bias: see `python -m cupyfa support`")
    print("  heads      any number of query heads per key/value head")
    for row in CANDIDATES:
        limit = f"seqlen_q up to {row.max_seqlen_q}: " if row.max_seqlen_q < math.inf else ""
        print(f"  {row.name:<8} tile {row.tile_m}x{row.tile_n:<3}  {limit}{row.reason}")
    print("NumPy arrays: the same function on the CPU, by the oracle cupyfa.oracles.online")


def _describe_gpu() -> list[str]:
    try:
        import cupy  # noqa: PLC0415 - optional
    except ImportError:
        return [
            "cupy     not installed: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'",
            _describe_offline_compiler(),
        ]
    nvrtc = cupy.cuda.nvrtc.getVersion()
    lines = [
        f"cupy     {cupy.__version__} (needs {MIN_CUPY[0]}.{MIN_CUPY[1]})",
        f"nvrtc    {nvrtc[0]}.{nvrtc[1]} (needs {MIN_NVRTC[0]}.{MIN_NVRTC[1]})",
    ]
    if not cupy.cuda.is_available():
        return [*lines, "device   no CUDA device"]
    driver = cupy.cuda.runtime.driverGetVersion()
    lines.append(f"driver   CUDA {driver // 1000}.{driver % 1000 // 10}")
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        p = cupy.cuda.runtime.getDeviceProperties(index)
        lines.append(
            f"device   {index}: {p['name'].decode()}, compute capability {p['major']}.{p['minor']}, "
            f"{p['multiProcessorCount']} SMs"
        )
    return lines


def _describe_offline_compiler() -> str:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 - optional

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return "nvrtc    not found: pip install 'cupyfa[compile]' compiles kernels without a GPU"
    return f"nvrtc    {major}.{minor}, to compile kernels without a GPU"


def _array_module() -> Any:
    """CuPy where there is a Hopper GPU, NumPy elsewhere."""
    try:
        import cupy  # noqa: PLC0415 - optional
    except ImportError:
        return np
    if not cupy.cuda.is_available() or cupy.cuda.Device().compute_capability != "90":
        return np
    return cupy


def demo() -> None:
    """Compute causal attention with grouped heads, check it against float64, and say what ran."""
    import ml_dtypes  # noqa: PLC0415

    xp = _array_module()
    on_gpu = xp is not np
    batch, seqlen, heads_q, heads_kv, head_dim = (4, 4096, 16, 4, 128) if on_gpu else (1, 512, 4, 2, 128)
    q, k, v = (
        random_array((batch, seqlen, heads, head_dim), ml_dtypes.bfloat16, seed, xp=xp)
        for seed, heads in ((1, heads_q), (2, heads_kv), (3, heads_kv))
    )
    print(f"attention, bfloat16, causal: q {q.shape}, k and v {k.shape}")

    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        out, lse = cupyfa.attention(q, k, v, causal=True, return_lse=True)
        if on_gpu:
            xp.cuda.get_current_stream().synchronize()
        seconds.append(time.perf_counter() - begin)
    flops = 2 * batch * heads_q * seqlen * seqlen * 2 * head_dim / 2
    print(f"first call {seconds[0]:.3f} s{' with compilation' if on_gpu else ''}")
    print(f"then       {min(seconds) * 1e3:.3f} ms, {flops / min(seconds) / 1e12:.2f} TFLOP/s, timed from the host")

    # The last batch and the query heads of the last key/value head, against the float64 definition.
    group = heads_q // heads_kv
    host = [to_numpy(x) for x in (q[-1:, :, -group:], k[-1:, :, -1:], v[-1:, :, -1:])]
    reference, reference_lse = dense.attention(*host, causal=True)
    plain, _ = dense.same_precision(*host, causal=True)
    actual, actual_lse = to_numpy(out[-1:, :, -group:]), to_numpy(lse[-1:, -group:])
    assert_close(actual, reference, plain, what="out")
    assert_lse_close(actual_lse, reference_lse, score_magnitude=score_magnitude(host[0], host[1]))
    error = np.max(np.abs(actual.astype(np.float64) - reference))
    error_lse = np.max(np.abs(actual_lse - reference_lse))
    print(f"largest errors against float64: out {error:.1e}, lse {error_lse:.1e}; both within the tolerance")
    print()
    print(cupyfa.explain(q, k, v, causal=True))
    if not on_gpu:
        _demo_emulator()
        print("\nThe kernel that CuPy arrays would get on an H200:\n")
        print(cupyfa.explain(q, k, v, causal=True, arch="sm_90a"))


def _demo_emulator() -> None:
    """Run a small problem on the emulated kernel, under two schedules."""
    import ml_dtypes  # noqa: PLC0415

    shapes = ((1, 200, 2, 128), (1, 333, 1, 128), (1, 333, 1, 128))
    q, k, v = (random_array(shape, ml_dtypes.bfloat16, seed) for seed, shape in enumerate(shapes))
    print("\nThere is no Hopper GPU here, so this ran on the CPU. The Hopper kernel itself, under the emulator:\n")
    reference, _ = dense.attention(q, k, v, causal=True)
    plain, _ = dense.same_precision(q, k, v, causal=True)
    for policy in ("eager", "lazy"):
        try:
            out, _, run = emulate.attention(q, k, v, causal=True, sms=1, policy=policy)
        except CompileError as error:
            if error.spec is not None:  # the kernel is at fault, not the installation
                raise
            print(f"not here: {error}")
            return
        assert_close(out, reference, plain, what="out")
        count, seconds = run.statistics["instructions"], run.statistics["seconds"]
        print(
            f"{policy:6} q {q.shape}, k and v {k.shape}: {run.verdict}, within the tolerance; {count:,} "
            f"instructions of warps in {seconds * 1e3:.0f} ms"
        )
    print("`python -m cupyfa emulate` takes other shapes and schedules; docs/emulator.md says what a clean run proves")


if __name__ == "__main__":
    main()
