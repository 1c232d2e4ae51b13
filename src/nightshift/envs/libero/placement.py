"""LIBERO's placement samplers on a model that is restored between draws, not rebuilt from XML as LIBERO does.

That needs two corrections. The samplers assume every fixture at the origin, where a new model has it, and add the
sampled position to that. And an init state does not contain the poses of fixtures, so fixtures must keep the poses that
the model was built with, and objects that start on or in them must be placed relative to those.
"""

from __future__ import annotations

import contextlib
from typing import Any

import mujoco

from nightshift.errors import SimulatorError

ATTEMPTS = 100
NO_ROTATION = (1.0, 0.0, 0.0, 0.0)


class Placement:
    """Replaces the sampler of a LIBERO problem: objects are drawn, fixtures keep their poses."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._model: mujoco.MjModel = domain.sim.model._model
        self._bodies = {name: self._model.body(it.root_body).id for name, it in domain.fixtures_dict.items()}
        self._poses = {
            name: (self._model.body_pos[body].copy(), self._model.body_quat[body].copy())
            for name, body in self._bodies.items()
        }
        self._samplers = domain.placement_initializer
        domain.placement_initializer = self

    def draw(self) -> None:
        """Place every object anew, from numpy's global generator."""
        from robosuite.utils.errors import RandomizationError

        for _ in range(ATTEMPTS):
            for body in self._bodies.values():
                self._model.body_pos[body], self._model.body_quat[body] = 0.0, NO_ROTATION
            with contextlib.suppress(RandomizationError):
                self._domain._reset_internal()
                return
        raise SimulatorError("LIBERO's samplers found no room for the objects", "widen the regions in the BDDL file")

    def sample(self) -> dict[str, tuple[Any, Any, Any]]:
        """Called by LIBERO while it resets: position, quaternion and object by name."""
        placements = self._samplers.sample()
        return {name: (*self._poses.get(name, place[:2]), place[2]) for name, place in placements.items()}
