"""Whether another machine would learn the same: it needs the driver's code and its versions of what computes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import nightshift
from nightshift import files
from nightshift.errors import RolloutError
from nightshift.project import packages

CODE = "nightshift's code"
_SHOWN = 12
RAY_REMEDY = (
    "install the driver's commit and its constraints.txt on that node, start its ray again, and run again: it resumes "
    "(docs/cluster.md)"
)


def learning_versions() -> dict[str, str]:
    """Of the packages installed here that learners compute with.

    A package in development keeps its version, so nightshift's own code and that of plug-ins is compared by digest.
    """
    computing = {package: packages.release(package) for package in ("numba", "numpy", "torch")}
    return {**computing, **packages.installed_plug_ins(), CODE: _code()[:_SHOWN]}


def difference_error(
    driver: Mapping[str, str], here: Mapping[str, str], remedy: str = RAY_REMEDY
) -> RolloutError | None:
    """The error if versions here differ from the driver's: results of the two must not mix."""
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
