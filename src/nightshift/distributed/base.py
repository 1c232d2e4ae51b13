"""The seam between a stage and the processes that simulate for it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Fleet
from nightshift.types import RolloutRequest, Task, Trajectory

MakeFleet = Callable[[Task, str], Fleet]
"""Builds the simulators of a task, in the process that simulates."""


@dataclass(frozen=True, kw_only=True)
class PolicySnapshot:
    """A policy as it travels: the JSON that builds it and its weights."""

    spec: Mapping[str, Any]
    weights: Mapping[str, NDArray[np.float32]]
    version: int = 0
    """Updates behind it."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells it from every other, so that who has it already need not build it again."""


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
