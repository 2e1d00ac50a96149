"""The forward kernel's own sources against the Hopper oracles: every wait, arrival, copy, descriptor and turn.

The roles are compiled for the host and their requests replayed in many interleavings (`hopper_trace`). The emulator of
compiled PTX will repeat this on what the device really runs; here nothing but a C++ compiler is needed.
"""

import dataclasses

import pytest
from hopper_trace import Problem, Traces, replay, tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.hopper.barriers import ArrivalOverflow, ParticipantMismatch
from cupyfa.oracles.hopper.ledger import SM90, RegisterPool, ThreadRegisters, ownership, shared_memory
from cupyfa.oracles.hopper.machine import Deadlock
from cupyfa.oracles.hopper.pipeline import EarlyRead, EarlyReuse, StaleGeneration
from cupyfa.oracles.hopper.ring import positions
from cupyfa.oracles.hopper.roles import Config, load_order, run
from cupyfa.oracles.hopper.swizzle import panel_addresses
from cupyfa.oracles.hopper.token_ring import handoffs
from cupyfa.oracles.hopper.two_stage import MissingProduct
from cupyfa.oracles.hopper.wgmma_queue import ReleaseBeforeCompletion
from cupyfa.select import CANDIDATES
from cupyfa.spec import DType, FwdSpec, Scheduler

SPEC = FwdSpec(
    dtype=DType.BFLOAT16,
    head_dim=64,
    tile_m=128,
    tile_n=64,
    stages=2,
    q_stages=1,
    causal=True,
    negate_scores=False,
    overlap=True,
    speculative=False,
    pingpong=True,
    scheduler=Scheduler.PERSISTENT,
    setmaxnreg=True,
)
VARIANTS = [
    {},
    {"overlap": False},
    {"stages": 1},
    {"stages": 1, "overlap": False, "pingpong": False},
    {"stages": 3, "q_stages": 2, "causal": False},
    {"tile_m": 192, "q_stages": 2},
    {"tile_m": 192, "overlap": False, "causal": False},
    {"tile_m": 64, "pingpong": False, "setmaxnreg": False},
    {"head_dim": 128, "tile_n": 112, "dtype": DType.FLOAT16},
    {"speculative": True},
    {"speculative": True, "stages": 1, "dtype": DType.FLOAT16},
    {"speculative": True, "stages": 3, "q_stages": 2, "causal": False, "pingpong": False},
    {"speculative": True, "tile_m": 192},
]
SPECS = [dataclasses.replace(SPEC, **variant) for variant in VARIANTS]
FIELDS = ("head_dim", "tile_m", "tile_n", "q_stages", "speculative", "pingpong")
TABLE = [dataclasses.replace(SPEC, **{name: getattr(row, name) for name in FIELDS}) for row in CANDIDATES]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return Traces(tmp_path_factory.mktemp("trace"), [*SPECS, *TABLE])


# --- Everything at once ---


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    spec=st.sampled_from(SPECS),
    seqlen_q=st.integers(1, 500),
    seqlen_k=st.integers(0, 400),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    seed=st.integers(0, 2**32),
)
def test_random_problems_in_random_interleavings(traces, spec, seqlen_q, seqlen_k, heads, seed):
    """Empty tiles (seqlen_q > seqlen_k with a causal mask), one block, many tiles, one slot to three."""
    trace = traces.of(spec, Problem(seqlen_q, seqlen_k, *heads))
    played = replay(trace, seed)
    blocks = [n for _, _, n in tiles(trace)]
    assert all(barrier.pending == barrier.arrivals for barrier in played.barriers.values())  # nothing half done
    if spec.pingpong:
        groups = spec.tile_m // 64
        calls = sum(handoffs(n, spec.overlap) for n in blocks)
        assert played.turns == [*list(range(groups)) * calls, 0]  # at the end the first warpgroup takes the last credit
        assert [played.named[1 + g].arrived for g in range(groups)] == [0] * groups
    else:
        assert played.turns == []


@pytest.mark.parametrize("spec", TABLE, ids=str)
def test_kernels_that_are_selected(traces, spec):
    trace = traces.of(spec, Problem(300, 300, 1, 1))
    for seed in range(2):
        replay(trace, seed)


def test_empty_tiles_make_no_turn_and_load_only_q(traces):
    trace = traces.of(SPEC, Problem(seqlen_q=300, seqlen_k=40))
    assert [n for _, _, n in tiles(trace)] == [1, 0, 0]  # rows 0 to 255 see no key
    loads = [op[2] for op in trace.agents["thread 0"] if op[0] == "load"]
    assert loads == ["K", "Q", "V", "Q", "Q"]
    replay(trace, 0)


# --- The oracle's roles are twins ---


@pytest.mark.parametrize("spec", [s for s in SPECS if s.head_dim == 64], ids=str)
def test_producer_order_is_that_of_the_oracle(traces, spec):
    trace = traces.of(spec, Problem(400, 300))
    got = [(op[2], int(op[4])) for op in trace.agents["thread 0"] if op[0] == "load"]
    want = []
    for m, _, blocks in tiles(trace):
        for tensor, r in load_order(blocks):
            want.append((tensor, m * spec.tile_m if tensor == "Q" else (blocks - 1 - r) * spec.tile_n))
    assert got == want


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_waits_have_the_stages_and_parities_of_the_oracle(traces, spec):
    """All try_wait of both sides, against the coordinate table of the whole CTA."""
    trace = traces.of(spec, Problem(400, 300))
    _, _, _, q_bar, k_bar, v_bar, _ = trace.layout
    blocks = sum(n for _, _, n in tiles(trace))
    for base, stages, count in (
        (q_bar, spec.q_stages, len(tiles(trace))),
        (k_bar, spec.stages, blocks),
        (v_bar, spec.stages, blocks),
    ):
        full = [(base + 8 * p.stage, p.full_parity) for p in positions(count, stages)]
        empty = [(base + 8 * (stages + p.stage), p.empty_parity) for p in positions(count, stages)]
        for name, want in (("thread 0", empty), ("thread 128", full)):
            ops = [(int(op[1]), int(op[2])) for op in trace.agents[name] if op[0] == "try_wait"]
            assert [op for op in ops if base <= op[0] < base + 16 * stages] == want


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_consumer_order_is_that_of_the_oracle(traces, spec):
    """Waits, products, releases and turns of a warp, in program order."""
    problem = Problem(spec.tile_m, 300)
    trace = traces.of(spec, problem)
    ((_, _, blocks),) = tiles(trace)
    _, _, _, q_bar, k_bar, v_bar, _ = trace.layout

    def ring_of(barrier):
        return "VKQ"[[barrier >= v_bar, barrier >= k_bar, barrier >= q_bar].index(True)]

    got, products = [], None
    for op in trace.agents["thread 128"]:
        if op[0] in ("ss", "rs"):
            products = "QK" if op[0] == "ss" else "PV"
        elif op[0] == "commit":
            got.append(products)
        elif op[0] in ("try_wait", "arrive"):
            got.append(("wait" if op[0] == "try_wait" else "release") + " " + ring_of(int(op[1])))
        elif op[0] in ("bar_sync", "bar_arrive") and int(op[1]) < 4:
            got.append("sync" if op[0] == "bar_sync" else "arrive")

    config = Config(spec.tile_m // 64, spec.stages, spec.q_stages, spec.overlap, spec.pingpong)
    cta = run(config, [blocks])
    want = []
    for event in cta.machine.events:
        if event.agent == "tensor" and event.target == "consumer 0":
            want.append(event.action)
        elif event.agent == "consumer 0" and event.action in ("wait", "release"):
            want.append(f"{event.action} {event.target}")
        elif event.agent == "consumer 0" and event.action in ("sync", "arrive"):
            want.append(event.action)
    if spec.pingpong:
        want.append("sync")  # the kernel takes the last credit, which the oracle leaves
    assert got == want


# --- Layout and registers ---


@pytest.mark.parametrize("spec", [*SPECS, *TABLE], ids=str)
def test_shared_memory_is_that_of_the_ledger(traces, spec):
    q, k, v, q_bar, k_bar, v_bar, size = traces.of(spec, Problem(1, 1)).layout
    ledger = shared_memory(spec.tile_m, spec.tile_n, spec.head_dim, spec.head_dim, 2, spec.stages)
    assert (k - q, v - k, q_bar - v) == (spec.q_stages * ledger.q, ledger.k, ledger.v)
    assert (k_bar - q_bar, v_bar - k_bar) == (16 * spec.q_stages, 16 * spec.stages)
    barriers = 16 * spec.q_stages + 2 * 16 * spec.stages
    assert barriers == ledger.barriers + 16 * (spec.q_stages - 1)
    assert size == -(-(spec.q_stages * ledger.q + ledger.k + ledger.v + barriers) // 1024) * 1024
    assert all(start % 1024 == 0 for start in (q, k, v))  # where the swizzle pattern begins
    assert size <= SM90.shared_bytes_per_block


def test_chunk_addresses_are_swizzled(traces):
    tile = panel_addresses(1024, 16, 64, 2)
    assert traces.of(SPEC, Problem(1, 1)).chunks == tile[:, ::8].ravel().tolist()


@pytest.mark.parametrize("spec", [s for s in [*SPECS, *TABLE] if s.setmaxnreg], ids=str)
def test_setmaxnreg_fits_what_the_launch_allocates(traces, spec):
    trace = traces.of(spec, Problem(1, 1))
    asked = {name: int(op[1]) for name, ops in trace.agents.items() for op in ops if op[0] == "setmaxnreg"}
    consumers = spec.tile_m // 64
    pool = RegisterPool(1 + consumers, SM90.registers // (128 * (1 + consumers)) // 8 * 8)
    pool.request(0, [asked["thread 0"]] * 4)
    for g in range(1, 1 + consumers):
        pool.request(g, [asked[f"thread {128 * g + 32 * w}"] for w in range(4)])
    assert ownership(consumers, ThreadRegisters(asked["thread 0"], asked["thread 128"])) <= SM90.registers


# --- The replay can fail: one edit of the sources each ---

CONSUMER = "hopper/consumer.cuh"
EDITS = {
    "v is not released": (CONSUMER, r"release\(v\);(\s*if \(!in_range\) scale_rows)", r"\1", Deadlock),
    "k released before its wait": (
        CONSUMER,
        r"complete<1>\(scores\);[^\n]*\s*release\(k\);",
        "release(k); complete<1>(scores);",
        ReleaseBeforeCompletion,
    ),
    "v released before its wait": (
        CONSUMER,
        r"complete<0>\(O\);[^\n]*\s*release\(v\);(\s*if \(!in_range\) scale_rows)",
        r"release(v); complete<0>(O);\1",
        ReleaseBeforeCompletion,
    ),
    "q given back while O is being stored": (
        "hopper/epilogue.cuh",
        r"ptx::cp_async_bulk_wait_group_read<0>\(\);",
        "",
        ReleaseBeforeCompletion,
    ),
    "parity never flips": (
        "ring.cuh",
        r"parity_ \^= 1;",
        "",
        (StaleGeneration, EarlyRead, EarlyReuse, ArrivalOverflow, Deadlock),
    ),
    "producer starts in the consumer's phase": (
        "ring.cuh",
        r"\(data, barriers, 1\) \{\}",
        "(data, barriers, 0) {}",
        Deadlock,
    ),
    "one release per warpgroup expected, four come": (
        "hopper/storage.cuh",
        r"kv_releases = 4 \* S",
        "kv_releases = S",
        (EarlyReuse, StaleGeneration, EarlyRead, ArrivalOverflow),
    ),
    "half of the bytes announced": (
        "ring.cuh",
        r"expect_tx\(slot.full, slot_bytes\)",
        "expect_tx(slot.full, slot_bytes / 2)",
        EarlyRead,
    ),
    "twice the bytes announced": (
        "ring.cuh",
        r"expect_tx\(slot.full, slot_bytes\)",
        "expect_tx(slot.full, slot_bytes * 2)",
        Deadlock,
    ),
    "another block is loaded": ("hopper/producer.cuh", r"\(j - 1\) \* S.tile_n", "j * S.tile_n", StaleGeneration),
    "a block is left out": ("hopper/producer.cuh", r"if \(j > 0\) load", "if (j > 1) load", Deadlock),
    "bootstrap left out": (CONSUMER, r"if \(S.pingpong && last\) [^\n]*\n", "", Deadlock),
    "a turn of 128 threads": (CONSUMER, r"bar_sync\(own_, [^)]*\)", "bar_sync(own_, 128)", ParticipantMismatch),
    "a turn of 384 threads": (CONSUMER, r"participants = 2 \*", "participants = 3 *", Deadlock),
    "waits on the physical index": (
        CONSUMER,
        r"bar_sync\(own_,",
        "bar_sync(own_ + 1,",
        (Deadlock, ParticipantMismatch),
    ),
    "each warpgroup walks its own blocks": (
        CONSUMER,
        r"row, row \+ S.tile_m\).end",
        "first, first + 64).end",
        (Deadlock, StaleGeneration, EarlyReuse, MissingProduct),
    ),
    "turn not passed": (CONSUMER, r"turn_.pass\(\);(\s*complete<1>)", r"\1", Deadlock),
    "last turn not passed, without overlap": (
        CONSUMER,
        r"release\(v\);\s*\}\s*turn_.pass\(\);",
        "release(v); }",
        Deadlock,
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found(tmp_path, edit):
    name, old, new, error = EDITS[edit]
    exact = dataclasses.replace(SPEC, head_dim=128, overlap="without overlap" not in edit)  # two boxes per tile
    specs = [exact, dataclasses.replace(exact, speculative=True)][: 1 + exact.overlap]
    traces = Traces(tmp_path, specs, {name: (old, new)})
    for spec in specs:
        with pytest.raises(error):
            replay_often(traces.of(spec, Problem(448, 400)))


def replay_often(trace):
    for seed in range(20):
        replay(trace, seed)


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
    spec = dataclasses.replace(SPEC, head_dim=128)
    trace = Traces(tmp_path, [spec], {"layout.cuh": (old, new)}).of(spec, Problem(128, 128))
    with pytest.raises(AssertionError, match=r"step|keys"):
        replay(trace, 0)
