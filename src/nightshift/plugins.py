"""What other packages add to Nightshift, found through Python entry points; docs/extending.md shows a package for each.

| group                        | an entry point is                                                          |
|------------------------------|----------------------------------------------------------------------------|
| `nightshift.suites`          | an object that implements `envs.base.Suite`                                |
| `nightshift.policies`        | a subclass of `policies.base.Policy`                                       |
| `nightshift.policy_settings` | the section `policy` of that family, a subclass of `config.PolicySettings` |
| `nightshift.rewards`         | a class with the methods of `rewards.reward.Reward`, made without arguments |
| `nightshift.formats`         | a module or object with `list_episodes`, `write` or both (`data.formats`)  |

Finding them reads metadata and imports nothing. A package is imported when something of it is asked for by name.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nightshift.errors import PluginError

SUITES = "nightshift.suites"
POLICIES = "nightshift.policies"
POLICY_SETTINGS = "nightshift.policy_settings"
REWARDS = "nightshift.rewards"
FORMATS = "nightshift.formats"


def find(group: str, built_in: Collection[str] = ()) -> dict[str, EntryPoint]:
    """The entry points of a group by name; PluginError if a name is taken twice."""
    found: dict[str, EntryPoint] = {}
    for entry in _declared(group, places()):
        if entry.name in built_in or entry.name in found:
            other = "Nightshift itself" if entry.name in built_in else describe(found[entry.name])
            raise PluginError(
                f"the name {entry.name} is taken twice in {group}: by {other} and by {describe(entry)}",
                f"pip uninstall {package(entry)}, or rename its entry point",
            )
        found[entry.name] = entry
    return found


@functools.lru_cache(maxsize=32)
def _declared(group: str, places: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Cached, since reading the metadata of all installed packages takes longer than building a policy."""
    return tuple(entry_points(group=group))


def places() -> tuple[tuple[str, int], ...]:
    """The folders that packages are installed in, each with a time that changes when one is installed or removed: the
    key of what is remembered about packages."""
    return tuple((place, os.stat(place).st_mtime_ns) for place in sys.path if os.path.isdir(place))


def load(entry: EntryPoint) -> Any:
    """The object that an entry point names; PluginError if its package cannot be imported."""
    try:
        return entry.load()
    except Exception as error:  # code of others may raise anything
        raise PluginError(
            f"{describe(entry)} cannot be imported: {type(error).__name__}: {error}",
            f"mend or install the package {package(entry)} again, or pip uninstall it",
        ) from error


def unfit(entry: EntryPoint, wanted: str) -> PluginError:
    """For an entry point whose object is not what its group asks for."""
    return PluginError(f"{describe(entry)} is not {wanted}", f"mend the package {package(entry)}: docs/extending.md")


def package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "that declares it"


def release(entry: EntryPoint) -> str:
    """Package and version. Example: "nightshift-reach 1.0" """
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"


def describe(entry: EntryPoint) -> str:
    return f"{entry.name} = {entry.value} of the package {release(entry)}"
