"""Compilation, caching, loading and launching on the GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import elf_sections  # noqa: E402
from nvrtc_tools import import_nvrtc  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa import kernels  # noqa: E402
from cupyfa._launch import Function, LaunchGeometry, TensorMapGeometry, launch, unpack_traits  # noqa: E402
from cupyfa.bench.first_call import first_calls as first_calls_of  # noqa: E402
from cupyfa.compiler import compile_offline  # noqa: E402
from cupyfa.explain import Rung  # noqa: E402
from cupyfa.spec import FwdSpec  # noqa: E402
from cupyfa.testing import random_array  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)


def zeros(batch: int = 1, sq: int = 300, sk: int = 500, d: int = 128) -> tuple[Any, Any]:
    return cupy.zeros((batch, sq, 4, d), BF16), cupy.zeros((batch, sk, 2, d), BF16)


def spec_of(**changes: int) -> FwdSpec:
    q, k = zeros(**changes)
    selection = cupyfa.explain(q, k, k, causal=True).selection
    assert selection is not None
    return selection.spec


# --- First use ---


@pytest.fixture(scope="module")
def first_calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two processes that share a fresh cache: its folder, and what they say."""
    cache = tmp_path_factory.mktemp("cupy_cache")
    return cache, first_calls_of(cache)


def test_second_process_still_has_the_compilers_report(first_calls: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = first_calls[1]
    assert first["registers"] == second["registers"] > 0
    assert first["rung"] == second["rung"] == "RUN"


def test_raw_module_and_the_offline_path_give_the_same_code(first_calls: tuple[Path, list[dict[str, Any]]]) -> None:
    import_nvrtc()
    compiled = compile_offline(spec_of())
    version = tuple(cupy.cuda.nvrtc.getVersion())
    if compiled.nvrtc != version:
        pytest.skip(f"CuPy uses NVRTC {version}, cuda-bindings {compiled.nvrtc}")
    payloads = [path.read_bytes() for path in first_calls[0].rglob("*.cubin")]
    images = [p[p.index(b"\x7fELF") :] for p in payloads if compiled.symbol.encode() in p and b"\x7fELF" in p]
    assert len(images) == 1, f"{len(payloads)} cached kernels, {len(images)} of them ours"
    theirs, ours = elf_sections(images[0]), elf_sections(compiled.cubin)
    code = f".text.{compiled.symbol}"
    assert len(ours[code]) > 10_000
    assert theirs[code] == ours[code]


# --- Loading ---


def test_architecture_specific_target_is_loaded() -> None:
    kernel = kernels.load(spec_of(), 0)
    assert kernel.attributes["binary_version"] == 90
    assert kernel.attributes["local_size_bytes"] == 0
    assert kernel.ptxas is None or kernel.attributes["num_regs"] == kernel.ptxas.registers
    # sm_90 has neither WGMMA nor setmaxnreg, so a kernel that was compiled at all was compiled for sm_90a.
    import_nvrtc()
    assert re.findall(r"^\.target (\w+)", compile_offline(spec_of()).ptx, re.MULTILINE) == ["sm_90a"]


def test_load_returns_the_same_kernel() -> None:
    spec = spec_of()
    assert kernels.load(spec, 0) is kernels.load(spec, 0)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_traits_are_those_of_the_offline_path(d: int) -> None:
    import_nvrtc()
    kernel = kernels.load(spec_of(d=d), 0)
    assert kernel.traits == unpack_traits(compile_offline(kernel.spec).traits_bytes)


def test_compilers_report_is_kept_or_forgotten_but_never_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "nothing"))
    log = "ptxas info    : Used 77 registers, used 1 barriers\n"
    assert kernels._keep_report(spec_of(), "") is None
    kept = kernels._keep_report(spec_of(), log)
    assert kept is not None
    assert kept.registers == 77
    assert kernels._keep_report(spec_of(), "") == kept
    assert kernels._keep_report(spec_of(d=64), "") is None


# --- Explain ---


def test_rung_rises_when_the_kernel_has_run() -> None:
    q, k = zeros(sq=311, sk=517)
    config = {"stages": 1, "q_stages": 1, "tile_n": 112}  # a kernel that no other test launches
    before = cupyfa.explain(q, k, k, config=config)
    assert before.backend == "cuda"
    assert before.rung is Rung.SASS
    assert "not run in this process" in str(before)
    cupyfa.attention(q, k[:, :100], k[:, :100], out=cupy.empty_like(q), config=config)  # the kernel, not the geometry
    after = cupyfa.explain(q, k, k, config=config)
    assert after.rung is Rung.RUN
    assert after.selection == before.selection
    assert after.traits is not None
    assert f"{after.traits['shared_bytes']} bytes of a CTA" in str(after)


def test_nothing_to_launch() -> None:
    q, k = zeros(sk=0)
    explanation = cupyfa.explain(q, k, k)
    assert explanation.rung is None
    assert "nothing to launch: an axis is empty" in str(explanation)


# --- The driver's refusals ---


def test_driver_errors_have_names_and_leave_the_context_usable() -> None:
    with pytest.raises(
        cupyfa.LaunchError, match=r"^cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE for float16 at 0x1000,"
    ):
        TensorMapGeometry("float16", (64, 100, 1, 1), (7, 16, 16), (64, 64)).encode(4096)
    spec = spec_of()
    kernel = kernels.load(spec, 0)
    with pytest.raises(cupyfa.LaunchError, match=r"^cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE for 1000000 bytes"):
        kernel.function.allow_shared_memory(1_000_000)
    geometry = LaunchGeometry(grid=1, threads=2048, shared_bytes=0)
    with pytest.raises(
        cupyfa.LaunchError, match=r"^cuLaunchKernelEx: CUDA_ERROR_\w+ for LaunchGeometry\(grid=1, threads=2048"
    ):
        launch(kernel.function, geometry, 0, bytes(1024))
    q, k = zeros()
    v = random_array(k.shape, BF16, 1, xp=cupy)
    out = cupyfa.attention(q, k, v)
    cupy.cuda.Device().synchronize()
    mean = v.astype(np.float32).mean(axis=1).repeat(2, axis=1)[:, None]
    assert float(abs(out.astype(np.float32) - mean).max()) < 2e-3


def test_tensor_map_is_128_bytes_and_depends_on_the_address() -> None:
    geometry = TensorMapGeometry("bfloat16", (64, 100, 3, 2), (384, 128, 38_400), (64, 128))
    one, two = geometry.encode(2**20), geometry.encode(2**21)
    assert len(one) == len(two) == 128
    assert one != two
    assert geometry.encode(2**20) == one


def test_launch_attributes_are_understood() -> None:
    # A cluster of two CTAs, and programmatic launch: each CTA writes its rank in its cluster.
    source = r"""
    struct Params { unsigned *ranks; };
    extern "C" __global__ void ranks(const __grid_constant__ Params p) {
      unsigned rank, size;
      asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
      asm volatile("griddepcontrol.wait;" ::: "memory");
      if (threadIdx.x == 0) p.ranks[blockIdx.x] = 10 * size + rank;
    }
    """
    function = cupy.RawKernel(source, "ranks", options=("-std=c++17",))
    written = cupy.zeros(6, np.uint32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for size, expected in ((1, [10] * 6), (2, [20, 21] * 3)):
        geometry = LaunchGeometry(grid=6, threads=32, shared_bytes=0, cluster_size=size, programmatic=True)
        launch(Function(function.kernel.ptr), geometry, stream.ptr, int(written.data.ptr).to_bytes(8, "little"))
        stream.synchronize()
        assert written.get().tolist() == expected


# --- The command line ---


def test_command_line() -> None:
    for command, text in (("info", "compute capability 9.0"), ("demo", "within the tolerance")):
        done = subprocess.run(
            [sys.executable, "-m", "cupyfa", command], capture_output=True, text=True, check=False, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        assert text in done.stdout
    assert "rung    run: launched on this GPU in this process" in done.stdout
    assert "this ran on the CPU" not in done.stdout
