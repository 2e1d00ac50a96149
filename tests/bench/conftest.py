"""The command line in this process."""

import sys

import pytest

from cupyfa import __main__


@pytest.fixture
def bench(monkeypatch):
    """Run ``python -m cupyfa bench`` with some arguments; returns its exit status."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cupyfa", "bench", *arguments])
        with pytest.raises(SystemExit) as stop:
            __main__.main()
        return stop.value.code

    return run
