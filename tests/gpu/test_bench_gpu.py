"""The benchmarks of options and of gradients on the GPU, on problems of moderate size."""

from __future__ import annotations

import dataclasses

import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

import cupyfa  # noqa: E402
from cupyfa.bench import backward, backward_kernels  # noqa: E402
from cupyfa.bench.flex import FLEX  # noqa: E402
from cupyfa.bench.gradients import (  # noqa: E402
    DETERMINISTIC,
    GRADIENT_PEERS,
    BackwardCell,
    make_backward_inputs,
)
from cupyfa.bench.measure import measure  # noqa: E402
from cupyfa.bench.peers import Peer  # noqa: E402
from cupyfa.bench.problems import Cell, share_inputs  # noqa: E402
from cupyfa.select import Device  # noqa: E402

PLAIN = Cell(head_dim=64, seqlen=1000, batch=2, heads=8, causal=False, heads_kv=2)
OPTIONS = (
    {},
    {"window_size": (128, 0)},
    {"window_size": (64, 64)},
    {"window_size": (None, 0)},
    {"softcap": 50.0},
    {"sink": True},
    {"alibi": True},
    {"window_size": (200, 0), "softcap": 50.0, "sink": True, "alibi": True},
    {"bias": "bhqk"},
    {"bias": "qk", "bias_dtype": "same"},
    {"bias": "bk", "window_size": (200, 0), "softcap": 50.0, "sink": True, "alibi": True},
)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_option_is_right_and_its_kernel_is_warm(head_dim: int) -> None:
    cells = [dataclasses.replace(PLAIN, head_dim=head_dim, **options) for options in OPTIONS]
    warm = cupyfa.warmup([cell.warmup_call for cell in cells], progress=False)
    with cupy.cuda.Stream.null:
        rows = measure(share_inputs(cells, cupy), [], 1, batch_seconds=1e-4)
    assert [row.checks["cupyfa"] for row in rows if not row.checks["cupyfa"].passed] == []
    assert {row.spec for row in rows} == set(warm)
    for row in rows:
        assert row.scheduled_flops is not None
        assert row.scheduled_flops >= row.cell.useful_flops


@pytest.mark.filterwarnings("default")  # torch's compiler warns of itself
def test_flex_attention_computes_the_same() -> None:
    available = FLEX.probe()
    if available.version is None:
        pytest.skip(available.reason)
    biased = dataclasses.replace(PLAIN, bias="bhqk")
    cells = [dataclasses.replace(PLAIN, window_size=(200, 0), softcap=50.0, alibi=True), biased, PLAIN]
    with cupy.cuda.Stream.null:
        rows = measure(share_inputs(cells, cupy), [FLEX], 1, batch_seconds=1e-4)
    for row in rows:
        assert set(row.timings) == {"flex", "cupyfa"}, row.checks


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, None), (128, None), (192, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_right_and_each_kernel_is_timed(head_dim: int, head_dim_v: int | None, causal: bool) -> None:
    cell = BackwardCell(head_dim, 1000, 2, 4, causal, head_dim_v=head_dim_v)
    backward_kernels.compile_all([cell])
    with cupy.cuda.Stream.null:
        row = backward.measure(make_backward_inputs(cell, cupy), [], 1, cupy, batch_seconds=1e-4)
    assert [check for check in row.checks.values() if not check.passed] == []
    assert set(row.timings) == {"cupyfa", DETERMINISTIC}
    assert tuple(row.parts) == backward_kernels.PARTS
    assert row.spec in backward_kernels.specs(cell, False, Device.current())
    assert row.scheduled_flops is not None
    assert row.scheduled_flops >= row.cell.useful_flops


@pytest.mark.parametrize("peer", GRADIENT_PEERS, ids=lambda peer: peer.name)
def test_torch_computes_the_same_gradients(peer: Peer) -> None:
    available = peer.probe()
    if available.version is None:
        pytest.skip(available.reason)
    cell = BackwardCell(128, 1000, 2, 4, causal=True)
    with cupy.cuda.Stream.null:
        row = backward.measure(make_backward_inputs(cell, cupy), [peer], 1, cupy, batch_seconds=1e-4)
    assert set(row.timings) == {peer.name, "cupyfa", DETERMINISTIC}, row.checks
    assert row.checks["cupyfa"].reference == peer.name
