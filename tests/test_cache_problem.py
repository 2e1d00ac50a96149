"""Attention over a cache on the GPU, up to the launch: the problem, the rules for memory, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import struct
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Array, Stream, install

import cupyfa
from cupyfa import decode_dispatch
from cupyfa._launch import LaunchGeometry
from cupyfa.cache_options import CacheArrays, CacheOptions, check_cache_options
from cupyfa.cache_problem import CacheProblem, check_cache_addresses, check_cache_overlap
from cupyfa.operand import Operand
from cupyfa.select import H200
from cupyfa.spec import DType, Spec
from cupyfa.testing import CACHE_CASES, CacheCase

PLAIN = CacheOptions()


def operands_of(arrays: dict[str, Any], device: int | None = 0) -> CacheArrays[Operand]:
    """Arrays of NumPy as if they were on a GPU."""
    given = CacheArrays(**{name: x for name, x in arrays.items() if isinstance(x, np.ndarray)})
    return given.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, device))


def problem_of(case: CacheCase, **changes: Any) -> CacheProblem:
    options = case.options | case.splits
    arrays = case.make_arrays() | {name: options.pop(name) for name in ("sink", "alibi_slopes") if name in options}
    operands = operands_of(arrays)._replace(**changes)
    return CacheProblem.of(operands, check_cache_options(**options), want_lse=True, current_device=0)


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda case: case.id)
def test_the_sizes_of_a_case(case: CacheCase) -> None:
    problem, arrays = problem_of(case), case.make_arrays()
    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    assert problem.dtype.name == case.dtype.upper()
    assert (problem.batch, problem.heads_q, problem.heads_kv) == (case.batch, case.heads_q, case.heads_kv)
    assert (problem.head_dim, problem.head_dim_v) == (case.head_dim, head_dim_v)
    assert (problem.cache_rows, problem.page_size) == (arrays["k_cache"].shape[0], case.page_size)
    assert problem.capacity == case.capacity
    assert (problem.max_pages is None) == (case.page_size is None)
    assert problem.seqlen_new == case.seqlen_new
    assert (problem.rotary_dim, problem.rotary_interleaved) == (case.rotary_dim, case.rotary_interleaved)
    assert problem.rotary_positions == (arrays["rotary_cos"].shape[0] if case.rotary_dim else 0)
    assert problem.rows_turn == (case.causal or case.window_size != (None, None))
    assert (problem.num_splits, problem.split_size) == (case.num_splits, case.split_size)
    assert problem.softcap == case.softcap
    assert (problem.cache_seqlens is None) == case.one_length
    if case.lengths_q is None:
        assert (problem.seqlen_q, problem.total_q) == (case.seqlen_q, None)
        assert problem.lse_shape == (case.batch, case.heads_q, case.seqlen_q)
    else:
        assert (problem.seqlen_q, problem.total_q) == (max(case.lengths_q), arrays["q"].shape[0])
        assert problem.lse_shape == (case.heads_q, arrays["q"].shape[0])
        assert problem.q.shape == (1, *arrays["q"].shape)
        assert problem.lse is not None
        assert problem.lse.shape == (1, *problem.lse_shape)
    assert problem.operands.q is problem.q
    assert problem.operands.cu_seqlens_q is problem.cu_seqlens_q


def test_equal_geometry_is_an_equal_problem() -> None:
    case = CacheCase("hash", (9, 3), seqlen_new=1, page_size=16)
    one, other = problem_of(case), problem_of(dataclasses.replace(case, lengths=(8, 2)))
    assert one == other
    assert hash(one) == hash(other)
    for change in ({"seqlen_new": 2}, {"head_dim": 128}, {"causal": True, "seqlen_q": 2}, {"num_splits": 2}):
        assert one != problem_of(dataclasses.replace(case, **change))


def test_bounds_that_hide_nothing_are_none_but_positions_advance() -> None:
    case = CacheCase("window", (9, 3), seqlen_q=3, window_size=(1000, 1000), rotary_dim=8, seqlen_new=3)
    problem = problem_of(case)
    assert (problem.left, problem.right, problem.causal, problem.rows_turn) == (None, None, False, True)
    problem = problem_of(dataclasses.replace(case, window_size=(5, None), causal=True))
    assert (problem.left, problem.right, problem.causal) == (5, 0, True)


def test_the_default_scale_and_a_given_one() -> None:
    case = CacheCase("scale", (9,))
    assert problem_of(case).softmax_scale == 0.125
    assert problem_of(dataclasses.replace(case, softmax_scale=-2.0)).softmax_scale == -2.0
    assert problem_of(case).dtype is DType.BFLOAT16


def test_sizes_beyond_an_int() -> None:
    table = Operand.contiguous("page_table", (2, 2**20), np.int32, 0)
    pages = {name: cache(name, (9, 2**11, 2, 64)) for name in ("k_cache", "v_cache")}
    with pytest.raises(cupyfa.UnsupportedError, match=r"^attention: k_cache has seqlen 2147483648; supported are at"):
        of_pages(**pages, page_table=table)
    q = Operand("q", (2, 2**31, 4, 64), (0, 0, 128, 2), np.dtype(ml_dtypes.bfloat16), 0)
    with pytest.raises(cupyfa.UnsupportedError, match=r"^attention: q has seqlen 2147483648; supported are at most"):
        of_pages(q=q)


def test_no_sequence_is_longer_than_all_of_q() -> None:
    options = check_cache_options(max_seqlen_q=1000)
    case = CacheCase("packed", (9, 3), lengths_q=(1, 4))
    problem = CacheProblem.of(operands_of(case.make_arrays()), options, want_lse=False, current_device=0)
    assert (problem.seqlen_q, problem.total_q, problem.lse) == (5, 5, None)


def test_empty_caches_have_any_strides() -> None:
    empty = cache("k_cache", (0, 16, 2, 64), (0, 0, 0, 0)), cache("v_cache", (0, 16, 2, 64), (0, 0, 0, 0))
    assert of_pages(k_cache=empty[0], v_cache=empty[1]).cache_rows == 0


def test_nothing_to_compute() -> None:
    assert problem_of(CacheCase("rows", (9,), seqlen_q=0)).has_no_output
    assert not problem_of(CacheCase("rows", (0,))).has_no_output


def test_slopes_repeat_along_sequences() -> None:
    slopes = Operand.contiguous("alibi_slopes", (4,), np.float32, 0)
    problem = problem_of(CacheCase("slopes", (9, 3, 1)), alibi_slopes=slopes)
    assert problem.alibi_slopes is not None
    assert (problem.alibi_slopes.shape, problem.alibi_slopes.strides) == ((3, 4), (0, 4))


# --- Memory ---

PAGES = (9, 16, 2, 64)


def cache(name: str, shape: tuple[int, ...] = PAGES, strides: tuple[int, ...] | None = None) -> Operand:
    contiguous = Operand.contiguous(name, shape, ml_dtypes.bfloat16, 0)
    return contiguous if strides is None else dataclasses.replace(contiguous, strides=strides)


def of_pages(**changes: Any) -> CacheProblem:
    case = CacheCase("pages", (9, 3), heads_kv=2, page_size=16, seqlen_new=1)
    return problem_of(case, **({"k_cache": cache("k_cache"), "v_cache": cache("v_cache")} | changes))


@pytest.mark.parametrize(
    ("strides", "message"),
    [
        ((4096, 256, 128, 4), r"of 4 bytes from head_dim to head_dim; it must be 2: contiguous"),
        ((4096, 264, 136, 2), r"of 264 bytes from position to position; it must be a multiple of 16 from 0 to 2\^40"),
        ((4100, 256, 128, 2), r"of 4100 bytes from page to page; it must be a multiple of 16 from 0 to 2\^40"),
        ((4096, 256, 130, 2), r"of 130 bytes from head to head; it must be a multiple of 16"),
        ((-4096, 256, 128, 2), r"of -4096 bytes from page to page; it must be a multiple of 16 from 0"),
        ((2**40, 256, 128, 2), r"of 1099511627776 bytes from page to page; it must be a multiple of 16 from 0 to 2"),
    ],
)
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_strides_of_caches(name: str, strides: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^attention: {name} has a stride {message}.*\(a cache is never copied\)$"):
        of_pages(**{name: cache(name, strides=strides)})


def test_rows_are_named_rows() -> None:
    odd = cache("k_cache", (2, 11, 1, 64), (1412, 128, 128, 2))
    with pytest.raises(ValueError, match=r"^attention: k_cache has a stride of 1412 bytes from row to row;"):
        problem_of(CacheCase("rows", (10, 3)), k_cache=odd)


def test_any_other_strides_will_do() -> None:
    wide = of_pages(
        k_cache=cache("k_cache", strides=(2**39, 128, 16 * 128, 2)),
        q=Operand("q", (2, 1, 4, 64), (-6, 2, 130, 4), np.dtype(ml_dtypes.bfloat16), 0),
        k=Operand("k", (2, 1, 2, 64), (2, 6, -130, -2), np.dtype(ml_dtypes.bfloat16), 0),
        page_table=Operand("page_table", (2, 2), (-40, 4), np.dtype(np.int32), 0),
    )
    assert wide.k_cache.strides[0] == 2**39
    problem_of(
        CacheCase("one page", (9,), page_size=16, spare=0), k_cache=cache("k_cache", (1, 16, 1, 64), (7, 128, 3, 2))
    )


@pytest.mark.parametrize("name", ["q", "k", "page_table", "lse"])
def test_strides_of_other_arrays_are_whole_numbers(name: str) -> None:
    given = getattr(of_pages(), name)
    with pytest.raises(ValueError, match=rf"^attention: {name} has strides \(.*\) bytes; they must be multiples of"):
        of_pages(**{name: dataclasses.replace(given, strides=(given.strides[0] + 1, *given.strides[1:]))})


def test_elements_of_a_cache_that_is_written_do_not_overlap() -> None:
    repeated = cache("v_cache", strides=(0, 256, 128, 2))
    with pytest.raises(ValueError, match=r"^attention: v_cache has strides \(0, 256, 128, 2\) bytes .* appended"):
        of_pages(v_cache=repeated)
    assert of_pages(v_cache=repeated, k=None, v=None).v_cache is repeated


def test_places_of_arrays() -> None:
    elsewhere = dataclasses.replace(cache("v_cache"), device=1)
    with pytest.raises(ValueError, match=r"^attention: v_cache is on CUDA device 1 \(CuPy\) but q is on CUDA device 0"):
        of_pages(v_cache=elsewhere)
    table = Operand.contiguous("page_table", (2, 2), np.int32, None)
    with pytest.raises(ValueError, match=r"^attention: page_table is on the host \(NumPy\) but q is on CUDA device 0"):
        of_pages(page_table=table)
    with pytest.raises(ValueError, match=r"^attention: q is on CUDA device 0 but the current device is 1; call it"):
        CacheProblem.of(of_pages().operands._replace(out=None, lse=None), PLAIN, want_lse=False, current_device=1)


def addresses_of(problem: CacheProblem, **changes: int) -> CacheArrays[int]:
    """Far from each other, and aligned."""
    return CacheArrays(*(None if x is None else (i + 1) << 20 for i, x in enumerate(problem.operands)))._replace(
        **changes
    )


@pytest.mark.parametrize(
    ("name", "alignment", "remedy"),
    [
        ("k_cache", 16, "a cache is never copied"),
        ("v_cache", 16, "a cache is never copied"),
        ("q", 2, "a copy is aligned"),
        ("k", 2, "a copy is aligned"),
        ("lse", 4, "a copy is aligned"),
        ("page_table", 4, "a copy is aligned"),
        ("cache_seqlens", 4, "a copy is aligned"),
    ],
)
def test_addresses(name: str, alignment: int, remedy: str) -> None:
    problem = of_pages()
    check_cache_addresses(problem, addresses_of(problem, **{name: 0x100000 + alignment}))
    odd = 0x100000 + alignment // 2
    message = f"attention: {name} begins at address {odd:#x}; it must be a multiple of {alignment} bytes ({remedy})"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_cache_addresses(problem, addresses_of(problem, **{name: odd}))


def test_no_memory_in_common() -> None:
    problem = of_pages()
    apart = addresses_of(problem)
    check_cache_overlap(problem, apart)
    for name, other in (("out", "q"), ("out", "page_table"), ("lse", "out"), ("lse", "v_cache"), ("k_cache", "v")):
        with pytest.raises(ValueError, match=rf"^attention: {name} shares memory with {other}; it must be an array"):
            check_cache_overlap(problem, apart._replace(**{name: getattr(apart, other)}))
    reads = of_pages(k=None, v=None)
    check_cache_overlap(reads, addresses_of(reads)._replace(v_cache=apart.k_cache))  # nothing is appended
    check_cache_overlap(reads, addresses_of(reads)._replace(q=apart.k_cache))


def test_a_cache_of_keys_beside_values_is_fine() -> None:
    strides = (2 * 4096, 256, 128, 2)
    problem = of_pages(k_cache=cache("k_cache", strides=strides), v_cache=cache("v_cache", strides=strides))
    apart = addresses_of(problem)
    check_cache_overlap(problem, apart._replace(v_cache=apart.k_cache + 4096))
    with pytest.raises(ValueError, match=r"^attention: v_cache shares memory with k_cache"):
        check_cache_overlap(problem, apart._replace(v_cache=apart.k_cache + 4096 - 16))


# --- Calls with a CuPy that is none ---


class Gpu:
    """What was launched: the entry file, and the parameters."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.launched: list[tuple[str, bytes]] = []

    def load(self, spec: Spec, device: int) -> Any:
        return types.SimpleNamespace(function=spec.entry, traits={"threads": 384, "shared_bytes": 0})

    def launch(self, entry: str, geometry: LaunchGeometry, stream: int, params: bytes) -> None:
        assert stream == Stream.ptr
        self.launched.append((entry, params))

    @property
    def entries(self) -> list[str]:
        """The entry files since the last look."""
        entries = [entry for entry, _ in self.launched]
        self.launched.clear()
        return entries


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu(install(monkeypatch))
    monkeypatch.setattr(decode_dispatch, "load", gpu.load)
    monkeypatch.setattr(decode_dispatch, "launch", gpu.launch)
    monkeypatch.setattr(decode_dispatch.Device, "current", lambda: H200)
    maps = types.SimpleNamespace(encode=lambda geometry, address: bytes(128))
    monkeypatch.setattr(decode_dispatch, "TensorMapGeometry", maps)
    decode_dispatch._prepare.cache_clear()
    yield gpu
    decode_dispatch._prepare.cache_clear()


def on_gpu(case: CacheCase, **changes: Any) -> dict[str, Any]:
    arrays = case.make_arrays() | changes
    return {name: Array(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


CASE = CacheCase("gpu", (9, 3), page_size=16, seqlen_new=1)
APPEND, DECODE, COMBINE = "append.cu", "hopper/decode.cu", "combine.cu"


def test_a_call_launches_what_it_needs(gpu: Gpu) -> None:
    out = cupyfa.attention_with_kvcache(**on_gpu(CASE))
    assert isinstance(out, Array)
    assert (out.shape, out.dtype.name) == ((2, 1, 4, 64), "bfloat16")
    assert gpu.entries == [APPEND, DECODE]
    reads = dataclasses.replace(CASE, seqlen_new=0)
    for splits, entries in ((1, [DECODE]), (2, [DECODE]), (3, [DECODE, COMBINE])):  # a cluster merges two itself
        cupyfa.attention_with_kvcache(**on_gpu(reads), num_splits=splits)
        assert gpu.entries == entries
    no_rows = {"q": np.zeros((2, 0, 4, 64), ml_dtypes.bfloat16)}
    cupyfa.attention_with_kvcache(**on_gpu(CASE, **no_rows))
    assert gpu.entries == [APPEND]
    cupyfa.attention_with_kvcache(**on_gpu(reads, **no_rows))
    assert gpu.entries == []


def test_what_needs_no_kernel_is_filled(gpu: Gpu) -> None:
    nothing = {name: np.zeros((0, 16, 1, 64), ml_dtypes.bfloat16) for name in ("k_cache", "v_cache")}
    sink = Array(np.arange(4, dtype=np.float32))
    result = cupyfa.attention_with_kvcache(**on_gpu(CASE, **nothing), sink=sink, return_lse=True)
    assert gpu.entries == []
    assert not result.out.host.any()
    assert (result.lse.host == np.arange(4)[:, None]).all()


def test_partial_results_are_in_the_workspace(gpu: Gpu) -> None:
    arrays = on_gpu(dataclasses.replace(CASE, seqlen_new=0))
    needed = 3 * 2 * 4 * (64 + 1) * 4
    workspace = Array(np.empty(needed, np.uint8))
    cupyfa.attention_with_kvcache(**arrays, num_splits=3, workspace=workspace)
    (_, decoding), (_, combining) = gpu.launched
    partial_out = workspace.data.ptr
    expected = struct.pack("<2Q", partial_out, partial_out + 3 * 2 * 4 * 64 * 4)
    assert combining.startswith(expected)
    assert expected in decoding
    message = rf"^attention: workspace has {needed - 1} bytes .* needs {needed}"
    with pytest.raises(ValueError, match=message):
        cupyfa.attention_with_kvcache(**arrays, num_splits=3, workspace=Array(np.empty(needed - 1, np.uint8)))
    for name in ("q", "k_cache", "cache_seqlens", "page_table"):
        at = Array(arrays[name].host.reshape(-1).view(np.uint8))
        at.host = np.lib.stride_tricks.as_strided(at.host, (needed,), (1,), writeable=False)
        with pytest.raises(ValueError, match=rf"^attention: workspace overlaps {name}; they must be separate"):
            cupyfa.attention_with_kvcache(**arrays, num_splits=3, workspace=at)


def test_other_gpus_have_no_kernel(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_dispatch.Device, "current", lambda: dataclasses.replace(H200, compute_capability=(8, 9)))
    with pytest.raises(cupyfa.UnsupportedError, match=r"^attention: no kernel for a cache on compute capability 8\.9"):
        cupyfa.attention_with_kvcache(**on_gpu(CASE))
    assert gpu.entries == []


def test_libraries_are_not_mixed(gpu: Gpu) -> None:
    with pytest.raises(TypeError, match=r"^attention: page_table is a numpy.ndarray but q is a fake_cupy.Array; pass"):
        cupyfa.attention_with_kvcache(**(on_gpu(CASE) | {"page_table": np.zeros((2, 2), np.int32)}))
    with pytest.raises(TypeError, match=r"^attention: k_cache is a fake_cupy.Array but q is a numpy.ndarray; pass"):
        cupyfa.attention_with_kvcache(**(on_gpu(CASE) | {"q": CASE.make_arrays()["q"]}))


def test_the_values_of_arrays_are_checked_for_those_who_debug(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = on_gpu(CASE, cache_seqlens=np.int32([9, 500]))
    cupyfa.attention_with_kvcache(**beyond)
    monkeypatch.setattr(decode_dispatch.debug, "DEBUG", True)
    with pytest.raises(ValueError, match=r"^attention: cache_seqlens\[1\] is 500 and 1 keys are appended; a sequence"):
        cupyfa.attention_with_kvcache(**beyond)
    with pytest.raises(ValueError, match=r"^attention: page_table\[1, 0\] is 9; it must be from 0 to 2, because"):
        cupyfa.attention_with_kvcache(**on_gpu(CASE, page_table=np.int32([[1, 0], [9, 0]])))
    gpu.stream.capturing = True
    cupyfa.attention_with_kvcache(**beyond)


def test_a_number_for_all_is_always_checked(gpu: Gpu) -> None:
    with pytest.raises(
        ValueError, match=r"^attention: cache_seqlens is 32 and 1 keys are appended; .* at most 32 keys"
    ):
        cupyfa.attention_with_kvcache(**on_gpu(CASE, cache_seqlens=32))
    cupyfa.attention_with_kvcache(**on_gpu(CASE, cache_seqlens=31))


def test_positions_of_a_number_for_all_are_checked(gpu: Gpu) -> None:
    case = dataclasses.replace(CASE, seqlen_q=4, rotary_dim=8, causal=True)
    tables = dict.fromkeys(("rotary_cos", "rotary_sin"), np.zeros((20, 4), ml_dtypes.bfloat16))
    with pytest.raises(
        ValueError, match=r"^attention: cache_seqlens is 17, so that positions up to 20 turn; rotary_cos"
    ):
        cupyfa.attention_with_kvcache(**on_gpu(case, cache_seqlens=17, **tables), causal=True)
    for fits in ({"cache_seqlens": 16, "causal": True}, {"cache_seqlens": 19, "causal": False}):
        cupyfa.attention_with_kvcache(**(on_gpu(case, **tables) | fits))


def test_one_problem_serves_all_lengths(gpu: Gpu) -> None:
    for length in (3, 4, 5):
        cupyfa.attention_with_kvcache(**on_gpu(CASE, cache_seqlens=length))
    assert decode_dispatch._prepare.cache_info().misses == decode_dispatch._prepare.cache_info().misses == 1
    assert len({params for entry, params in gpu.launched if entry == APPEND}) == 3


def test_an_odd_address_is_refused(gpu: Gpu) -> None:
    arrays = CASE.make_arrays()
    shifted = np.zeros(arrays["k_cache"].size + 8, arrays["k_cache"].dtype)
    begin = 1 + (-shifted.ctypes.data // 2) % 8
    odd = shifted[begin : begin + arrays["k_cache"].size].reshape(arrays["k_cache"].shape)
    with pytest.raises(ValueError, match=r"^attention: k_cache begins at address 0x\w+; it must be a multiple of 16"):
        cupyfa.attention_with_kvcache(**on_gpu(CASE, k_cache=odd))
