"""Perturbations of the objects on the table: colours, sizes, places, and objects that do not belong to the task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nightshift.envs.perturbations.base import MAX_STRENGTH, Perturbation, clear_way, unit_vector

if TYPE_CHECKING:
    from nightshift.envs.libero.scene_model import SceneModel

SCALE_PER_LEVEL = 0.05
METRES_PER_LEVEL = 0.02
ATTEMPTS = 24
"""Directions that are tried."""


class ObjectColors(Perturbation):
    """The colours of the objects fade into random ones; those with a texture are tinted. It changes pixels alone."""

    name = "object_colors"
    kind = "scene"
    sense = "images"
    source = "Object in LIBERO-Pro"
    summary = "every object a fifth of the way to a random colour"

    def change_scene(self, scene: SceneModel) -> None:
        for number, name in enumerate(scene.objects):
            scene.blend_object(name, self.random(number).uniform(0.0, 1.0, 3), self.strength / MAX_STRENGTH)


class ObjectSizes(Perturbation):
    """All objects are larger or smaller by one factor, with the mass that their volume gives them; smaller where, at
    full strength, they would reach into each other or could not be where the goal wants them."""

    name = "object_sizes"
    kind = "scene"
    source = "Object in LIBERO-Pro"
    summary = f"all objects {100 * SCALE_PER_LEVEL:g} % larger or smaller"

    def change_scene(self, scene: SceneModel) -> None:
        grows = self.random().choice([True, False]) and scene.can_scale_objects(1 + SCALE_PER_LEVEL * MAX_STRENGTH)
        sign = 1.0 if grows else -1.0
        if not scene.scale_objects(1 + sign * SCALE_PER_LEVEL * self.strength):
            self.reached = 0.0


class ObjectPositions(Perturbation):
    """The objects start elsewhere, all moved by the same vector, so that none stands in another. What stands on
    furniture stays there.

    A direction counts if they stand on the table and in nothing else all the way to full strength, so all strengths
    share it. Where there is none, they go in the one with most room, as far as the strength says or as there is room.
    """

    name = "object_positions"
    kind = "scene"
    source = "Objects Layout in LIBERO-Plus; Position in LIBERO-Pro"
    summary = f"the objects {100 * METRES_PER_LEVEL:g} cm from their init state, beyond the range of training at 2 to 3"

    def change_scene(self, scene: SceneModel) -> None:
        steps = [METRES_PER_LEVEL * unit_vector(self.random(*range(attempt)), 2) for attempt in range(ATTEMPTS)]
        step, room = clear_way(steps, scene.can_move_objects)
        self.reached = min(self.strength, room)
        scene.move_objects(self.reached * step)


class ConfoundingObjects(Perturbation):
    """Objects of random shapes and colours that do not belong to the task stand on the table, fixed to it, where
    nothing else stands. As many as the strength says, or as there is room for. They are solid, and the scripted expert
    does not know of them."""

    name = "confounding_objects"
    kind = "scene"
    is_whole = True
    source = "Objects Layout in LIBERO-Plus"
    summary = "one more object on the table"

    def change_scene(self, scene: SceneModel) -> None:
        self.reached = float(sum(self._is_placed(scene, number) for number in range(int(self.strength))))

    def _is_placed(self, scene: SceneModel, number: int) -> bool:
        random = self.random(number)
        color = np.append(random.uniform(0.0, 1.0, 3), 1.0)
        return scene.place_spare(number, color, random)
