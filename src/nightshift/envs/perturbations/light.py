"""Perturbations of the light. They change pixels alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nightshift.envs.perturbations.base import Perturbation, unit_vector
from nightshift.envs.perturbations.camera import rotate

if TYPE_CHECKING:
    from nightshift.envs.libero.scene_model import SceneModel

DARKER, BRIGHTER = 0.16, 0.2
"""Share of the intensity at strength 1."""
TINT = 0.06
"""Share of a colour channel at strength 1."""
TURN = np.radians(8.0)
"""Of every light about the scene, at strength 1: shadows fall elsewhere."""


class LightConditions(Perturbation):
    """All lights become darker or brighter, get a colour, and shine from elsewhere."""

    name = "light_conditions"
    kind = "scene"
    sense = "images"
    source = "LIBERO-Plus"
    summary = "lights 16 % darker or 20 % brighter, tinted by 6 %, and turned by 8° about the scene, with their shadows"

    def change_scene(self, scene: SceneModel) -> None:
        intensity = self.random(0).choice([-DARKER, BRIGHTER])
        tint = TINT * self.random(1).uniform(-1.0, 1.0, 3)
        scene.scale_lights(np.maximum(1 + self.strength * (intensity + tint), 0.0))
        scene.turn_lights(rotate(unit_vector(self.random(2), 3), self.strength * TURN))
