"""Attention over a cache on the GPU: the table between canaries, decode loops, capture, streams, and the same bits."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from caches import (  # noqa: E402
    BROKEN,
    BROKEN_OFFSETS,
    FIRST_ROWS,
    broken,
    hold_to_caches,
    hold_to_documented,
    hold_to_first_rows,
    hold_to_oracle,
    random_case,
)
from gpu.test_transfers_gpu import KERNEL, MEMCPY, capture, watched  # noqa: E402
from gpu.tools import assign, bits, host, is_nan, no_allocation, poison, require_memory, same_bits, spin  # noqa: E402
from test_cache_problem import problem_of  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa import attention_with_kvcache, debug, decode_dispatch  # noqa: E402
from cupyfa.decode_plan import decode_specs  # noqa: E402
from cupyfa.decode_select import select_decode  # noqa: E402
from cupyfa.kernels import load  # noqa: E402
from cupyfa.select import Device  # noqa: E402
from cupyfa.testing import CACHE_CASES, CacheCase, Guarded, guarded_empty, random_array  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
RANDOM = [random_case(number) for number in range(24)]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compile what the tables need, side by side."""
    device, index = Device.current(), cupy.cuda.runtime.getDevice()
    problems = [problem_of(case) for case in (*CACHE_CASES, *RANDOM)]
    specs = dict.fromkeys(spec for p in problems for spec in decode_specs(p, select_decode(p, device)))

    def load_there(spec: Any) -> None:
        with cupy.cuda.Device(index):
            load(spec, index)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(load_there, specs))


def on_gpu(array: Any) -> Any:
    """A copy on the GPU, whatever the dtype."""
    return cupy.asarray(array.view(f"u{array.itemsize}")).view(array.dtype)


def guarded(array: Any) -> Guarded:
    """A copy between canaries, which are NaN or no page."""
    guard = guarded_empty(array.shape, array.dtype, cupy, poison=0)
    integers = f"u{array.itemsize}"
    guard.array.view(integers)[...] = cupy.asarray(np.ascontiguousarray(array).view(integers))
    return guard


class Call:
    """A call all of whose arrays are between canaries; out and lse are NaN."""

    def __init__(self, case: CacheCase, arrays: dict[str, Any] | None = None, **options: Any) -> None:
        given = (case.make_arrays() if arrays is None else arrays) | case.options | case.splits | options
        self.host = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
        self.guards = {name: guarded(x) for name, x in self.host.items()}
        q, v = given["q"], given["v_cache"]
        self.guards["out"] = guarded_empty((*q.shape[:-1], v.shape[-1]), q.dtype, cupy)
        self.guards["lse"] = guarded_empty((*q.shape[:-3], *q.shape[-2:-4:-1]), np.float32, cupy)
        self.arguments = given | {name: guard.array for name, guard in self.guards.items()}

    def __getitem__(self, name: str) -> Any:
        """An array, brought to the host."""
        return host(self.arguments[name])

    def run(self) -> None:
        """Once; nothing but out, lse and caches may change."""
        result = attention_with_kvcache(**self.arguments, return_lse=True)
        assert result.out is self.arguments["out"]
        assert result.lse is self.arguments["lse"]
        cupy.cuda.get_current_stream().synchronize()
        for name, guard in self.guards.items():
            guard.check(name)
        for name, before in self.host.items():
            if name not in ("k_cache", "v_cache"):
                assert np.array_equal(self[name].view(np.uint8), before.view(np.uint8)), f"{name} has changed"


def check(case: CacheCase) -> None:
    call = Call(case)
    call.run()
    hold_to_oracle(case, call["out"], call["lse"])
    hold_to_caches(case, call.host, call["k_cache"], call["v_cache"])


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda case: case.id)
def test_case(case: CacheCase) -> None:
    check(case)


@pytest.mark.parametrize("number", range(len(RANDOM)))
def test_random_case(number: int) -> None:
    check(RANDOM[number])


@pytest.mark.parametrize("name", BROKEN)
def test_c14_c21_broken_values_do_what_is_documented(name: str) -> None:
    case, arrays = broken(name)
    call = Call(case, arrays)
    call.run()
    results = (call[name] for name in ("out", "lse", "k_cache", "v_cache"))
    hold_to_documented(arrays, case.options, case.seqlen_new, *results)


@pytest.mark.parametrize("name", BROKEN_OFFSETS)
def test_broken_offsets_make_no_rows(name: str) -> None:
    arrays = FIRST_ROWS.make_arrays() | {"cu_seqlens_q": np.array(BROKEN_OFFSETS[name], np.int32)}
    call = Call(FIRST_ROWS, arrays)
    call.run()
    hold_to_first_rows(call["out"], call["lse"])


def test_debug_names_sequence_and_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "DEBUG", True)
    case = CacheCase("debug", (100, 20), page_size=16, seqlen_new=1)
    Call(case).run()
    arrays = case.make_arrays()
    pages = len(arrays["k_cache"])
    arrays["page_table"][1, 1] = pages
    with pytest.raises(ValueError, match=rf"^attention: page_table\[1, 1\] is {pages}; .* because sequence 1 has 21"):
        Call(case, arrays).run()
    with pytest.raises(ValueError, match=r"^attention: cache_seqlens\[0\] is 999 and 1 keys are appended; a sequence"):
        Call(case, cache_seqlens=np.int32([999, 20])).run()


def test_c15_c16_c17_what_lies_behind_the_last_key_does_not_matter() -> None:
    for page_size in (None, 16):
        case = CacheCase("behind", (65, 100, 3), page_size=page_size, head_dim=128)
        with_nan = Call(case)
        clean = {name: np.nan_to_num(with_nan.host[name].astype(np.float32)) for name in ("k_cache", "v_cache")}
        without = Call(case, case.make_arrays() | {name: x.astype(BF16) for name, x in clean.items()})
        for call in (with_nan, without):
            call.run()
        for name in ("out", "lse"):
            assert same_bits(with_nan.arguments[name], without.arguments[name])


# --- Many steps ---


@dataclasses.dataclass
class Sequences:
    """Caches that grow from `prefix` keys on, and all that is appended to them, known beforehand."""

    q: Any  # (batch, steps, heads_q, head_dim)
    k: Any  # (batch, prefix + steps, heads_kv, head_dim)
    v: Any
    k_cache: Any
    v_cache: Any
    page_table: Any
    prefix: int

    @classmethod
    def make(
        cls, batch: int, prefix: int, steps: int, *, page_size: int | None, heads_q: int = 8, heads_kv: int = 2,
        head_dim: int = 64, dtype: Any = BF16,
    ) -> Sequences:  # fmt: skip
        keys = prefix + steps
        shapes = [(batch, steps, heads_q), (batch, keys, heads_kv), (batch, keys, heads_kv)]
        q, k, v = (random_array((*shape, head_dim), dtype, seed, xp=cupy) for seed, shape in enumerate(shapes))
        table = None
        if page_size is None:
            caches = [poison(cupy.empty((batch, keys + 3, heads_kv, head_dim), dtype)) for _ in "kv"]
        else:
            count = -(-keys // page_size)
            caches = [poison(cupy.empty((batch * count + 1, page_size, heads_kv, head_dim), dtype)) for _ in "kv"]
            pages = np.argsort(random_array((batch * count,), np.float32, 3))
            table = cupy.asarray(pages.reshape(batch, count).astype(np.int32))
        self = cls(q, k, v, *caches, table, prefix)
        if prefix:
            before = {"k": k[:, :prefix], "v": v[:, :prefix], "cache_seqlens": cupy.zeros(batch, np.int32)}
            attention_with_kvcache(q[:, :1], **self.caches, **before)  # appends
        return self

    @property
    def caches(self) -> dict[str, Any]:
        return {"k_cache": self.k_cache, "v_cache": self.v_cache, "page_table": self.page_table}

    def step(self, i: int) -> dict[str, Any]:
        """The arrays of a step."""
        key = self.prefix + i
        return {"q": self.q[:, i : i + 1], "k": self.k[:, key : key + 1], "v": self.v[:, key : key + 1], **self.caches}

    def hold(self, out: Any, atol: float = 2**-7) -> None:
        """Compare the outputs of all steps with those of one call."""
        expected = cupyfa.attention(self.q, self.k, self.v, causal=True)
        np.testing.assert_allclose(
            host(out).astype(np.float32), host(expected).astype(np.float32), atol=atol, rtol=2**-6
        )


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("length", ["array", "int"])
def test_a_loop_of_decode_steps(length: str, page_size: int | None) -> None:
    steps, prefix = 300, 37
    sequences = Sequences.make(3, prefix, steps, page_size=page_size)
    lengths, outs = cupy.full(3, prefix, np.int32), poison(cupy.empty_like(sequences.q))
    pool, held = cupy.get_default_memory_pool(), 0
    for i in range(steps):
        now = lengths if length == "array" else prefix + i
        attention_with_kvcache(**sequences.step(i), cache_seqlens=now, out=outs[:, i : i + 1])
        lengths += 1
        if i == 20:
            held = pool.total_bytes()
            problems = decode_dispatch._prepare.cache_info().misses
    assert pool.total_bytes() == held
    assert decode_dispatch._prepare.cache_info().misses == problems  # a step is no new problem
    sequences.hold(outs)


def test_ten_thousand_steps() -> None:
    steps = 10_000
    sequences = Sequences.make(1, 0, steps, page_size=64, heads_q=4, heads_kv=1, dtype=np.float16)
    lengths, outs = cupy.zeros(1, np.int32), poison(cupy.empty_like(sequences.q))
    pool, held = cupy.get_default_memory_pool(), 0
    for i in range(steps):
        attention_with_kvcache(**sequences.step(i), cache_seqlens=lengths, out=outs[:, i : i + 1])
        lengths += 1
        if i == 100:
            held = pool.total_bytes()
    assert pool.total_bytes() == held
    sequences.hold(outs, atol=2**-10)


def test_c51_splits_and_pages_are_always_finite() -> None:
    steps = 1500
    sequences = Sequences.make(2, 0, steps, page_size=16, head_dim=128, dtype=np.float16)
    lengths = cupy.zeros(2, np.int32)
    wrong, apart = cupy.zeros((), bool), cupy.zeros((), np.float32)
    for i in range(steps):
        arrays = sequences.step(i)
        out, lse = attention_with_kvcache(**arrays, cache_seqlens=lengths, return_lse=True)
        lengths += 1
        whole = attention_with_kvcache(
            arrays["q"], **sequences.caches, cache_seqlens=lengths, num_splits=1, return_lse=True
        )
        for x in (out, lse):
            wrong |= ~cupy.isfinite(x).all()
        apart = cupy.maximum(apart, abs(out.astype(np.float32) - whole.out.astype(np.float32)).max())
        apart = cupy.maximum(apart, abs(lse - whole.lse).max())
    assert not bool(wrong)
    assert float(apart) <= 2**-8


# --- The same bits ---


def test_c49_pages_give_the_bits_of_rows() -> None:
    for seqlen_q in (1, 64, 256):
        for page_size in (16, 64, 256):
            batch, pages = 2, 1280 // page_size
            shapes = [(batch, seqlen_q, 16, 192), (batch, 1280, 16, 192), (batch, 1280, 16, 128)]
            q, k, v = (random_array(shape, BF16, seed, xp=cupy) for seed, shape in enumerate(shapes))
            order = np.argsort(random_array((batch * pages,), np.float32, 9))
            paged = [cupy.empty((batch * pages, page_size, *x.shape[2:]), BF16) for x in (k, v)]
            for to, x in zip(paged, (k, v), strict=True):
                bits(to)[cupy.asarray(order)] = bits(x).reshape(to.shape)
            table = cupy.asarray(order.reshape(batch, pages).astype(np.int32))
            rest = {"cache_seqlens": cupy.asarray(np.int32([1200, 700])), "causal": True, "return_lse": True}
            rows = attention_with_kvcache(q, k, v, **rest)
            of_pages = attention_with_kvcache(q, *paged, page_table=table, **rest)
            assert same_bits(rows.out, of_pages.out), (seqlen_q, page_size)
            assert same_bits(rows.lse, of_pages.lse), (seqlen_q, page_size)


@pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 4}, {"split_size": 128}], ids=str)
def test_c53_a_thousand_batches_leave_a_sequence_its_bits(options: dict[str, int]) -> None:
    """A sequence alone, and anywhere among others with other queries, lengths and tables."""
    choice = np.random.default_rng(53)
    pages, needed, length, begin = 400, 40, 633, 100
    caches = [random_array((pages, 16, 2, 64), BF16, seed, xp=cupy) for seed in (1, 2)]
    q = random_array((200, 14, 64), BF16, 3, xp=cupy)  # the sequence has the rows from `begin` on
    own = np.arange(needed, dtype=np.int32) * 7 % pages

    def run(rows: list[int], lengths: list[int], table: Any, at: int) -> tuple[Any, Any]:
        """The bits of the sequence, which is number `at` of a batch."""
        offsets = np.cumsum([0, *rows]).astype(np.int32)
        first = begin - int(offsets[at])
        out, lse = attention_with_kvcache(
            q[first : first + int(offsets[-1])],
            *caches,
            cache_seqlens=cupy.asarray(np.int32(lengths)),
            page_table=cupy.asarray(table),
            cu_seqlens_q=cupy.asarray(offsets),
            max_seqlen_q=max(rows),
            causal=True,
            return_lse=True,
            **options,
        )
        mine = slice(int(offsets[at]), int(offsets[at + 1]))
        return bits(out[mine]), bits(lse[:, mine])

    alone = {rows: run([rows], [length], own[None], 0) for rows in (1, 3)}
    differ = cupy.zeros((), np.int64)
    for _ in range(1000):
        batch, width = int(choice.integers(1, 9)), int(choice.integers(needed, 100))
        at, mine = int(choice.integers(batch)), int(choice.choice([1, 3]))
        rows = choice.choice([0, 1, 1, 1, 2, 9, 10], batch).tolist()
        lengths = choice.integers(0, 16 * width, batch).tolist()
        table = choice.integers(0, pages, (batch, width)).astype(np.int32)
        table[at, :needed], lengths[at], rows[at] = own, length, mine
        for have, want in zip(run(rows, lengths, table, at), alone[mine], strict=True):
            differ += (have != want).sum()
    assert int(differ) == 0


def taken(array: Any, order: Any) -> Any:
    """Some indices of the first axis, by the bits."""
    return bits(array)[cupy.asarray(order)].view(array.dtype)


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 2}, {"num_splits": 5}, {"split_size": 192}], ids=str
)
def test_a_permuted_batch_has_permuted_bits(options: dict[str, int]) -> None:
    case = CacheCase("permuted", (1000, 3, 65, 640, 0, 129), heads_q=8, heads_kv=2, head_dim=192, page_size=16)
    arrays = {name: on_gpu(x) for name, x in case.make_arrays().items()}
    straight = attention_with_kvcache(**arrays, **options)
    order = np.array([3, 5, 0, 2, 4, 1])
    permuted = {name: taken(arrays[name], order) for name in ("q", "cache_seqlens", "page_table")}
    assert same_bits(attention_with_kvcache(**(arrays | permuted), **options), taken(straight, order))


def test_c52_one_long_sequence_among_short_ones_in_splits() -> None:
    batch, rows = 64, [512 if b == 17 else 1 for b in range(64)]
    q = random_array((sum(rows), 6, 128), np.float16, 1, xp=cupy)
    caches = [random_array((batch, 512, 2, 128), np.float16, seed, xp=cupy) for seed in (2, 3)]
    offsets = cupy.asarray(np.cumsum([0, *rows]).astype(np.int32))
    outs = [
        attention_with_kvcache(
            q, *caches, cache_seqlens=512, cu_seqlens_q=offsets, max_seqlen_q=512, causal=True, num_splits=splits
        )
        for splits in (4, 1)
    ]
    apart = abs(outs[0].astype(np.float32) - outs[1].astype(np.float32)).max()
    assert float(apart) <= 2e-3


def test_c50_one_length_for_all() -> None:
    case = CacheCase("one length", (77,) * 3, page_size=16, spare=5, heads_q=2)
    arrays = {name: on_gpu(x) for name, x in case.make_arrays().items()}
    assert len(arrays["k_cache"]) != case.batch
    one = attention_with_kvcache(**(arrays | {"cache_seqlens": 77}))
    assert same_bits(one, attention_with_kvcache(**arrays))


def test_c19_a_workspace_may_hold_anything() -> None:
    case = CacheCase("workspace", (1000, 0, 65), num_splits=7, head_dim=128)
    size = 7 * 3 * 4 * (128 + 1) * 4
    expected = None
    for byte in (0, 0x7F, 0xFF):
        call = Call(case, workspace=np.full(size, byte, np.uint8))
        call.host.pop("workspace")  # it changes
        call.run()
        hold_to_oracle(case, call["out"], call["lse"])
        expected = expected if expected is not None else call.arguments["out"]
        assert same_bits(call.arguments["out"], expected)


def test_c40_a_page_behind_2_to_the_34_elements() -> None:
    require_memory(36)
    pool = cupy.empty((2**19 + 1, 2, 16, 8, 128), np.float16)  # pages of keys and of values in turn: 32 GiB
    pool[-1] = random_array(pool.shape[1:], np.float16, 40, xp=cupy)
    near = pool[-1:].copy()
    q = random_array((1, 1, 32, 128), np.float16, 41, xp=cupy)
    new = {name: random_array((1, 1, 8, 128), np.float16, seed, xp=cupy) for seed, name in enumerate("kv", 42)}
    results = []
    for pages in (pool, near):
        table = cupy.full((1, 1), len(pages) - 1, np.int32)
        caches = pages[:, 0], pages[:, 1]
        results.append(attention_with_kvcache(q, *caches, cache_seqlens=9, page_table=table, **new, return_lse=True))
    far, close = results
    assert same_bits(far.out, close.out)
    assert same_bits(far.lse, close.lse)
    assert same_bits(pool[-1], near[0])  # what was appended, too
    assert same_bits(pool[-1, 0, 9], new["k"][0, 0])


# --- Capture, streams, transfers ---

#: Every kind of call: what is launched.
CALLS = {
    "one kernel": CacheCase("plain", (300, 20), num_splits=1, head_dim=128),
    "a cluster": CacheCase("cluster", (300, 20), num_splits=2, page_size=16),
    "two kernels": CacheCase("append", (300, 20), num_splits=1, seqlen_new=1, rotary_dim=32, batch_idx=True),
    "a merge": CacheCase("merge", (300, 20), num_splits=5, sink=True),
    "three kernels": CacheCase("all", (300, 20), num_splits=5, page_size=16, seqlen_new=3, seqlen_q=3, causal=True),
    "one length": CacheCase("length", (30, 30), one_length=True, num_splits=1),
    "packed": CacheCase("packed", (300, 20), lengths_q=(1, 3), num_splits=3, causal=True, rows_of_nobody=1),
}
KERNELS = dict(zip(CALLS, (1, 1, 2, 2, 3, 1, 2), strict=True))


def call_of(name: str) -> dict[str, Any]:
    """The arguments of a call, on the GPU, with out, lse and workspace."""
    case = CALLS[name]
    given = case.make_arrays() | case.options | case.splits
    arguments = {n: on_gpu(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    q = arguments["q"]
    arguments["out"] = poison(cupy.empty(q.shape, q.dtype))
    arguments["lse"] = poison(cupy.empty((*q.shape[:-3], *q.shape[-2:-4:-1]), np.float32))
    rows = case.batch * case.heads_q * (case.seqlen_q if case.lengths_q is None else max(case.lengths_q))
    arguments["workspace"] = cupy.empty(5 * rows * (case.head_dim + 1) * 4, np.uint8)
    return arguments


@pytest.mark.parametrize("name", CALLS)
def test_a_call_copies_nothing_and_waits_for_nothing(name: str) -> None:
    arguments = call_of(name)
    without = {n: x for n, x in arguments.items() if n not in ("out", "lse", "workspace")}

    def call() -> None:
        attention_with_kvcache(**arguments)
        attention_with_kvcache(**without)
        attention_with_kvcache(**without, return_lse=True)

    call()  # the pool has the memory now
    with watched() as seen:
        call()
    assert seen == []
    with no_allocation():
        attention_with_kvcache(**arguments)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_captured_as_its_kernels(name: str) -> None:
    arguments = call_of(name)
    attention_with_kvcache(**arguments)
    expected = arguments["out"].copy()
    poison(arguments["out"])
    cupy.cuda.Device().synchronize()
    with capture(cupy.cuda.Stream(non_blocking=True)) as kinds:
        attention_with_kvcache(**arguments)
    assert MEMCPY not in kinds
    if name == "packed":  # rows of nobody are filled beforehand
        assert len(kinds) == KERNELS[name] + 2
    else:
        assert kinds == [KERNEL] * KERNELS[name]
    assert bool(is_nan(arguments["out"]).all())  # captured, not run
    attention_with_kvcache(**arguments)
    assert same_bits(arguments["out"], expected)


def test_c62_a_captured_call_takes_the_lengths_and_pages_of_each_replay() -> None:
    case = CacheCase(
        "replayed",
        (300, 20, 0),
        page_size=16,
        seqlen_new=2,
        seqlen_q=2,
        causal=True,
        num_splits=5,
        rotary_dim=32,
        spare=0,
    )
    longest = dataclasses.replace(case, lengths=(400, 400, 400))
    given = longest.make_arrays() | longest.options | longest.splits
    arguments = {n: on_gpu(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    caches = {
        name: random_array(arguments[name].shape, BF16, seed, xp=cupy)
        for seed, name in enumerate(("k_cache", "v_cache"))
    }
    arguments |= {name: x.copy() for name, x in caches.items()}
    out, lse = cupy.empty_like(arguments["q"]), cupy.empty((3, 4, 2), np.float32)
    workspace = cupy.empty(5 * 3 * 4 * 2 * (64 + 1) * 4, np.uint8)
    attention_with_kvcache(**arguments, out=out, lse=lse, workspace=workspace)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        attention_with_kvcache(**arguments, out=out, lse=lse, workspace=workspace)
        graph = stream.end_capture()
    table, pages = arguments["page_table"], len(caches["k_cache"])
    choice = np.random.default_rng(0)
    for lengths in ([300, 20, 0], [0, 0, 0], [400, 1, 63], [64, 65, 399], [1, 2, 3]):
        order = choice.permutation(pages)[: table.size].reshape(table.shape).astype(np.int32)
        table[...] = cupy.asarray(order)
        arguments["cache_seqlens"][...] = cupy.asarray(np.int32(lengths))
        for name, x in caches.items():
            assign(arguments[name], x)
        poison(out)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        again = arguments | {name: x.copy() for name, x in caches.items()}
        expected = attention_with_kvcache(**again, return_lse=True)
        assert same_bits(out, expected.out)
        assert same_bits(lse, expected.lse)
        for name in caches:
            assert same_bits(arguments[name], again[name])


def test_a_captured_loop_advances_itself() -> None:
    """Ten replays of a graph that appends, attends and counts."""
    sequences = Sequences.make(2, 50, 10, page_size=16)
    lengths = cupy.full(2, 50, np.int32)
    step = sequences.step(0) | {name: cupy.empty_like(sequences.step(0)[name]) for name in "qkv"}
    out = poison(cupy.empty((2, 1, 8, 64), BF16))
    attention_with_kvcache(**step, cache_seqlens=lengths, out=out, num_splits=2)
    lengths += 0  # the sum is loaded, too
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        attention_with_kvcache(**step, cache_seqlens=lengths, out=out, num_splits=2)
        lengths += 1
        graph = stream.end_capture()
        outs = []
        for i in range(10):
            for name in "qkv":
                assign(step[name], sequences.step(i)[name])
            graph.launch(stream)
            outs.append(out.copy())
        stream.synchronize()
    sequences.hold(np.concatenate([host(x) for x in outs], axis=1))


def test_a_cold_kernel_under_capture_is_refused() -> None:
    arguments = call_of("one kernel") | {"config": {"stages": 5, "key_groups": 1, "residents": 1}}  # nobody loads it
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(cupyfa.CompileError, match=r"call cupyfa\.warmup before the capture"):
            attention_with_kvcache(**arguments)
        stream.end_capture()
    assert bool(is_nan(arguments["out"]).all())
    attention_with_kvcache(**arguments)
    assert not bool(is_nan(arguments["out"]).any())


def test_c59_a_call_is_in_the_order_of_its_stream() -> None:
    arguments = call_of("three kernels")
    attention_with_kvcache(**arguments)
    arguments = call_of("three kernels")
    expected = attention_with_kvcache(
        **(arguments | {name: arguments[name].copy() for name in ("k_cache", "v_cache", "out")})
    )
    values = {name: arguments[name].copy() for name in ("q", "k", "v", "k_cache", "v_cache")}
    lengths, table = arguments["cache_seqlens"].copy(), arguments["page_table"].copy()
    for name in values:
        poison(arguments[name])
    arguments["cache_seqlens"][...] = 0
    arguments["page_table"][...] = 0
    stream, result = cupy.cuda.Stream(non_blocking=True), cupy.empty_like(expected)
    cupy.cuda.Device().synchronize()
    with stream:
        spin()
        for name, x in values.items():
            assign(arguments[name], x)
        arguments["cache_seqlens"][...] = lengths
        arguments["page_table"][...] = table
        attention_with_kvcache(**arguments)
        assign(result, arguments["out"])
        assert not stream.done  # nothing of it waited
        stream.synchronize()
    assert same_bits(result, expected)


def test_c63_streams_do_not_share() -> None:
    calls = [call_of(name) for name in ("a merge", "a cluster")]
    calls = [{n: x for n, x in call.items() if n not in ("out", "lse", "workspace")} for call in calls]
    expected = [attention_with_kvcache(**call) for call in calls]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in calls]
    cupy.cuda.Device().synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(100):
        for stream, call, outs in zip(streams, calls, results, strict=True):
            with stream:
                outs.append(attention_with_kvcache(**call))
    cupy.cuda.Device().synchronize()
    for outs, once in zip(results, expected, strict=True):
        assert all(same_bits(out, once) for out in outs)


def test_a_workspace_is_checked() -> None:
    arguments = call_of("a merge")
    size = 5 * 2 * 4 * (64 + 1) * 4
    with pytest.raises(ValueError, match=rf"^attention: workspace has {size - 1} bytes .* needs {size}"):
        attention_with_kvcache(**(arguments | {"workspace": arguments["workspace"][: size - 1]}))
    with pytest.raises(TypeError, match=r"^attention: workspace must be a cupy.ndarray of uint8"):
        attention_with_kvcache(**(arguments | {"workspace": cupy.empty(size, np.int8)}))


# --- Arrays anywhere ---


def test_views_give_what_contiguous_arrays_give() -> None:
    """Caches beside each other and by heads; queries, new keys and outputs with any strides."""
    case = CacheCase("views", (100, 33), page_size=16, seqlen_new=2, seqlen_q=3, causal=True, heads_kv=2, num_splits=3)
    arrays = {name: on_gpu(x) for name, x in case.make_arrays().items()}
    plain = arrays | {name: arrays[name].copy() for name in ("k_cache", "v_cache")}
    expected = attention_with_kvcache(**plain, causal=True, num_splits=3, return_lse=True)
    pages, size, heads, columns = arrays["k_cache"].shape
    both = poison(cupy.empty((pages, heads, 2, size, columns), BF16))
    views = {name: both[:, :, i].transpose(0, 2, 1, 3) for i, name in enumerate(("k_cache", "v_cache"))}
    views |= {name: poison(cupy.empty((*arrays[name].shape, 3), BF16))[..., 1] for name in "qkv"}
    for name, view in views.items():
        assign(view, arrays[name])
    out = poison(cupy.empty((*expected.out.shape, 2), BF16))
    lse = poison(cupy.empty((*expected.lse.shape, 2), np.float32))
    attention_with_kvcache(
        **(arrays | views), causal=True, num_splits=3, out=out[..., 1], lse=lse[..., 1], return_lse=True
    )
    assert same_bits(out[..., 1], expected.out)
    assert same_bits(lse[..., 1], expected.lse)
    assert bool(is_nan(out[..., 0]).all())
    assert bool(is_nan(lse[..., 0]).all())
    for name in ("k_cache", "v_cache"):
        assert same_bits(views[name], plain[name])


@pytest.mark.parametrize(
    "config", [{"tile_m": 128}, {"stages": 2}, {"residents": 2}, {"key_groups": 1, "stages": 1}], ids=str
)
def test_other_kernels(config: dict[str, int]) -> None:
    for case in (CACHE_CASES[1], CACHE_CASES[19]):
        call = Call(case, config=config)
        call.run()
        hold_to_oracle(case, call["out"], call["lse"])
