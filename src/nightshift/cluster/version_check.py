"""Whether another machine would play the same episodes: it needs the same versions of the packages that decide them."""

from __future__ import annotations

from collections.abc import Mapping

from nightshift import envs
from nightshift.cluster.learning_versions import RAY_REMEDY, difference_error, learning_versions
from nightshift.errors import RolloutError


def versions(suite: str) -> dict[str, str]:
    """Of the packages installed here for simulating `suite` and learning."""
    return {**envs.versions(suite), **learning_versions()}


def mismatch_error(driver: Mapping[str, str], suite: str, remedy: str = RAY_REMEDY) -> RolloutError | None:
    """The error if versions here differ from the driver's: results of the two must not mix."""
    return difference_error(driver, versions(suite), remedy)
