"""The base of the errors that the state machines of the oracles raise."""

from __future__ import annotations

__all__ = ["ContractViolation"]


class ContractViolation(ValueError):
    """A contract of the specification is broken; each subclass names one way to break it."""
