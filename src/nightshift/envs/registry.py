"""Suites by name: those of this package, and those that other packages declare as entry points.

A new simulator here is one module and one line in `BUILT_IN`. In another package it is an object that implements
`envs.base.Suite` and this in its pyproject.toml:

    [project.entry-points."nightshift.suites"]
    my_suite = "my_package.suite:MY_SUITE"
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint

from nightshift import plugins
from nightshift.envs.base import Suite
from nightshift.errors import SimulatorError

BUILT_IN = {
    "libero_mini": "nightshift.envs.mini.suite:LIBERO_MINI",
    "libero_spatial": "nightshift.envs.libero.suites:LIBERO_SPATIAL",
    "libero_object": "nightshift.envs.libero.suites:LIBERO_OBJECT",
    "libero_goal": "nightshift.envs.libero.suites:LIBERO_GOAL",
    "libero_10": "nightshift.envs.libero.suites:LIBERO_10",
    "libero_90": "nightshift.envs.libero.suites:LIBERO_90",
    "libero_40": "nightshift.envs.libero.suites:LIBERO_40",
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


def plug_in(name: str) -> EntryPoint | None:
    """The entry point of a suite of another package; None for one of ours."""
    return plugins.find(plugins.SUITES, BUILT_IN).get(name)


def _entries() -> dict[str, EntryPoint]:
    ours = {name: EntryPoint(name, value, plugins.SUITES) for name, value in BUILT_IN.items()}
    return ours | plugins.find(plugins.SUITES, BUILT_IN)


def _load(entry: EntryPoint) -> Suite:
    found = plugins.load(entry)
    if not isinstance(found, Suite) or found.name != entry.name:
        raise plugins.unfit(entry, f"a Suite with the name {entry.name}")
    return found
