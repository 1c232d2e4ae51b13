"""What the GPUs are doing, where there are any. The only file that imports pynvml."""

from __future__ import annotations

import functools
from typing import Any

import pynvml

_MIB = 2**20


def sample() -> dict[str, float]:
    """Utilisation, memory and power of each GPU by metric name; empty on a machine without one."""
    metrics: dict[str, float] = {}
    for index, handle in enumerate(_handles()):
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        metrics[f"gpu/{index}/utilisation_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        metrics[f"gpu/{index}/memory_mib"] = used / _MIB
        metrics[f"gpu/{index}/power_watts"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return metrics


@functools.cache
def _handles() -> tuple[Any, ...]:
    try:
        pynvml.nvmlInit()
        return tuple(pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
