"""Perturbations of surfaces that are not objects: table, floor, walls. They change pixels alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.perturbations.base import MAX_STRENGTH, Perturbation

if TYPE_CHECKING:
    from nightshift.envs.libero.scene_model import SceneModel

TILES = (2, 12)
"""Fewest and most tiles along a texture."""


class BackgroundTextures(Perturbation):
    """The textures of table, floor and walls fade into tiles of two random colours; plain surfaces fade into one."""

    name = "background_textures"
    kind = "scene"
    sense = "images"
    source = "LIBERO-Plus; Environment in LIBERO-Pro replaces the whole scene"
    summary = "table, floor and walls a fifth of the way to a random pattern"

    def change_scene(self, scene: SceneModel) -> None:
        weight = self.strength / MAX_STRENGTH
        for number, texture in enumerate(scene.background_textures()):
            pixels = scene.texture(texture)
            other = _tiles(self.random(number), pixels.shape)
            scene.set_texture(texture, ((1 - weight) * pixels + weight * other).astype(np.uint8))
        for number, material in enumerate(scene.plain_background_materials()):
            scene.blend_material(material, self.random(number, 1).uniform(0.0, 1.0, 3), weight)


def _tiles(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    height, width, channels = shape
    light, dark = random.uniform(0.0, 255.0, (2, channels))
    size = max(1, min(height, width) // int(random.integers(*TILES)))
    rows, columns = np.indices((height, width)) // size
    return np.asarray(np.where(((rows + columns) % 2 == 0)[..., None], light, dark))
