"""What the GPUs are doing, where there are any. The only file that imports pynvml."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

try:
    import pynvml
except ModuleNotFoundError:  # a compute node may lack it, and figures are not worth a stage
    pynvml = None

UTILISATION = "utilisation_percent"
MEMORY = "memory_mib"
_FIGURES: dict[str, Callable[[Any], float]] = {
    UTILISATION: lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    MEMORY: lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20,
    "power_watts": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
}


def sample() -> dict[str, float]:
    """Utilisation, memory and power of each GPU by metric name; empty on a machine without one, or without pynvml."""
    metrics: dict[str, float] = {}
    for index, handle in enumerate(_handles()):
        for name, read in _FIGURES.items():
            with contextlib.suppress(pynvml.NVMLError):  # not every GPU tells everything
                metrics[f"gpu/{index}/{name}"] = float(read(handle))
    return metrics


def energy() -> float | None:
    """Joules that the GPUs used since their driver was loaded; None without a GPU, or one that does not count them."""
    if not _handles():
        return None
    try:
        return float(sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in _handles())) / 1000
    except pynvml.NVMLError:
        return None


@functools.cache
def _handles() -> tuple[Any, ...]:
    if pynvml is None:
        return ()
    try:
        pynvml.nvmlInit()
        return tuple(pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
