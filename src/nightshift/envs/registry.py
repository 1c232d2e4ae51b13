"""Suites by name: those of this package, and those that other packages declare as entry points.

A new simulator here is one module and one line in `BUILT_IN`. In another package it is an object that implements
`envs.base.Suite` and this in its pyproject.toml:

    [project.entry-points."nightshift.suites"]
    my_suite = "my_package.suite:MY_SUITE"
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from nightshift.envs.base import Suite
from nightshift.errors import SimulatorError

GROUP = "nightshift.suites"

BUILT_IN = {
    "libero_mini": "nightshift.envs.mini.suite:LIBERO_MINI",
    "libero_spatial": "nightshift.envs.libero.suites:LIBERO_SPATIAL",
    "libero_object": "nightshift.envs.libero.suites:LIBERO_OBJECT",
    "libero_goal": "nightshift.envs.libero.suites:LIBERO_GOAL",
    "libero_10": "nightshift.envs.libero.suites:LIBERO_10",
    "libero_90": "nightshift.envs.libero.suites:LIBERO_90",
    "fake": "nightshift.envs.fake:FAKE",
    "robot": "nightshift.envs.robot.suite:ROBOT",
}
"""Where each suite object is; it is imported when it is asked for."""


def names() -> list[str]:
    """Every suite there is, without importing any."""
    return list(_entries())


@cache
def find(name: str) -> Suite:
    """The suite of that name."""
    entries = _entries()
    if name not in entries:
        raise SimulatorError(
            f"there is no suite {name!r}; there are {', '.join(entries)}", "edit env.suite in params.yaml"
        )
    return _load(entries[name])


def _entries() -> dict[str, EntryPoint]:
    entries = {name: EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()}
    for entry in entry_points(group=GROUP):
        if entry.name in entries:
            raise SimulatorError(
                f"two suites are called {entry.name}: {entries[entry.name].value} and {entry.value}",
                "uninstall one of the packages, or rename its entry point",
            )
        entries[entry.name] = entry
    return entries


def _load(entry: EntryPoint) -> Suite:
    remedy = f"install the package again, or remove its entry point from the group {GROUP}"
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise SimulatorError(f"the suite {entry.name} ({entry.value}) cannot be imported: {error}", remedy) from error
    if not isinstance(found, Suite) or found.name != entry.name:
        raise SimulatorError(f"{entry.value} is not a Suite with the name {entry.name}", remedy)
    return found
