"""The seam between a stage and the processes that simulate for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from nightshift.envs.base import Fleet
from nightshift.types import RolloutRequest, Task, Trajectory

if TYPE_CHECKING:
    from nightshift.policies.snapshot import PolicySnapshot  # which loads torch

MakeFleet = Callable[[Task, str], Fleet]
"""Builds the simulators of a task, in the process that simulates."""


class Pool(Protocol):
    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        """Play every request; yields (position in `requests`, its episodes) as they come in, in any order.

        A simulator that hangs, crawls, dies or raises costs nothing but time: its request is played again. If that
        never works its episodes are invalid, and only when too many are is it an error.
        """
        ...

    def spent(self) -> Mapping[str, float]:
        """Seconds of all workers together that went into what was answered so far: "busy", and of these in "simulation"
        and "inference". And besides in "transfer": workers taking over policies, and this process putting policies into
        the object store and reading episodes from it. The latter count once, though several workers may wait for it;
        what comes from another machine while this process waits anyway is not seen.
        """
        ...

    @property
    def workers(self) -> int: ...

    def close(self) -> None: ...
