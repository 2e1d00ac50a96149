"""CUPYFA_DEBUG=1: checks that need the data of arrays on the GPU, at the price of waiting for it."""

from __future__ import annotations

import os

__all__ = ["DEBUG"]

#: Read once: an environment variable costs a call more than it may.
DEBUG = os.environ.get("CUPYFA_DEBUG", "0") not in ("", "0")
