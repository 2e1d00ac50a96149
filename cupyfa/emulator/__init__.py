"""Runs PTX on the CPU and names every synchronisation hazard it meets. docs/emulator.md explains the model."""

from cupyfa.emulator.device import EmulatedDevice, EmulatedKernel, EmulatedModule
from cupyfa.emulator.policies import POLICIES
from cupyfa.emulator.report import Event, Finding, Place, Run
from cupyfa.emulator.syntax import PtxError, UnsupportedInstruction

__all__ = [
    "POLICIES",
    "EmulatedDevice",
    "EmulatedKernel",
    "EmulatedModule",
    "Event",
    "Finding",
    "Place",
    "PtxError",
    "Run",
    "UnsupportedInstruction",
]
