"""Perturbations of the arm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightshift.envs.perturbations.base import MAX_STRENGTH, Perturbation, unit_vector
from nightshift.errors import SimulatorError

if TYPE_CHECKING:
    from nightshift.envs.libero.scene_model import SceneModel

RADIANS_PER_LEVEL = 0.06
"""Length of the step in joint space at strength 1."""
ATTEMPTS = 50


class RobotInitialStates(Perturbation):
    """The arm starts in another pose: its joints are moved in a random direction of joint space.

    A direction counts if the arm touches nothing at full strength, so all strengths share it.
    """

    name = "robot_initial_states"
    kind = "scene"
    source = "LIBERO-Plus"
    summary = f"the arm's joints {RADIANS_PER_LEVEL} rad away from their pose, in a random direction of joint space"

    def change_scene(self, scene: SceneModel) -> None:
        joints = scene.arm_joints()
        for attempt in range(ATTEMPTS):
            direction = unit_vector(self.random(attempt), len(joints))
            if scene.arm_is_free(joints + RADIANS_PER_LEVEL * MAX_STRENGTH * direction):
                scene.set_arm_joints(joints + RADIANS_PER_LEVEL * self.strength * direction)
                return
        what = f"{self.key.task}, state {self.key.init_state}: no other start pose of the arm is free of contacts"
        raise SimulatorError(what, f"leave {self.name} out of the perturbations")
