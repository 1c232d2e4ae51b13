"""What a stage used of the machine, as the difference of counters that the machine keeps: nothing runs beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

CPU_SECONDS = "cpu_seconds"
"""Busy seconds of all cores, of every process on the machine."""
CPU_JOULES = "cpu_joules"
GPU_JOULES = "gpu_joules"

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
    from nightshift.telemetry import gpu  # imports pynvml, which `nightshift plan` need not wait for

    joules = gpu.energy()
    return {} if joules is None else {GPU_JOULES: joules}
