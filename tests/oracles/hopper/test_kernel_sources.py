"""The forward kernel's own sources against the Hopper oracles: every wait, arrival, copy, descriptor and turn.

The roles are compiled for the host and run in many interleavings (`hopper_trace`). The emulator of compiled PTX will
repeat this on what the device really runs; here nothing but a C++ compiler is needed.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
from hopper_trace import CONSUMERS, PRODUCER, STORER, Host, Problem, key_blocks, key_range, panels, replay, tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.hopper.barriers import ArrivalOverflow, ParticipantMismatch
from cupyfa.oracles.hopper.ledger import SM90, RegisterPool, ThreadRegisters, ownership, shared_memory
from cupyfa.oracles.hopper.machine import Deadlock
from cupyfa.oracles.hopper.pipeline import ConservationError, EarlyRead, EarlyReuse, StaleGeneration
from cupyfa.oracles.hopper.ring import positions
from cupyfa.oracles.hopper.roles import Config, load_order, run
from cupyfa.oracles.hopper.swizzle import panel_addresses
from cupyfa.oracles.hopper.token_ring import handoffs
from cupyfa.oracles.hopper.two_stage import MissingProduct
from cupyfa.oracles.hopper.wgmma_queue import AccumulatorInFlight, MissingFence, ReleaseBeforeCompletion
from cupyfa.oracles.scheduling.makespan import TileSetViolation
from cupyfa.select import CANDIDATES
from cupyfa.spec import Bias, DType, FwdSpec, Scheduler

SPEC = FwdSpec(
    dtype=DType.BFLOAT16,
    head_dim=64,
    head_dim_v=64,
    tile_m=128,
    tile_n=64,
    stages=2,
    q_stages=1,
    varlen=False,
    causal=True,
    window=False,
    sink=False,
    softcap=False,
    alibi=False,
    bias=Bias.NONE,
    bias_float32=False,
    bias_stages=0,
    negate_scores=False,
    overlap=True,
    three_stage=False,
    speculative=False,
    rescale_threshold=0,
    exp2_fma=0,
    pingpong=True,
    warp_specialized=True,
    scheduler=Scheduler.PERSISTENT,
    longest_first=True,
    setmaxnreg=True,
)
VARIANTS = [
    {},
    {"overlap": False},
    {"overlap": False, "q_stages": 2, "scheduler": Scheduler.DYNAMIC},
    {"stages": 1},
    {"stages": 1, "overlap": False, "pingpong": False},
    {"stages": 1, "q_stages": 2, "scheduler": Scheduler.ONE_TILE},
    {"stages": 3, "q_stages": 2, "causal": False},
    {"tile_m": 192, "q_stages": 2, "scheduler": Scheduler.DYNAMIC},
    {"tile_m": 192, "overlap": False, "causal": False},
    {"tile_m": 64, "pingpong": False, "setmaxnreg": False, "scheduler": Scheduler.ONE_TILE},
    {"longest_first": False},
    {"longest_first": False, "q_stages": 2, "scheduler": Scheduler.DYNAMIC},
    {"rescale_threshold": 8},
    {"head_dim": 128, "head_dim_v": 128, "tile_n": 112, "dtype": DType.FLOAT16},
    {"head_dim": 96, "head_dim_v": 160, "q_stages": 2},
    {"speculative": True, "scheduler": Scheduler.DYNAMIC},
    {"speculative": True, "q_stages": 2, "scheduler": Scheduler.DYNAMIC},
    {"speculative": True, "stages": 1, "q_stages": 3, "dtype": DType.FLOAT16},
    {"speculative": True, "stages": 3, "q_stages": 2, "causal": False, "pingpong": False},
    {"speculative": True, "tile_m": 192, "scheduler": Scheduler.ONE_TILE},
    {"speculative": True, "head_dim": 192, "head_dim_v": 32, "q_stages": 2, "scheduler": Scheduler.DYNAMIC},
    {"window": True},
    {"window": True, "causal": False, "q_stages": 2, "scheduler": Scheduler.DYNAMIC},
    {"window": True, "overlap": False, "sink": True},
    {"window": True, "tile_m": 192, "stages": 1, "q_stages": 2, "scheduler": Scheduler.ONE_TILE},
    {"window": True, "speculative": True, "longest_first": False, "alibi": True},
    {"window": True, "speculative": True, "stages": 3, "q_stages": 2, "causal": False, "pingpong": False},
    {"window": True, "speculative": True, "q_stages": 2, "softcap": True, "sink": True, "scheduler": Scheduler.DYNAMIC},
    {"softcap": True, "alibi": True, "sink": True, "overlap": False, "causal": False},
]
SPECS = [dataclasses.replace(SPEC, **variant) for variant in VARIANTS]
#: The oracle's roles have two stages: these have tests of their own where the order of a consumer counts.
THREE_STAGES = [
    dataclasses.replace(SPEC, three_stage=True, pingpong=False, **variant)
    for variant in (
        {},
        {"stages": 3, "q_stages": 2, "causal": False, "scheduler": Scheduler.DYNAMIC},
        {"tile_m": 192, "q_stages": 2},
    )
]
FIELDS = ("head_dim", "head_dim_v", "tile_m", "tile_n", "stages", "q_stages")
TABLE = [
    dataclasses.replace(
        SPEC,
        speculative=True,
        scheduler=Scheduler.DYNAMIC,
        window=window,
        **{name: getattr(row, name) for name in FIELDS},
    )
    for row in CANDIDATES
    if "no bias" in row.bias
    for window in (False, True)
]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(tmp_path_factory.mktemp("host"), [*SPECS, *THREE_STAGES, *TABLE])


def grid(spec, problem, ctas):
    """At most so many CTAs, each with a tile."""
    count = len(tiles(spec, problem))
    return count if spec.scheduler is Scheduler.ONE_TILE else min(ctas, count)


# --- Everything at once ---

HEADS = st.sampled_from([(1, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1), (2, 1, 2, 3)])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    spec=st.sampled_from([*SPECS, *THREE_STAGES]),
    seqlen_q=st.integers(1, 500),
    seqlen_k=st.integers(0, 400),
    heads=HEADS,
    ctas=st.integers(1, 3),
    counter=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_problems_in_random_interleavings(host, spec, seqlen_q, seqlen_k, heads, ctas, counter, seed):
    """Tiles that see no key (seqlen_q > seqlen_k with a causal mask), one block, many tiles, one slot to three."""
    problem = Problem(seqlen_q, seqlen_k, *heads)
    check_turns(spec, problem, replay(host, spec, problem, seed, ctas=grid(spec, problem, ctas), counter=counter))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    spec=st.sampled_from([spec for spec in SPECS if spec.window or spec.causal]),
    seqlen_q=st.integers(1, 500),
    seqlen_k=st.integers(0, 700),
    heads=HEADS,
    left=st.just(0) | st.integers(0, 200) | st.integers(0, 700),
    right=st.just(0) | st.integers(0, 200) | st.integers(0, 500),
    ctas=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_random_windows_in_random_interleavings(host, spec, seqlen_q, seqlen_k, heads, left, right, ctas, seed):
    """Windows from one key on, of one block and of many, that leave out the first blocks, the last ones, or nothing."""
    problem = Problem(seqlen_q, seqlen_k, *heads, left=left, right=right)
    played = replay(host, spec, problem, seed, ctas=grid(spec, problem, ctas))
    check_turns(spec, problem, played)
    for cta in played.ctas:
        blocks = [j for tile in cta.posted for j in key_range(spec, problem, tile)]
        for tensor in "KV":
            assert [row for name, row in loads(cta) if name == tensor] == [j * spec.tile_n for j in blocks]


def check_turns(spec, problem, played):
    for cta in played.ctas:
        groups = spec.tile_m // 64
        calls = sum(handoffs(key_blocks(spec, problem, tile), spec.overlap) for tile in cta.posted)
        # At the end the first warpgroup takes the last credit.
        assert cta.turns == ([*list(range(groups)) * calls, 0] if spec.pingpong else [])


@pytest.mark.parametrize("spec", TABLE, ids=str)
def test_kernels_that_are_selected(host, spec):
    problem = Problem(300, 300)
    for seed in range(2):
        replay(host, spec, problem, seed, ctas=grid(spec, problem, 2))


def test_tiles_without_keys_walk_over_one_masked_block(host):
    problem = Problem(seqlen_q=300, seqlen_k=40)  # rows 0 to 259 see no key
    assert [key_blocks(SPEC, problem, tile) for tile in tiles(SPEC, problem)] == [1, 1, 1]
    (cta,) = replay(host, SPEC, problem, 0).ctas
    assert "".join(tensor for tensor, _ in loads(cta)) == "KQ" + "KVQ" * 2 + "V"


@given(
    seqlen_q=st.integers(1, 500),
    seqlen_k=st.integers(0, 700),
    left=st.integers(0, 700),
    right=st.integers(0, 500),
    causal=st.booleans(),
    window=st.booleans(),
    tile_n=st.sampled_from([64, 80, 128]),
)
def test_blocks_of_a_tile_are_those_in_which_a_row_sees_a_key(seqlen_q, seqlen_k, left, right, causal, window, tile_n):
    """By definition. Rows behind the last query count: a tile walks as if it were full."""
    spec = dataclasses.replace(SPEC, causal=causal, window=window, tile_n=tile_n)
    problem = Problem(seqlen_q, seqlen_k, left=left, right=right)
    for tile in tiles(spec, problem):
        row = tile.m * spec.tile_m + np.arange(spec.tile_m)[:, None]
        distance = np.arange(seqlen_k)[None, :] - row - (seqlen_k - seqlen_q)
        seen = (distance >= (-left if window else -math.inf)) & (distance <= (right if causal else math.inf))
        blocks = np.unique(np.flatnonzero(seen.any(axis=0)) // tile_n).tolist()
        assert list(key_range(spec, problem, tile)) == (blocks[::-1] or [0])


def test_a_window_leaves_out_the_first_blocks(host):
    spec, problem = SPECS[VARIANTS.index({"window": True})], Problem(300, 600, left=60)
    assert [list(key_range(spec, problem, tile)) for tile in tiles(spec, problem)] == [
        [6, 5, 4, 3],  # rows 0 to 127 see the keys 240 to 427
        [8, 7, 6, 5],
        [9, 8, 7],  # as if there were rows behind the last one
    ]
    (cta,) = replay(host, spec, problem, 0).ctas
    assert [row // spec.tile_n for tensor, row in loads(cta) if tensor == "V"] == [6, 5, 4, 3, 8, 7, 6, 5, 9, 8, 7]


def test_ctas_draw_their_tiles(host):
    """Who draws how many depends on the interleaving; without a counter they are dealt out."""
    spec, problem = SPECS[VARIANTS.index({"speculative": True, "scheduler": Scheduler.DYNAMIC})], Problem(300, 300, 4)
    drawn = {tuple(len(cta.posted) for cta in replay(host, spec, problem, seed, ctas=3).ctas) for seed in range(8)}
    assert len(drawn) > 1
    dealt = replay(host, spec, problem, 0, ctas=3, counter=False)
    assert [len(cta.posted) for cta in dealt.ctas] == [4, 4, 4]


# --- The oracle's roles are twins ---


def loads(cta):
    """Tensor and row of each tile that the producer loads."""
    return [(x[0], x[3]) for word, x in cta.warps[PRODUCER].requests if word == "load" and x[2] == 0]


@pytest.mark.parametrize("spec", [*SPECS, *THREE_STAGES], ids=str)
def test_producer_order_is_that_of_the_oracle(host, spec):
    """Within a tile. The next K goes before the last V, and so does the next Q, if there is a slot for it."""
    problem = Problem(spec.tile_m if spec.scheduler is Scheduler.ONE_TILE else 400, 300)
    (cta,) = replay(host, spec, problem, 0).ctas
    want, last_v = [], []
    for tile in tiles(spec, problem):
        blocks = key_range(spec, problem, tile)
        k, q, *rest = [
            (tensor, tile.m * spec.tile_m if tensor == "Q" else blocks[r] * spec.tile_n)
            for tensor, r in load_order(len(blocks))
        ]
        want += [k, q, *last_v, *rest[:-1]] if spec.q_stages > 1 else [k, *last_v, q, *rest[:-1]]
        last_v = rest[-1:]
    assert loads(cta) == want + last_v


@pytest.mark.parametrize("spec", [*SPECS, *THREE_STAGES], ids=str)
def test_waits_have_the_stages_and_parities_of_the_oracle(host, spec):
    """All try_wait of all sides, against the coordinate table of the whole CTA."""
    problem = Problem(spec.tile_m if spec.scheduler is Scheduler.ONE_TILE else 400, 300)
    (cta,) = replay(host, spec, problem, 0).ctas
    at = host.layout(spec)
    count = len(tiles(spec, problem))
    blocks = sum(key_blocks(spec, problem, tile) for tile in tiles(spec, problem))

    def waits(thread, first, barriers):
        got = [x for word, x in cta.warps[thread].requests if word == "try_wait"]
        return [x for x in got if first <= x[0] < first + 8 * barriers]

    for base, stages, items, threads in (
        (at.work, spec.q_stages, count + 1, (CONSUMERS, STORER)),  # the last one says that there is no more
        (at.k_barriers, spec.stages, blocks, (CONSUMERS,)),
        (at.v_barriers, spec.stages, blocks, (CONSUMERS,)),
    ):
        rows = positions(items, stages)
        empty = [(base + 8 * (stages + p.stage), p.empty_parity) for p in rows]
        assert waits(PRODUCER, base, 2 * stages) == empty
        for thread in threads:
            assert waits(thread, base, 2 * stages) == [(base + 8 * p.stage, p.full_parity) for p in rows]
    staged = [(at.staged + 8 * p.stage, p.full_parity) for p in positions(count, spec.q_stages)]
    assert waits(STORER, at.staged, spec.q_stages) == staged


def steps(host, spec, problem):
    """Waits, products, releases, turns and hand-overs of a consumer warp, in program order."""
    (cta,) = replay(host, spec, problem, 0).ctas
    at = host.layout(spec)
    got, products = [], ""
    for word, x in cta.warps[CONSUMERS].requests:
        if word in ("ss", "rs"):
            products = "QK" if word == "ss" else "PV"
        elif word == "commit":
            got.append(products)
        elif word == "wait":
            got.append(f"complete {x[0]}")
        elif word == "arrive" and at.staged <= x[0] < at.staged + 8 * spec.q_stages:
            got.append("hand over")
        elif word in ("try_wait", "arrive"):
            ring = "VKQ"[[x[0] >= at.v_barriers, x[0] >= at.k_barriers, x[0] >= at.work].index(True)]
            got.append(f"{'wait' if word == 'try_wait' else 'release'} {ring}")
        elif word in ("bar_sync", "bar_arrive") and x[0] <= 3:
            got.append("sync" if word == "bar_sync" else "arrive")
    return got


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_consumer_order_is_that_of_the_oracle(host, spec):
    """One tile. Where the oracle's consumer has stored O and releases Q, the kernel's hands O over."""
    problem = Problem(spec.tile_m, 300)
    (tile,) = tiles(spec, problem)
    got = [step for step in steps(host, spec, problem) if not step.startswith("complete")]

    config = Config(spec.tile_m // 64, spec.stages, spec.q_stages, spec.overlap, spec.pingpong)
    cta = run(config, [key_blocks(spec, problem, tile)])
    want = []
    for event in cta.machine.events:
        if event.agent == "tensor" and event.target == "consumer 0":
            want.append(event.action)
        elif event.agent == "consumer 0" and event.action in ("wait", "release") and event.target != "Q":
            want.append(f"{event.action} {event.target}")
        elif event.agent == "consumer 0" and event.action in ("sync", "arrive"):
            want.append(event.action)
    want = ["wait Q", *want, "hand over"]
    # The kernel asks for another tile, before the last product if that could go with the next scores.
    early = spec.overlap and spec.q_stages > 1
    want.insert(len(want) - want[::-1].index("wait V") if early else len(want), "wait Q")
    if spec.pingpong:
        want.append("sync")  # the kernel takes the last credit, which the oracle leaves
    assert got == want


@pytest.mark.parametrize("speculative", [False, True])
def test_the_last_product_of_a_tile_is_issued_with_the_first_scores_of_the_next(host, speculative):
    (spec,) = [s for s in SPECS if (s.stages, s.q_stages, s.speculative, s.window) == (3, 2, speculative, False)]
    got = steps(host, spec, Problem(2 * spec.tile_m, spec.tile_n))  # two tiles of one block
    begin = ["wait Q", "wait K", "QK", "complete 0", "release K"]
    both = ["wait V", "wait Q", "wait K", "PV", "QK", "complete 1", "release V", "hand over", "complete 0", "release K"]
    end = ["wait V", "wait Q", "PV", "complete 0", "release V", "hand over"]
    assert got == begin + both + end + ["sync"] * spec.pingpong


@pytest.mark.parametrize("blocks", range(1, 7))
@pytest.mark.parametrize("spec", THREE_STAGES, ids=str)
def test_consumer_order_of_three_stages(host, spec, blocks):
    """Each round has two products in flight; the softmax between them and the wait is of the block in the middle."""
    want = ["wait Q", "wait K", "QK", "complete 0", "release K"]
    if blocks > 1:
        want += ["wait K", "QK", "complete 0", "release K"]
    if blocks > 2:
        want += ["wait K"]
    for j in range(blocks - 1, 1, -1):  # O += P_j V_j
        want += ["QK", "wait V", "PV", *["wait K"] * (j > 2), "complete 0", "release K", "release V"]
    if blocks > 1:
        want += ["wait V", "PV", "wait V", "complete 0", "release V"]
    else:
        want += ["wait V"]
    want += ["PV", "complete 0", "release V", "hand over", "wait Q"]
    # All queries of the one tile see all keys, or the last row of it does.
    assert steps(host, spec, Problem(spec.tile_m, blocks * spec.tile_n)) == want


# --- Layout and registers ---


@pytest.mark.parametrize("spec", [*SPECS, *TABLE], ids=str)
def test_shared_memory_is_that_of_the_ledger(host, spec):
    at = host.layout(spec)
    columns, columns_v = 64 * panels(spec.head_dim), 64 * panels(spec.head_dim_v)
    ledger = shared_memory(spec.tile_m, spec.tile_n, columns, columns_v, 2, spec.stages)
    qo = spec.q_stages * 2 * spec.tile_m * max(columns, columns_v)  # O leaves through the slot of its Q
    assert (at.k - at.qo, at.v - at.k, at.tiles - at.v) == (qo, ledger.k, ledger.v)
    # The coordinates of a tile are 16 bytes; its slot has one barrier more than those of the rings.
    sizes = [16 * spec.q_stages, 16 * spec.q_stages, 8 * spec.q_stages, 16 * spec.stages, 16 * spec.stages]
    starts = [at.tiles, at.work, at.staged, at.k_barriers, at.v_barriers]
    assert starts == [at.tiles + sum(sizes[:i]) for i in range(5)]
    assert sum(sizes[1:]) == ledger.barriers + 24 * spec.q_stages - 16
    assert at.size == -(-(qo + ledger.k + ledger.v + sum(sizes)) // 1024) * 1024
    assert all(start % 1024 == 0 for start in (at.qo, at.k, at.v))  # where the swizzle pattern begins
    assert at.size <= SM90.shared_bytes_per_block


def test_chunk_addresses_are_swizzled(host):
    tile = panel_addresses(1024, 16, 64, 2)
    chunks = [[host.chunk_address(1024, row, chunk) for chunk in range(8)] for row in range(16)]
    assert chunks == tile[:, ::8].tolist()


@pytest.mark.parametrize("spec", [s for s in [*SPECS, *TABLE] if s.setmaxnreg], ids=str)
def test_setmaxnreg_fits_what_the_launch_allocates(host, spec):
    (cta,) = replay(host, spec, Problem(1, 1), 0).ctas
    asked = {thread: warp.registers for thread, warp in cta.warps.items()}
    consumers = spec.tile_m // 64
    pool = RegisterPool(1 + consumers, SM90.registers // (128 * (1 + consumers)) // 8 * 8)
    assert asked[PRODUCER] == asked[STORER]
    pool.request(0, [asked[PRODUCER]] * 4)
    for g in range(1, 1 + consumers):
        pool.request(g, [asked[128 * g + 32 * w] for w in range(4)])
    assert ownership(consumers, ThreadRegisters(asked[PRODUCER], asked[CONSUMERS])) <= SM90.registers


# --- The replay can fail: one edit of the sources each ---


class Edit(NamedTuple):
    """A pattern in a file, what it becomes, what then goes wrong, and in which of the kernels below."""

    file: str
    old: str
    new: str
    error: type[Exception] | tuple[type[Exception], ...]
    kernels: str = "one two exact_two speculative_one"


TWO_PANELS = dataclasses.replace(SPEC, head_dim=128, head_dim_v=128)
SPECULATIVE = {"speculative": True, "scheduler": Scheduler.DYNAMIC}
KERNELS = {  # by softmax, and the slots of Q
    "one": TWO_PANELS,
    "two": dataclasses.replace(TWO_PANELS, **SPECULATIVE, q_stages=2),
    "exact_two": dataclasses.replace(TWO_PANELS, q_stages=2),
    "speculative_one": dataclasses.replace(TWO_PANELS, **SPECULATIVE),
    "serial": dataclasses.replace(TWO_PANELS, overlap=False),
    "wide_v": dataclasses.replace(TWO_PANELS, head_dim=64),
    "three": dataclasses.replace(TWO_PANELS, three_stage=True, pingpong=False),
    "window_one": dataclasses.replace(TWO_PANELS, window=True),
    "window_two": dataclasses.replace(TWO_PANELS, **SPECULATIVE, q_stages=2, window=True),
    "window_serial": dataclasses.replace(TWO_PANELS, overlap=False, window=True),
}
PIPELINED = "two exact_two"
SINGLE = "one speculative_one"
DYNAMIC = "two speculative_one"
WINDOWS = "window_one window_two window_serial"

CONSUMER = "hopper/consumer.cuh"
THREE_STAGE = "hopper/three_stage.cuh"
PLACE = "hopper/place.cuh"
PRODUCER_SOURCE = "hopper/producer.cuh"
STORER_SOURCE = "hopper/storer.cuh"
EPILOGUE = "hopper/epilogue.cuh"
WORK = "hopper/work.cuh"
SCHEDULER = "tile_scheduler.cuh"
MASK = "mask.cuh"
LATE = (StaleGeneration, EarlyRead, EarlyReuse, ArrivalOverflow)  # what a wait that proves nothing leads to

EDITS = {
    # Products and the K and V rings
    "v is not released": Edit(CONSUMER, r"release\(v\);(\s*if \(!same_frame\) scale_rows)", r"\1", Deadlock),
    "k released before its wait": Edit(
        CONSUMER, r"(complete<1>\(scores\);)[^\n]*\s*release\(k\);", r"release(k); \1", ReleaseBeforeCompletion
    ),
    "v released before its wait": Edit(
        CONSUMER,
        r"(complete<0>\(O\);)[^\n]*\s*release\(v\);(\s*if \(!same_frame\) scale_rows)",
        r"release(v); \1 \2",
        ReleaseBeforeCompletion,
    ),
    "last v released before its wait": Edit(
        CONSUMER, r"(complete<1>\(O\);)[^\n]*\s*release\(v\);", r"release(v); \1", ReleaseBeforeCompletion, PIPELINED
    ),
    "a wait that leaves the last product in flight": Edit(
        CONSUMER, r"complete<1>\(O\);", "complete<2>(O);", ReleaseBeforeCompletion, PIPELINED
    ),
    "O handed over while the last product runs": Edit(
        CONSUMER,
        r"(complete<1>\(O\);[^\n]*\s*release\(v\);)(\s*finish\(O, softmax, work\);)",
        r"\2 \1",
        AccumulatorInFlight,
        PIPELINED,
    ),
    "next k released before its wait": Edit(
        CONSUMER, r"complete<0>\(scores\);[^\n]*(\s*work = next;)", r"\1", ReleaseBeforeCompletion, PIPELINED
    ),
    "first k of a tile is not released": Edit(CONSUMER, r"release\(k\);(\s*const Sequence)", r"\1", Deadlock),
    "the next scores from the old Q": Edit(CONSUMER, r"rows_of\(next\)", "rows_of(work)", StaleGeneration, PIPELINED),
    "scores without a fence": Edit("hopper/gemm.cuh", r"ptx::wgmma_fence\(\);  // earlier reads", "//", MissingFence),
    "output without a fence": Edit("hopper/gemm.cuh", r"ptx::wgmma_fence\(\);  // earlier writes", "//", MissingFence),
    "parity never flips": Edit("ring.cuh", r"parity_ \^= 1;", "", (*LATE, Deadlock)),
    "producer starts in the consumer's phase": Edit(
        "ring.cuh", r"\(data, barriers, 1, first\)", "(data, barriers, 0, first)", Deadlock
    ),
    "one release per warpgroup expected, four come": Edit(
        "hopper/fwd.cu",
        r"initialise\(storage.k_barriers, consumer_warps<S>\)",
        r"initialise(storage.k_barriers, S.consumers())",
        LATE,
    ),
    "half of the bytes announced": Edit(
        "ring.cuh",
        r"expect_tx\(slot.full, filled_bytes\)",
        "expect_tx(slot.full, slot_bytes / 2)",
        (EarlyRead, Deadlock),
    ),
    "twice the bytes announced": Edit(
        "ring.cuh", r"expect_tx\(slot.full, filled_bytes\)", "expect_tx(slot.full, slot_bytes * 2)", Deadlock
    ),
    "barriers used before they are initialised": Edit("hopper/fwd.cu", r"__syncthreads\(\);", "", EarlyRead),
    "k released before its wait, three stages": Edit(
        THREE_STAGE,
        r"(complete<0>\(O\);  // proves O and[\s\S]*?)release\(k_read\);",
        r"release(k_read); \1",
        ReleaseBeforeCompletion,
        "three",
    ),
    "v released before its wait, three stages": Edit(
        THREE_STAGE,
        r"(complete<0>\(O\);  // proves O and[\s\S]*?release\(k_read\);\s*)release\(v\);",
        r"release(v); \1",
        ReleaseBeforeCompletion,
        "three",
    ),
    "the next k released instead, three stages": Edit(
        THREE_STAGE, r"release\(k_read\);", "release(k);", (ReleaseBeforeCompletion, *LATE, Deadlock), "three"
    ),
    "a wait that leaves the output in flight, three stages": Edit(
        THREE_STAGE, r"complete<0>\(O\);  // proves O and", "complete<1>(O);  //", ReleaseBeforeCompletion, "three"
    ),
    # What is loaded
    "another block is loaded": Edit(
        PRODUCER_SOURCE, r"load_k\(these, row - S.tile_n\)", "load_k(these, row)", StaleGeneration
    ),
    "a block is left out": Edit(
        PRODUCER_SOURCE,
        r"row > these.first \+ S.tile_n; row",
        "row > these.first + 2 * S.tile_n; row",
        (StaleGeneration, Deadlock, MissingProduct, EarlyRead),
    ),
    "the keys of the last tile again": Edit(
        PRODUCER_SOURCE, r"\n      keys = Keys::of<S>\(p, tile\);", "", (StaleGeneration, Deadlock)
    ),
    "the one Q slot filled before the last V": Edit(
        PRODUCER_SOURCE,
        r"if constexpr \(S.q_stages > 1\) (post_or_close\(tile\);\s*load_v\(these, these.first\);)[^;]*;",
        r"\1",
        Deadlock,
        SINGLE,
    ),
    "V as wide as Q": Edit(
        PRODUCER_SOURCE, r"load<S, S.head_dim_v, S.tile_n>", "load<S, S.head_dim, S.tile_n>", Deadlock, "wide_v"
    ),
    "Q announced as wide as O": Edit(PRODUCER_SOURCE, r"::q_bytes", "::qo_bytes", Deadlock, "wide_v"),
    # Windows: who begins where
    "the producer loads a window from the first key": Edit(
        PRODUCER_SOURCE,
        r"\{rows.first \+ blocks.begin \*",
        "{rows.first + 0 *",
        (*LATE, Deadlock, MissingProduct),
        WINDOWS,
    ),
    "the producer begins one block late": Edit(
        PRODUCER_SOURCE,
        r"\{rows.first \+ blocks.begin \*",
        "{rows.first + min(blocks.begin + 1, blocks.end - 1) *",
        (*LATE, Deadlock, MissingProduct),
        WINDOWS,
    ),
    "the producer ends with the keys of the next tile": Edit(
        PRODUCER_SOURCE,
        r"load_v\(these, these.first\)",
        "load_v(keys, keys.first)",
        StaleGeneration,
        "window_one window_serial",
    ),
    "the consumers walk down to the first key": Edit(
        PLACE, r"\{all.begin,", "{0,", (*LATE, Deadlock, MissingProduct), WINDOWS
    ),
    "each warpgroup begins at its own block": Edit(
        PLACE, r"\{all.begin,", "{masked.begin,", (*LATE, Deadlock, MissingProduct), WINDOWS
    ),
    "the window of the last row": Edit(
        MASK,
        r"\{sequence.first_key\(row_begin\) / S.tile_n",
        "{sequence.first_key(row_end - 1) / S.tile_n",
        (StaleGeneration, MissingProduct),
        WINDOWS,
    ),
    "the first whole block of a window": Edit(
        MASK,
        r"\{sequence.first_key\(row_begin\) / S.tile_n",
        "{(sequence.first_key(row_begin) + S.tile_n - 1) / S.tile_n",
        (StaleGeneration, MissingProduct),
        WINDOWS,
    ),
    "the window of the right side": Edit(
        MASK, r"row \+ p_.first_diagonal", "row + p_.last_diagonal", (StaleGeneration, MissingProduct), WINDOWS
    ),
    "rounds down to the first key": Edit(
        CONSUMER,
        r"while \(j > blocks.begin\) round",
        "while (j > 0) round",
        (*LATE, Deadlock, MissingProduct),
        "window_one",
    ),
    "pairs of rounds down to the first key": Edit(
        CONSUMER,
        r"while \(j >= blocks.begin \+ 2\)",
        "while (j >= 2)",
        (*LATE, Deadlock, MissingProduct),
        "window_two",
    ),
    "blocks down to the first key, without overlap": Edit(
        CONSUMER, r"j >= blocks.begin; --j", "j >= 0; --j", (*LATE, Deadlock, MissingProduct), "window_serial"
    ),
    "a k behind the window waited for": Edit(
        CONSUMER,
        r"if \(j > blocks.begin\) k = K_.wait\(\);(\s*complete<0>)",
        r"if (j > 0) k = K_.wait();\1",
        (*LATE, Deadlock, MissingProduct),
        "window_one window_two",
    ),
    "tiles of a window backwards": Edit(
        SCHEDULER, r"tile_of\(S.tiles_grow\(\)", "tile_of(S.causal", TileSetViolation, WINDOWS
    ),
    "tiles of a window in reverse rounds": Edit(
        SCHEDULER, r"S.tiles_grow\(\) && round_", "S.causal && round_", TileSetViolation, "window_one window_serial"
    ),
    # Query tiles: the work ring and the scheduler
    "no close": Edit(PRODUCER_SOURCE, r"(else \{\s*)works.close\(\);", r"\1", Deadlock),
    "a tile without coordinates": Edit(WORK, r"tiles_\[this->stage_\] = tile;", "", (Deadlock, MissingProduct)),
    "coordinates written over those in use": Edit(
        WORK, r"wait_parity\(slot.empty, this->parity_\);", "", (*LATE, Deadlock, TileSetViolation)
    ),
    "coordinates read before they are there": Edit(
        WORK, r"wait_parity\(this->slot\(\).full, this->parity_\);", "", (*LATE, Deadlock)
    ),
    "work producer starts in the consumer's phase": Edit(WORK, r"q, 1\), tiles_", "q, 0), tiles_", Deadlock),
    "next work not waited for, two slots": Edit(
        CONSUMER, r"Work next = works_.next\(\);", "Work next = work;", (*LATE, MissingProduct), PIPELINED
    ),
    "next work not waited for, one slot": Edit(
        CONSUMER, r"\n        work = works_.next\(\);", "", (*LATE, MissingProduct), SINGLE
    ),
    "next work not taken over": Edit(CONSUMER, r"work = next;", "", (*LATE, Deadlock), PIPELINED),
    "no advance": Edit(PRODUCER_SOURCE, r"tiles.advance\(\);", "", TileSetViolation),
    "counter not reset": Edit(SCHEDULER, r"\*p_.tile_counter = 0;", "{}", TileSetViolation, DYNAMIC),
    "counter reset by the last draw but one": Edit(
        SCHEDULER, r"number_ == tiles\(\) - 1", "number_ == tiles() - 2", TileSetViolation, DYNAMIC
    ),
    "counter reset by the first draw in vain": Edit(
        SCHEDULER, r" && number_ == tiles\(\) - 1", "", TileSetViolation, DYNAMIC
    ),
    "no reverse": Edit(SCHEDULER, r"\(reverse \?", "(false ?", TileSetViolation, "one exact_two"),
    # O: hand-over and store
    "O over a Q that another warp reads": Edit(EPILOGUE, r"ptx::bar_sync\([^;]*;", "", (EarlyReuse, StaleGeneration)),
    "one epilogue barrier for all": Edit(
        EPILOGUE,
        r"epilogue_barrier \+ place.warpgroup",
        "epilogue_barrier",
        (EarlyReuse, StaleGeneration, ParticipantMismatch),
    ),
    "O invisible to TMA": Edit(EPILOGUE, r"ptx::fence_proxy_async_shared_cta\(\);", "", EarlyRead),
    "O not announced": Edit(EPILOGUE, r"if \(place.lane\(\) == 0\) ptx::mbarrier_arrive\(staged\);", "", Deadlock),
    "O announced before it is there": Edit(
        EPILOGUE,
        r"(stage_output<S>\(O, inverse, place, slot\);[\s\S]*)(if [^;\n]*mbarrier_arrive\(staged\);)",
        r"\2 \1",
        EarlyRead,
    ),
    "one hand-over too few expected": Edit(
        "hopper/fwd.cu",
        r"initialise\(storage.work_barriers, storage.tiles, consumer_warps<S>\)",
        "initialise(storage.work_barriers, storage.tiles, consumer_warps<S> - 1)",
        (EarlyRead, ArrivalOverflow),
    ),
    "one hand-over too many expected": Edit(
        "hopper/fwd.cu",
        r"initialise\(storage.work_barriers, storage.tiles, consumer_warps<S>\)",
        "initialise(storage.work_barriers, storage.tiles, consumer_warps<S> + 1)",
        Deadlock,
    ),
    "two arrivals make the slot of Q empty": Edit(
        WORK, r"initialise\(barriers.q, 1\)", "initialise(barriers.q, 2)", Deadlock
    ),
    "O stored before it is staged": Edit(STORER_SOURCE, r"wait_parity\(works.staged[^;]*;", "", EarlyRead),
    "O of the round before": Edit(STORER_SOURCE, r", work.parity\)", ", work.parity ^ 1)", EarlyRead),
    "slot given back before O is read": Edit(
        STORER_SOURCE,
        r"(ptx::cp_async_bulk_wait_group_read<0>\(\);)[^\n]*(\s*ptx::mbarrier_arrive\(works.empty\(work\)\);)",
        r"\2 \1",
        ReleaseBeforeCompletion,
    ),
    "slot given back while O is being read": Edit(
        STORER_SOURCE, r"ptx::cp_async_bulk_wait_group_read<0>\(\);", "", ReleaseBeforeCompletion
    ),
    "slot not given back": Edit(STORER_SOURCE, r"ptx::mbarrier_arrive\(works.empty\(work\)\);", "", Deadlock),
    "O stored from the first slot": Edit(
        STORER_SOURCE, r"works.data\(work\)", "works.data({0, 0})", (StaleGeneration, EarlyRead), PIPELINED
    ),
    "O stored to the next head": Edit(
        "hopper/rows.cuh", r"(tensor_4d_store\(map, column, rows.first, rows.head)", r"\1 + 1", AssertionError
    ),
    "O as wide as Q": Edit(STORER_SOURCE, r"panels\(S.head_dim_v\)", "panels(S.head_dim)", TileSetViolation, "wide_v"),
    "LSE stored when the slot may hold another tile": Edit(
        CONSUMER,
        r"(store_lse<S>[^;]*;)(\s*clear_rows_without_keys<S>[^;]*;\s*hand_over<S>[^;]*;)",
        r"\2 \1",
        TileSetViolation,
    ),
    # Turns
    "bootstrap left out": Edit(CONSUMER, r"if \(S.pingpong && last\) [^\n]*\n", "", Deadlock),
    "a turn of 128 threads": Edit(CONSUMER, r"bar_sync\(own_, [^)]*\)", "bar_sync(own_, 128)", ParticipantMismatch),
    "a turn of 384 threads": Edit(CONSUMER, r"participants = 2 \*", "participants = 3 *", Deadlock),
    "waits on the physical index": Edit(
        CONSUMER, r"bar_sync\(own_,", "bar_sync(own_ + 1,", (Deadlock, ParticipantMismatch)
    ),
    "each warpgroup walks its own blocks": Edit(
        PLACE,
        r"row, row \+ S.tile_m\)",
        "own, own + warpgroup_rows)",
        (Deadlock, StaleGeneration, EarlyReuse, MissingProduct),
    ),
    "turn not passed": Edit(
        CONSUMER, r"turn_.pass\(\);(\s*if constexpr \(!BiasBox[^\n]*\s*complete<1>)", r"\1", Deadlock
    ),
    "last turn not passed, without overlap": Edit(CONSUMER, r"turn_.pass\(\);(\s*finish)", r"\1", Deadlock, "serial"),
    "last credit not taken": Edit(CONSUMER, r"turn_.finish\(\);", "", ConservationError),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found(tmp_path, edit):
    file, old, new, error, kernels = EDITS[edit]
    specs = [KERNELS[name] for name in kernels.split()]
    host = Host(tmp_path, specs, {file: (old, new)})
    for spec in specs:
        with pytest.raises(error):
            replay_often(host, spec)


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
def test_nothing_is_found_without_an_edit(tmp_path, spec):
    replay_often(Host(tmp_path, [spec]), spec)


def replay_often(host, spec):
    for seed in range(20):
        replay(host, spec, Problem(448, 400, heads_q=2), seed, ctas=2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"swizzled\(start, panel_bytes\(rows\), swizzle_atom_bytes\)", "swizzled(start, 16, swizzle_atom_bytes)"),
        (r"\(1u << 30\)", "(2u << 30)"),
        (r"u32\(bytes >> 4\)", "u32(bytes >> 5)"),
        (r"swizzled\(start, 16, swizzle_atom_bytes\)", "swizzled(start, 16, 512)"),
    ],
)
def test_a_wrong_descriptor_is_found(tmp_path, old, new):
    host = Host(tmp_path, [TWO_PANELS], {"layout.cuh": (old, new)})
    with pytest.raises(AssertionError, match=r"step|keys"):
        replay(host, TWO_PANELS, Problem(128, 128), 0)
