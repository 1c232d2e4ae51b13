"""LIBERO's placement samplers in a world that is restored between draws, not rebuilt from XML as LIBERO does.

Two things have to be put right for that. The samplers take every fixture to stand at the origin, where a new model has
it, and add its place themselves. And an init state holds no fixture's place, so fixtures must stay where the world was
built with them, and objects that start on or in them must be placed there.
"""

from __future__ import annotations

import contextlib
from typing import Any

import mujoco

from nightshift.errors import SimulatorError

ATTEMPTS = 100
NO_ROTATION = (1.0, 0.0, 0.0, 0.0)


class Placement:
    """Stands between a LIBERO problem and its sampler of fixtures and objects on the table."""

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
        """Place everything anew, from numpy's global generator."""
        from robosuite.utils.errors import RandomizationError

        for _ in range(ATTEMPTS):
            for body in self._bodies.values():
                self._model.body_pos[body], self._model.body_quat[body] = 0.0, NO_ROTATION
            with contextlib.suppress(RandomizationError):
                self._domain._reset_internal()
                return
        raise SimulatorError("LIBERO's samplers found no room for the objects", "widen the regions in the BDDL file")

    def sample(self) -> dict[str, tuple[Any, Any, Any]]:
        """What LIBERO asks for while it resets: position, quaternion and object by name."""
        placements = self._samplers.sample()
        return {name: (*self._poses.get(name, place[:2]), place[2]) for name, place in placements.items()}
