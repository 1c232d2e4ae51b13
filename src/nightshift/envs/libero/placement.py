"""LIBERO's placement samplers on a model that is restored between draws, not rebuilt from XML as LIBERO does.

That needs two corrections. The samplers assume every fixture at the origin, where a new model has it, and add the
sampled position to that. And an init state does not contain the poses of fixtures: LIBERO drew its own states with
fixtures that moved, objects on and in them along with them, and plays them with fixtures that stand where the model was
built. So do ours: objects are placed relative to fixtures that are drawn, too, and fixtures return to their poses.
"""

from __future__ import annotations

import contextlib
from typing import Any

import mujoco

from nightshift.errors import SimulatorError

ATTEMPTS = 100
NO_ROTATION = (1.0, 0.0, 0.0, 0.0)


class Placement:
    """Draws the positions of a LIBERO problem's objects."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._model: mujoco.MjModel = domain.sim.model._model
        self._poses = {
            body: (self._model.body_pos[body].copy(), self._model.body_quat[body].copy())
            for body in (self._model.body(fixture.root_body).id for fixture in domain.fixtures_dict.values())
        }

    def draw(self) -> None:
        """Place every object anew, from numpy's global generator."""
        try:
            self._draw()
        finally:
            for body, (position, quaternion) in self._poses.items():
                self._model.body_pos[body], self._model.body_quat[body] = position, quaternion

    def _draw(self) -> None:
        from robosuite.utils.errors import RandomizationError

        for _ in range(ATTEMPTS):
            for body in self._poses:
                self._model.body_pos[body], self._model.body_quat[body] = 0.0, NO_ROTATION
            with contextlib.suppress(RandomizationError):
                self._domain._reset_internal()
                return
        raise SimulatorError("LIBERO's samplers found no room for the objects", "widen the regions in the BDDL file")
