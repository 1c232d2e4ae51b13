"""Whether another machine is set up to play the same episode: the versions of the packages that decide it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import nightshift
from nightshift import envs, files
from nightshift.errors import RolloutError

CODE = "nightshift's code"
_SHOWN = 12


def versions(suite: str | None) -> dict[str, str]:
    """Of what is installed here to simulate `suite` and to learn, or to learn alone.

    The version of a package in development says little, so our code has a digest too.
    """
    computing = {package: _release(package) for package in ("numba", "numpy", "torch")}
    return {**(envs.versions(suite) if suite else {}), **computing, CODE: _code()[:_SHOWN]}


def refusal(driver: Mapping[str, str], suite: str | None) -> RolloutError | None:
    """The error to end a run with if this machine is not like the driver's; results of the two must not mix."""
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
        "install the driver's commit and its constraints.txt on that node, start its ray again, and run again: "
        "it resumes (docs/cluster.md)",
    )


def _release(package: str) -> str:
    """Without the build: a worker computes on its CPU, whether or not its torch could do otherwise."""
    return envs.installed(package).split("+")[0]


@cache
def _code() -> str:
    return files.sha256_tree(Path(nightshift.__file__).parent)
