"""What the commands share."""

import argparse

import pytest

from cupyfa.bench.usage import count, why_missing


@pytest.mark.parametrize(
    "command", ["forward", "backward", "ablation", "options", "decode", "host", "first-call", "emulator"]
)
def test_every_command_has_help(bench, command, capsys):
    assert bench(command, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m cupyfa bench {command} ")
    assert "Exit status: 0;" in said


def test_a_command_is_needed(bench, capsys):
    assert bench() == 2
    assert capsys.readouterr().err.startswith("usage: python -m cupyfa bench ")


def test_count():
    assert count("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="it is -1; it must be at least 1"):
        count("-1")
    with pytest.raises(argparse.ArgumentTypeError, match=r"it is '1.5'; it must be an integer"):
        count("1.5")


def test_what_is_missing_is_named_with_its_extra():
    assert why_missing("json", "argparse") is None
    assert why_missing("json", "no_such_a", "no_such_b") == (
        "The benchmark needs no_such_a and no_such_b: pip install 'cupyfa[bench]'"
    )
