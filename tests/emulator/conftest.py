"""What tests have measured is shown at the end of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

MEASURED = pytest.StashKey[list[str]]()


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a text after the results."""
    return request.config.stash.setdefault(MEASURED, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for text in config.stash.get(MEASURED, []):
        terminalreporter.section("measured")
        terminalreporter.write_line(text)
