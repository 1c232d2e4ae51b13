"""What a stage used of the machine, as the difference of counters that the machine keeps: nothing runs beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CPU_SECONDS = "cpu_seconds"
"""Busy seconds of all cores, of every process on the machine."""
CPU_JOULES = "cpu_joules"
GPU_JOULES = "gpu_joules"
GPU_PERCENT = "gpu_percent"
"""Busy share of the GPUs, on average over the samples of a stage."""
GPU_MIB = "gpu_mib"
"""Memory in use on the fullest GPU, at most."""

_STAT = Path("/proc/stat")
_RAPL = Path("/sys/class/powercap")
_IDLE = slice(3, 5)
"""idle and iowait among the columns of /proc/stat."""
_GUEST = 8
"""From here on columns are counted in the ones before already."""


def read() -> dict[str, float]:
    """The counters, where this machine has them."""
    return {**_cpu_seconds(), **_cpu_joules(), **_gpu_joules()}


def since(before: Mapping[str, float]) -> dict[str, float]:
    """What has been added. A counter that went back (it overflowed) is left out."""
    now = read()
    return {name: now[name] - value for name, value in before.items() if now.get(name, -1.0) >= value}


def of_gpus(samples: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """From lines of metrics in which a stage logged `gpu.sample()`; empty without a GPU."""
    from nightshift.telemetry import gpu  # imports pynvml, which `nightshift plan` need not wait for

    named = [(name, float(value)) for line in samples for name, value in line.items() if name.startswith("gpu/")]
    busy = [value for name, value in named if name.endswith(gpu.UTILISATION)]
    memory = [value for name, value in named if name.endswith(gpu.MEMORY)]
    return ({GPU_PERCENT: sum(busy) / len(busy)} if busy else {}) | ({GPU_MIB: max(memory)} if memory else {})


def _cpu_seconds() -> dict[str, float]:
    try:
        ticks = [int(column) for column in _STAT.read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return {}
    return {CPU_SECONDS: (sum(ticks[:_GUEST]) - sum(ticks[_IDLE])) / os.sysconf("SC_CLK_TCK")}


def _cpu_joules() -> dict[str, float]:
    """Intel's and AMD's energy counters of the processor packages; often readable by root alone."""
    found = []
    for package in _RAPL.glob("intel-rapl:[0-9]*"):
        if package.name.count(":") == 1:
            with contextlib.suppress(OSError, ValueError):
                found.append(int((package / "energy_uj").read_text()) / 1e6)
    return {CPU_JOULES: sum(found)} if found else {}


def _gpu_joules() -> dict[str, float]:
    from nightshift.telemetry import gpu

    joules = gpu.energy()
    return {} if joules is None else {GPU_JOULES: joules}
