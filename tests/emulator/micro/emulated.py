"""Runs cases on the emulator."""

from __future__ import annotations

from typing import Any

from .case import Array, Case, Map, Output
from .hardware import parameters


class Emulated:
    """One EmulatedDevice; modules are loaded once."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.modules: dict[Any, Any] = {}

    def run(self, case: Case) -> dict[str, Array]:
        """The outputs of a case; an assertion names what the emulator found wrong with it."""
        if case.module not in self.modules:
            self.modules[case.module] = self.device.load(case.module.text)
        arrays = case.initial()
        addresses = {
            buffer.name: self.device.register(
                arrays[buffer.name], name=buffer.name, writable=isinstance(buffer, Output)
            )
            for buffer in case.buffers
        }
        run = self.modules[case.module].launch(
            case.entry,
            grid=(case.grid, 1, 1),
            block=(case.block, 1, 1),
            cluster=(case.cluster, 1, 1),
            shared=case.shared,
            params=parameters(case, addresses, self.tensor_map),
            stop_at_error=not case.hazards,
        )
        errors = tuple(sorted({finding.hazard for finding in run.findings if finding.severity == "error"}))
        expected = "error" if case.hazards else "clean"
        if errors != case.hazards or run.verdict not in (expected, "review"):
            raise AssertionError("\n".join([f"{case.name}: {run.verdict}", *map(str, run.findings)]))
        return {output.name: arrays[output.name] for output in case.outputs}

    def tensor_map(self, tensor: Map, address: int) -> bytes:
        encoded: bytes = self.device.tensor_map(
            address,
            dtype=tensor.dtype,
            shape=tensor.shape,
            strides=tensor.strides,
            box=tensor.box,
            element_strides=tensor.steps,
            swizzle=tensor.swizzle,
            fill=tensor.fill,
        )
        return encoded
