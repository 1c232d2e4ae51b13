"""Perturbations of the arm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightshift.envs.perturbations.base import Perturbation, clear_way, unit_vector

if TYPE_CHECKING:
    from nightshift.envs.libero.scene_model import SceneModel

RADIANS_PER_LEVEL = 0.06
"""Length of the step in joint space at strength 1."""
ATTEMPTS = 50


class RobotInitialStates(Perturbation):
    """The arm starts in another pose: its joints are moved in a random direction of joint space.

    A direction counts if the arm touches nothing all the way to full strength, so all strengths share it. Where there
    is none, it goes in the one with most room, as far as the strength says or as it touches nothing.
    """

    name = "robot_initial_states"
    kind = "scene"
    source = "LIBERO-Plus"
    summary = f"the arm's joints {RADIANS_PER_LEVEL} rad away from their pose, in a random direction of joint space"

    def change_scene(self, scene: SceneModel) -> None:
        joints = scene.arm_joints()
        steps = [RADIANS_PER_LEVEL * unit_vector(self.random(attempt), len(joints)) for attempt in range(ATTEMPTS)]
        step, room = clear_way(steps, lambda change: scene.arm_is_free(joints + change))
        self.reached = min(self.strength, room)
        scene.set_arm_joints(joints + self.reached * step)
