"""Whether another machine would play the same episodes: it needs the same versions of the packages that decide them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import nightshift
from nightshift import envs, files
from nightshift.errors import RolloutError
from nightshift.project import packages

CODE = "nightshift's code"
_SHOWN = 12
_RAY_REMEDY = (
    "install the driver's commit and its constraints.txt on that node, start its ray again, and run again: it resumes "
    "(docs/cluster.md)"
)


def versions(suite: str | None) -> dict[str, str]:
    """Of the packages installed here for simulating `suite` and learning, or with None for learning alone.

    A package in development keeps its version, so nightshift's own code and that of plug-ins is compared by digest.
    """
    computing = {package: packages.release(package) for package in ("numba", "numpy", "torch")}
    suites = envs.versions(suite) if suite else {}
    return {**suites, **computing, **packages.installed_plug_ins(), CODE: _code()[:_SHOWN]}


def mismatch_error(driver: Mapping[str, str], suite: str | None, remedy: str = _RAY_REMEDY) -> RolloutError | None:
    """The error if versions here differ from the driver's: results of the two must not mix."""
    here = versions(suite)
    different = [
        f"{name} {here.get(name, 'none')}, the driver {driver.get(name, 'none')}"
        for name in sorted({*driver, *here})
        if here.get(name) != driver.get(name)
    ]
    if not different:
        return None
    return RolloutError(
        f"the node {socket.gethostname()} is not like the driver's: it has {'; '.join(different)}",
        remedy,
    )


@cache
def _code() -> str:
    return files.identity(Path(nightshift.__file__).parent)
