"""A learned policy at the controls, until a person takes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nightshift.policies.base import Policy
from nightshift.types import Array, Observation


@dataclass(kw_only=True)
class Driver:
    """Plays chunks of greedy actions."""

    policy: Policy
    label: str
    """What people call it: its folder, or its version in the registry."""
    version: int
    """Recorded with every step."""
    _planned: list[Array] = field(default_factory=list)

    def plan_anew(self) -> None:
        """What it planned belongs to another moment: an episode begins, or a person hands back."""
        self._planned = []

    def act(self, look: Callable[[], Observation], *, alone: bool) -> Array:
        """The next action [A]; `look` gives what it sees, each [1, …].

        While a person acts (`alone` False) it decides anew at every step: the person has left the states of its plan.
        """
        if not alone or not self._planned:
            self._planned = list(self.policy.act(look())[0].astype(np.float32))
        return self._planned.pop(0)
