"""The registers of the three-stage kernels, with and without a compiler."""

import sys

from nvrtc_tools import import_nvrtc

from cupyfa.bench import ablation, three_stage
from cupyfa.bench.three_stage import TILES, Row, measure, payload, spec_of, table
from cupyfa.compiler import PtxasReport
from cupyfa.spec import DType


def spec(*tile):
    return spec_of(*tile, dtype=DType.BFLOAT16, causal=False)


def test_payload_is_o_two_s_and_p():
    assert payload(spec(128, 128, 128)) == (64 + 2 * 64 + 32, 232)
    assert payload(spec(128, 128, 176)) == (284, 232)
    assert payload(spec(128, 64, 96)) == (184, 255)
    assert payload(spec(64, 192, 80)) == (32 + 2 * 40 + 20, 160)


def test_larger_tile_of_the_paper_has_one_q_slot():
    assert [spec(*tile).q_stages for tile in TILES[:2]] == [1, 2]
    assert len(set(TILES)) == len(TILES)


def test_table():
    row = Row(spec(128, 128, 96), 168, (0, 0), (56 * 1024, 58 * 1024), (), 1.24)
    worse = Row(spec(64, 192, 96), 128, (4, 20), (2000, 2000), ("C7510", "C7512"), 0.5)
    assert table([row, worse])[2:] == [
        "| 128 | 128x96 | 184 | 232 | 168 | 0 | none | 56 to 58 | 1.2 |",
        "| 64 | 192x96 | 152 | 160 | 128 | 4 to 20 | C7510, C7512 | 2 | 0.5 |",
    ]


def test_the_variant_of_the_ablation_is_clean(bench, capsys, monkeypatch):
    import_nvrtc()
    tile = (128, 128, ablation.VARIANTS["exact, three stages"]["tile_n"])
    (row,) = measure([tile])
    assert (row.registers, row.spill_bytes, row.advisories) == (168, (0, 0), ())
    assert 20_000 < row.code_bytes[0] <= row.code_bytes[1] < 200_000
    monkeypatch.setattr(three_stage, "measure", lambda: [row])
    assert bench("ablation", "--registers") == 0  # before a GPU is asked for
    assert capsys.readouterr().out.splitlines() == table([row])


def test_advisories_are_collected():
    import_nvrtc()

    def build(kernel):
        compiled = three_stage.compile_offline(kernel)
        line = "ptxas info : (C7512) Potential Performance Loss" if kernel.causal else "warning: something else"
        report = PtxasReport(168, 8 * kernel.causal, 0, (line,), "")
        return type(compiled)(**{**vars(compiled), "report": report})

    (row,) = measure([(64, 128, 64)], build=build)
    assert (row.spill_bytes, row.advisories) == ((0, 8), ("C7512",))


def test_without_a_compiler_it_says_so(bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert bench("ablation", "--registers") == 2
    assert "needs the cuda-bindings package" in capsys.readouterr().err
