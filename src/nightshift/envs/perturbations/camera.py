"""Perturbations of the camera that looks at the scene. They change pixels alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.perturbations.base import Perturbation, unit_vector

if TYPE_CHECKING:
    from nightshift.envs.libero.scene_model import SceneModel

Vector = NDArray[Any]

AROUND, ABOVE, AWAY = np.radians(6.0), np.radians(3.0), 0.05
"""At strength 1, if the draw is along that axis alone: angle about the vertical, elevation, share of the distance."""
TURN = np.radians(1.0)
"""Angle by which the camera then looks past the scene, at strength 1."""
ZOOM = 0.06
"""Share of the field of view at strength 1."""


class CameraViewpoints(Perturbation):
    """The camera agentview moves on a sphere around the objects, nearer or further, and looks a little past them."""

    name = "camera_viewpoints"
    kind = "scene"
    sense = "agentview"
    source = "LIBERO-Plus"
    summary = (
        "agentview 6° around the scene, 3° higher or 5 % further away (shares of a random direction), turned by 1°"
    )

    def change_scene(self, scene: SceneModel) -> None:
        position, rotation = scene.camera_pose()
        around, above, away = self.strength * unit_vector(self.random(0), 3) * (AROUND, ABOVE, AWAY)
        centre = position - rotation[:, 2] * ((position - scene.centre()) @ rotation[:, 2])  # on the optical axis
        turned = rotate((0.0, 0.0, 1.0), around) @ rotate(rotation[:, 0], above)
        axis = rotation @ np.append(unit_vector(self.random(1), 2), 0.0)
        look = rotate(turned @ axis, self.strength * TURN) @ turned @ rotation
        scene.set_camera_pose(centre + (1 + away) * turned @ (position - centre), look)


class FieldOfView(Perturbation):
    """The camera agentview zooms in or out."""

    name = "field_of_view"
    kind = "scene"
    sense = "agentview"
    source = "part of Camera Viewpoints in LIBERO-Plus"
    summary = "the field of view of agentview 6 % wider or narrower"

    def change_scene(self, scene: SceneModel) -> None:
        sign = self.random().choice([-1.0, 1.0])
        scene.scale_field_of_view(1 + sign * ZOOM * self.strength)


def rotate(axis: Any, angle: float) -> Vector:
    """The rotation matrix [3, 3] about a unit axis (Rodrigues)."""
    x, y, z = axis
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.asarray(np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross)
