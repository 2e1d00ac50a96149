"""How much of a long table `make test` has time for; `make test-full` takes all of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

#: Set by ``make test-full``.
EVERYTHING = os.environ.get("CUPYFA_TEST_FULL") == "1"


def sample(table: Sequence[T], every: int) -> Sequence[T]:
    """Each of them, or one of so many."""
    return table if EVERYTHING else table[::every]
