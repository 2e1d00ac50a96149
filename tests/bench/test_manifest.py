"""The JSON record."""

import json

import pytest

import cupyfa
from cupyfa.bench import host, manifest
from cupyfa.bench.correctness import Check
from cupyfa.bench.harness import Spread, Timing
from cupyfa.bench.manifest import Row
from cupyfa.bench.peers import Availability
from cupyfa.bench.problems import Cell
from cupyfa.spec import Bias, DType, FwdSpec, Scheduler

CELL = Cell(head_dim=128, seqlen=1024, batch=16, heads=16, causal=True)
SPEC = FwdSpec(
    dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128, tile_m=128, tile_n=128, stages=2, q_stages=2,
    varlen=False, causal=True, window=False, sink=False, softcap=False, alibi=False, bias=Bias.NONE,
    bias_float32=False, bias_stages=0, negate_scores=False,
    overlap=True, three_stage=False,
    speculative=True, rescale_threshold=0, exp2_fma=0, pingpong=True, warp_specialized=True,
    scheduler=Scheduler.PERSISTENT, longest_first=True, setmaxnreg=True,
)  # fmt: skip
ROW = Row(
    CELL,
    SPEC,
    {
        "cuDNN": Check(True, float64=1e-3, share=0.3),
        "cupyfa": Check(True, float64=1e-3, peer=2e-3, reference="cuDNN", share=0.4),
        "flash": Check(False, message="RuntimeError: No available kernel"),
    },
    {"cuDNN": Timing(40, (2e-4, 3e-4, 4e-4)), "cupyfa": Timing(50, (1e-4, 2e-4, 2e-4))},
    before={"sm_mhz": 1980.0, "power_w": 120.0},
    after={"sm_mhz": 1700.0, "power_w": 600.0},
)


def test_row_has_everything_that_explains_a_figure():
    entry = manifest.describe_row(ROW)
    assert entry["problem"] == {
        "head_dim": 128, "seqlen": 1024, "batch": 16, "heads": 16, "causal": True, "dtype": "bfloat16",
        "heads_kv": None, "window_size": (None, None), "softcap": None, "sink": False, "alibi": False,
        "bias": "", "bias_dtype": "float32", "head_dim_v": None,
    }  # fmt: skip
    assert entry["spec"] == str(SPEC)
    assert entry["timing_boundary"] == "CUDA events around a batch of N calls, host overhead overlapped"
    assert entry["regime"] == manifest.CONVENTIONS["regime"]
    assert "N(0, 1)" in entry["inputs"]
    assert entry["clocks_before"]["sm_mhz"] == 1980
    assert entry["clocks_after"]["power_w"] == 600
    # 8 query tiles visit 1 + 2 + ... + 8 of 8 x 8 tiles.
    assert entry["flops"] == {
        "useful": CELL.dense_flops // 2,
        "dense_equivalent": CELL.dense_flops,
        "scheduled": CELL.dense_flops * 36 // 64,
    }


def test_row_has_figures_and_spread():
    contestants = manifest.describe_row(ROW)["contestants"]
    own = contestants["cupyfa"]["timing"]
    assert (own["calls"], own["rounds"], own["seconds"]) == (50, 3, (1e-4, 2e-4, 2e-4))
    assert (own["seconds_median"], own["seconds_low"], own["seconds_high"]) == (2e-4, 1e-4, 2e-4)
    assert own["tflops_useful"] == pytest.approx(CELL.useful_flops / 2e-4 / 1e12)
    assert own["tflops_dense_equivalent"] == pytest.approx(2 * own["tflops_useful"])
    assert own["tflops_scheduled"] == pytest.approx(own["tflops_dense_equivalent"] * 36 / 64)
    assert own["speed_over_cuDNN"] == pytest.approx({"median": 2.0, "low": 1.5, "high": 2.0})
    assert contestants["cuDNN"]["timing"]["tflops_scheduled"] is None  # its tiles are not known
    assert contestants["cupyfa"]["correctness"]["reference"] == "cuDNN"
    assert contestants["flash"]["timing"] is None
    assert contestants["flash"]["correctness"]["message"] == "RuntimeError: No available kernel"


def test_row_without_baseline_or_kernel():
    row = Row(CELL, None, {"cupyfa": Check(True)}, {"cupyfa": Timing(1, (1.0,))})
    entry = manifest.describe_row(row)
    assert entry["spec"] is None
    assert entry["flops"]["scheduled"] is None
    assert entry["contestants"]["cupyfa"]["timing"]["speed_over_cuDNN"] is None


def test_the_baseline_may_be_another_one():
    contestants = manifest.describe_row(ROW, "cupyfa")["contestants"]
    assert contestants["cuDNN"]["timing"]["speed_over_cupyfa"]["median"] == pytest.approx(0.5)
    assert "speed_over_cuDNN" not in contestants["cuDNN"]["timing"]


def test_manifest_is_strict_json(tmp_path):
    peers = [Availability("FA3", "flash-attn 3", None, "ModuleNotFoundError: no"), Availability("FA4", "x", "4.0")]
    header = manifest.environment(None, peers)
    wanted = {
        "date", "cupyfa", "python", "numpy", "host_cpu", "driver", "gpu", "multiprocessors", "cuda_driver", "nvrtc",
        "cupy", "torch", "cudnn", "peers", "batch_seconds", "clocks_from",
    }  # fmt: skip
    assert set(header) == wanted
    assert header["cupyfa"] == cupyfa.__version__
    assert header["date"].endswith("+00:00")
    cost = host.HostCost(host.CELL, 2000, {"cupyfa": Spread(9.0, 8.5, 9.9)}, {"flash": "no"})
    path = tmp_path / "bench.json"
    manifest.write(str(path), header, [ROW], host.describe(cost))
    record = json.loads(path.read_text(encoding="utf-8"))
    assert set(record) == {"environment", "conventions", "rows", "host_cost"}
    assert record["environment"]["peers"][0]["reason"] == "ModuleNotFoundError: no"
    assert record["host_cost"]["microseconds"]["cupyfa"] == {"median": 9.0, "low": 8.5, "high": 9.9}
    assert len(record["rows"]) == 1


def test_manifest_refuses_nan(tmp_path):
    row = Row(CELL, None, {"cupyfa": Check(True, float64=float("nan"))}, {})
    with pytest.raises(ValueError, match="JSON"):
        manifest.write(str(tmp_path / "x.json"), {}, [row], None)
