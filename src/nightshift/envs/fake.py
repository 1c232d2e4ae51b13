"""A point that must reach a goal: every stage runs on it in seconds, with no simulator installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nightshift import config
from nightshift.envs.base import (
    ActionSpace,
    ArraySpec,
    Drawing,
    InitStates,
    Predicate,
    States,
    Step,
    Suite,
    stored_split,
)
from nightshift.envs.protocols import Protocol, rotate
from nightshift.envs.sequential_fleet import SequentialFleet
from nightshift.types import INSTRUCTION, Array, Body, Observation, Scene, Split, Task

NAME = "fake"
TASKS = [
    Task(suite=NAME, name=name, language=f"reach {name}", index=index, suite_size=2)
    for index, name in enumerate(("near", "far"))
]
STATES = {"train": 200, "eval": 50}
ACTIONS = ActionSpace(size=7)
"""As in operational-space control, so that the scripted expert can play; only the translation has an effect."""
GOAL: tuple[Predicate, ...] = (("reach", "goal"),)
_STEP = 0.05
"""Metres that a full action moves the point, as in operational-space control."""
_REACHED = 0.02
_VIEW = 0.5
"""Metres that the camera shows along each axis, from the origin."""
_GOAL_CHANNEL, _POINT_CHANNEL = 0, 1  # red and green
_DARKEST = 64
_FILM_SIZE = 256
"""Of a picture for people where there are no cameras."""


class FakeSuite(Suite):
    name = NAME
    action_space = ACTIONS
    cameras = ("agentview",)
    redraws = True

    def tasks(self) -> list[Task]:
        return list(TASKS)

    def goal(self, task: Task) -> Sequence[Predicate]:
        return GOAL

    def state_space(self) -> Mapping[str, ArraySpec]:
        return {"proprio": ArraySpec((3,)), "objects": ArraySpec((3,)), "task": ArraySpec((len(TASKS),))}

    def init_states(self, task: Task, split: Split) -> InitStates:
        return InitStates(count=STATES[stored_split(split)], digest=NAME)

    def make_env(self, task: Task, protocol: Protocol, cameras: config.Cameras) -> FakeEnv:
        return FakeEnv(task, self.drawing(protocol, cameras))

    def make_fleet(
        self, task: Task, protocol: Protocol, cameras: config.Cameras, train_states: States | None = None
    ) -> FakeFleet:
        return FakeFleet(lambda: self.make_env(task, protocol, cameras))


class FakeEnv:
    """The gripper is a point; the goal is a cube of no size. The task is solved when the point is there.

    The camera looks from above: the goal is a red square and the point a green one, the brighter the higher.
    """

    action_space = ACTIONS

    def __init__(self, task: Task, drawing: Drawing) -> None:
        self.task = task
        self._drawing = drawing
        self._point = np.zeros(3)
        self._goal = np.zeros(3)

    def reset(self, split: Split, init_state: int) -> Observation:
        random = np.random.default_rng([self.task.index, stored_split(split) == "eval", init_state])
        self._point = np.zeros(3)
        self._goal = random.uniform(0.1, 0.2 * (1 + self.task.index), size=3)
        return self._observe()

    def step(self, action: Array) -> Step:
        self._point = self._point + _STEP * self.action_space.clip(action[:3])
        return Step(self._observe(), bool(np.abs(self._point - self._goal).max() < _REACHED))

    def scene(self) -> Scene:
        return Scene(
            gripper_position=self._point,
            gripper_rotation=np.eye(3),
            gripper_opening=0.08,
            bodies={"goal": Body(position=self._goal, rotation=np.eye(3), half_size=np.zeros(3))},
            joints={},
            goal=GOAL,
        )

    def full_state(self) -> NDArray[np.float64]:
        return np.concatenate([self._point, self._goal])

    def camera_images(self, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        images = {camera: self._image(self._drawing.sizes[camera]) for camera in cameras}
        return {camera: rotate(image) if self._drawing.rotated else image for camera, image in images.items()}

    def camera_images_in(self, state: NDArray[np.float64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        self._point, self._goal = state[:3], state[3:]
        return self.camera_images(cameras)

    def render(self) -> NDArray[np.uint8] | None:
        return self._image(max(self._drawing.sizes.values(), default=_FILM_SIZE))

    def close(self) -> None:
        """There is nothing to free."""

    def _image(self, size: int) -> NDArray[np.uint8]:
        image = np.zeros((size, size, 3), np.uint8)
        side = max(1, size // 8)
        for channel, place in ((_GOAL_CHANNEL, self._goal), (_POINT_CHANNEL, self._point)):
            x, y, height = np.clip(place / _VIEW, 0, 1)
            row, column = round((size - side) * x), round((size - side) * y)
            image[row : row + side, column : column + side, channel] = _DARKEST + round((255 - _DARKEST) * height)
        return image

    def _observe(self) -> Observation:
        task = np.zeros(self.task.suite_size, dtype=np.float32)
        task[self.task.index] = 1
        return {
            "proprio": self._point.astype(np.float32),
            "objects": (self._goal - self._point).astype(np.float32),
            "task": task,
            INSTRUCTION: np.array(self.task.language),
        }


class FakeFleet(SequentialFleet):
    def sibling(self) -> FakeFleet:
        return FakeFleet(self._make)

    def full_states(self, lanes: NDArray[np.int64]) -> States:
        return np.stack([self._envs[lane].full_state() for lane in lanes.tolist()])

    def redraw(self, lane: int, states: States, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        env = self._make()
        assert isinstance(env, FakeEnv)
        images = [env.camera_images_in(state, cameras) for state in states]
        return {camera: np.stack([image[camera] for image in images]) for camera in cameras}


FAKE = FakeSuite()
