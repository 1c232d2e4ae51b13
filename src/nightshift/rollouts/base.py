"""The interface between a stage and the processes that simulate for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from nightshift import config
from nightshift.envs.base import Fleet
from nightshift.types import RolloutRequest, Task, Trajectory

if TYPE_CHECKING:
    from nightshift.policies.snapshot import PolicySnapshot  # which loads torch

MakeFleet = Callable[[Task, config.Env], Fleet]
"""Builds the simulators of a task, in the process that simulates."""


class Pool(Protocol):
    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        """Play every request; yields (position in `requests`, its episodes) as they finish, in any order.

        A request whose simulator hangs, dies or raises is played again; one that hangs or dies in this process cannot
        be. If it fails again its episodes are invalid; too many invalid requests without perturbations are an error.
        """
        ...

    def spent(self) -> Mapping[str, float]:
        """Seconds spent so far on answered requests, summed over workers: "busy", and of these "simulation", "look" and
        "inference" (engine.py). "transfer" is apart from these: workers loading policies, and this process writing
        policies to the object store and reading episodes from it, counted once although several workers may wait for
        it. Copies between machines that overlap with this process's waiting are not counted.
        """
        ...

    @property
    def workers(self) -> int: ...

    def close(self) -> None: ...
