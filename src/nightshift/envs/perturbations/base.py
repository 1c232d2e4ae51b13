"""The seam of perturbations. One is a class with a name, a kind and the hooks of its kind; registry.py lists it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import PerturbationKind
from nightshift.types import Array, Observation, PerturbationSpec

if TYPE_CHECKING:
    from nightshift.envs.libero.scene_model import SceneModel  # which loads mujoco

MAX_STRENGTH = 5.0
"""LIBERO-Plus grades its variants from 1 to 5; 0 changes nothing."""
WAY_STEPS = 20
"""Places on the way to full strength that have to be free: 5 mm apart for objects, which are wider than that."""

Sense = Literal["any", "images", "agentview", "instruction"]
"""What a policy has to read for a perturbation to reach it; images are those of any camera."""


class EpisodeKey(NamedTuple):
    """What the draws of a perturbation depend on, besides its name and strength."""

    task: str
    init_state: int
    seed: int


class Perturbation:
    """One perturbation of one group of episodes, with what it drew.

    A draw never depends on the strength: a stronger perturbation goes further in the same direction. Noise is drawn by
    episode and control step, so it does not depend on how steps are grouped into calls. Hooks that a subclass leaves
    alone change nothing.
    """

    name: ClassVar[str]
    kind: ClassVar[PerturbationKind]
    sense: ClassVar[Sense] = "any"
    is_whole: ClassVar[bool] = False
    """Whether its strengths are whole numbers."""
    source: ClassVar[str] = "Nightshift"
    """The benchmark that has the name."""
    summary: ClassVar[str]
    """What strength 1 does, for people."""

    def __init__(self, spec: PerturbationSpec, key: EpisodeKey) -> None:
        self.spec = spec
        self.key = key
        self.reached = spec.strength
        """Less where a scene has no room for its strength, or nothing that it could change: `change_scene` says so."""

    @property
    def strength(self) -> float:
        return self.spec.strength

    def random(self, *stream: int) -> np.random.Generator:
        """The same numbers for the same name, task, init state and seed."""
        name, task = zlib.crc32(self.name.encode()), zlib.crc32(self.key.task.encode())
        return np.random.default_rng([name, task, self.key.init_state, self.key.seed, *stream])

    def change_scene(self, scene: SceneModel) -> None:
        """Change the model and the init state in `scene`, which no other episode shares."""

    def change_actions(self, actions: Array, steps: NDArray[np.int64]) -> Array:
        """What reaches the simulators in place of `actions` [N, T, A]; `steps` [N] were made before them."""
        return actions

    def change_observation(self, observation: Observation, steps: NDArray[np.int64]) -> Observation:
        """What the policy is shown in place of the state vectors, each [N, …], after `steps` [N]."""
        return observation

    def change_images(
        self, images: Mapping[str, NDArray[np.uint8]], lanes: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> Mapping[str, NDArray[np.uint8]]:
        """The same for camera images [len(lanes), S, S, 3] of the simulators `lanes` after `steps` [len(lanes)]."""
        return images

    def change_instruction(self, instruction: str) -> str:
        return instruction


def clear_way(steps: Sequence[NDArray[Any]], is_free: Callable[[NDArray[Any]], bool]) -> tuple[NDArray[Any], float]:
    """The first of `steps`, each the way at strength 1, along which all strengths are free, and the highest of them.

    Where there is none: the one that is free the furthest, and the strength up to which it is.
    """
    for step in steps:
        if is_free(MAX_STRENGTH * step) and _room(step, is_free) == MAX_STRENGTH:
            return step, MAX_STRENGTH
    rooms = [_room(step, is_free) for step in steps]
    furthest = int(np.argmax(rooms))
    return steps[furthest], rooms[furthest]


def _room(step: NDArray[Any], is_free: Callable[[NDArray[Any]], bool]) -> float:
    """The strength up to which the way is free, on a grid that does not depend on the strength of an episode."""
    reached = 0.0
    for strength in np.linspace(0.0, MAX_STRENGTH, WAY_STEPS + 1)[1:].tolist():
        if not is_free(strength * step):
            break
        reached = strength
    return reached


def unit_vector(random: np.random.Generator, size: int) -> NDArray[Any]:
    """A direction, uniform on the sphere."""
    drawn = random.standard_normal(size)
    return drawn / np.linalg.norm(drawn)
