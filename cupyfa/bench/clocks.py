"""Clock and power of the GPU, read and never changed."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Mapping
from typing import Any

__all__ = ["Clocks"]


class Clocks:
    """Reads the SM clock and the power of a GPU; nothing is changed.

    Parameters
    ----------
    pci_bus_id : str
        The GPU, as CUDA names it.

    Attributes
    ----------
    source : str
        ``"pynvml"``, ``"nvidia-smi"`` or why there is none.
    driver : str or None
        Version of the driver.
    """

    def __init__(self, pci_bus_id: str) -> None:
        self.source = "none"
        self.driver: str | None = None
        self._bus = pci_bus_id
        self._nvml: Any = None
        self._handle: Any = None
        if not self._open_nvml():
            answer = self._ask_smi("driver_version")
            if answer is not None:
                self.source, self.driver = "nvidia-smi", answer[0]

    def _open_nvml(self) -> bool:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByPciBusId(self._bus)
            driver = nvml.nvmlSystemGetDriverVersion()
        except Exception:  # absent, or refused by the container
            return False
        self.driver = driver.decode() if isinstance(driver, bytes) else str(driver)
        self._nvml, self.source = nvml, "pynvml"
        return True

    def _ask_smi(self, fields: str) -> list[str] | None:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={self._bus}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        lines = done.stdout.strip().splitlines()
        return [field.strip() for field in lines[0].split(",")] if lines else None

    def read(self) -> Mapping[str, float] | None:
        """Return ``{"sm_mhz": ..., "power_w": ...}``, or None where they cannot be read."""
        try:
            if self._nvml is not None:
                clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
                return {"sm_mhz": float(clock), "power_w": self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000}
            if self.source != "nvidia-smi" or (answer := self._ask_smi("clocks.sm,power.draw")) is None:
                return None
            return {"sm_mhz": float(answer[0]), "power_w": float(answer[1])}
        except Exception:  # "[N/A]", or a GPU that does not tell
            return None
