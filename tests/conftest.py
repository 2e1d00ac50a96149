"""Markers: everything below tests/gpu runs only where there is a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
from backends import BACKENDS, Backend
from devices import why_no_gpu

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, instead of skipping, where there is no GPU")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; given to everything below tests/gpu")
    if config.getoption("--require-gpu") and (reason := why_no_gpu()):
        raise pytest.UsageError(f"--require-gpu: {reason}")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Backend:
    """What runs a kernel: the emulator under each schedule, and the GPU where there is one."""
    return request.param
