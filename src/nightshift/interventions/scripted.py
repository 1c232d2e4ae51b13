"""The scripted expert as a person who watches: it takes over when the policy stalls or strays, and lets go again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nightshift.interventions.base import Moment
from nightshift.types import Array, InterventionSettings, Scene, Task


class ScriptedIntervention:
    """Takes over if

    - the hand has moved less than `stall_distance` metres in `stall_steps` control steps (the policy stalls), or
    - `stray_steps` actions of the policy in a row were further than `stray_distance` from what the expert would have
      done there, in Euclidean distance over all dimensions (the policy strays; SafeDAgger's rule),

    acts for `hold_steps` steps, and lets go. What was seen before that counts no more: the policy has `stall_steps` and
    `stray_steps` steps again. It depends on the scenes and the policy's actions of the episode alone.
    """

    def __init__(self, settings: InterventionSettings, expert: Callable[[Scene], Array]) -> None:
        self._settings = settings
        self._expert = expert
        self._left = 0
        """Steps that it still acts for."""
        self._astray = 0
        """Actions in a row that were too far from the expert's."""
        self._positions: deque[NDArray[np.float64]] = deque(maxlen=settings.stall_steps + 1)
        """Of the hand, the newest last."""

    def begin(self, task: Task) -> None:
        self._watch_anew()

    def override(self, moment: Moment) -> Array | None:
        scene = moment.scene()
        expert = self._expert(scene)
        if not self._left:
            self._watch(scene, float(np.linalg.norm(moment.policy_action - expert)))
            if not (self._stalls or self._strays):
                return None
            self._left = self._settings.hold_steps
        self._left -= 1
        if not self._left:
            self._watch_anew()
        return expert

    def before_reset(self) -> None:
        """At any time."""

    def end(self) -> None:
        """The next one begins anew."""

    def _watch_anew(self) -> None:
        self._left = self._astray = 0
        self._positions.clear()

    def _watch(self, scene: Scene, distance: float) -> None:
        self._positions.append(scene.gripper_position.copy())
        self._astray = self._astray + 1 if distance > self._settings.stray_distance else 0

    @property
    def _stalls(self) -> bool:
        if len(self._positions) <= self._settings.stall_steps:
            return False
        moved = np.linalg.norm(self._positions[-1] - self._positions[0])
        return bool(moved < self._settings.stall_distance)

    @property
    def _strays(self) -> bool:
        return self._astray >= self._settings.stray_steps
