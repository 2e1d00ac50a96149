"""The benchmark of the emulator, with one round."""

import re

import pytest
from nvrtc_tools import import_nvrtc

from cupyfa.bench import emulator
from cupyfa.bench.emulator import Figure, format_table, long_text
from cupyfa.bench.harness import Spread
from cupyfa.emulator import ptx

KERNEL = """.version 8.6
.target sm_90a
.address_size 64
.global .align 4 .u32 counter;
.visible .entry work(
	.param .u64 work_param_0
)
{
	.reg .b64 %rd<2>;
	ld.param.u64 %rd1, [work_param_0];
	{
	prefetch.global.L2 [%rd1];
	}
	ret;

}
"""


def test_long_text_repeats_the_kernel():
    text, name = long_text(KERNEL, "work", 60)
    assert text.count("\n") >= 60
    module = ptx.parse(text)
    assert list(module.entries) == [f"work_{i}" for i in range(len(module.entries))]
    assert name == "work_0"
    assert text.count(".global .align") == 1


def test_table_says_what_misses_its_target():
    spread = Spread(4.0, 3.0, 9.0)
    figures = [Figure("a", spread, "ms", 5), Figure("b", spread, "ms", 3), Figure("c", spread, "M/s", -8)]
    assert [figure.met for figure in figures] == [True, False, False]
    assert Figure("d", spread, "M/s", -4).met
    assert format_table(figures)[2:] == [
        "| a | 4 [3..9] | ms | at most 5 |  |",
        "| b | 4 [3..9] | ms | at most 3 | missed |",
        "| c | 4 [3..9] | M/s | at least 8 | missed |",
    ]


def test_everything_is_measured(bench, monkeypatch, capsys):
    import_nvrtc()
    monkeypatch.setattr(emulator, "SPEED", (1, 64, 64, 1, 64))
    monkeypatch.setattr(emulator, "MUTANT", (1, 40, 70, 1, 64))
    monkeypatch.setattr(emulator, "LINES", 10)
    assert bench("emulator", "--rounds", "1") in (0, 1)  # the machine may be slow
    said = capsys.readouterr().out
    for word in ("without checks", "all checks", "million/s", "mutant", "parse", "decode"):
        assert word in said
    assert re.search(r"One thread, vector unit \w+, NumPy ", said)


def test_a_kernel_with_a_hazard_is_not_timed(monkeypatch):
    import_nvrtc()
    from cupyfa import emulate

    launch = emulate.Prepared.launch
    monkeypatch.setattr(emulate.Prepared, "launch", lambda self: launch(self, max_instructions=10))
    with pytest.raises(AssertionError, match="PROGRESS_TIMEOUT"):
        emulator.prepare((1, 64, 64, 1, 64))


@pytest.mark.parametrize("rounds", ["0", "-1"])
def test_bad_rounds(bench, rounds, capsys):
    assert bench("emulator", "--rounds", rounds) == 2
    assert f"argument --rounds: it is {rounds}; it must be at least 1" in capsys.readouterr().err
