"""A point that must reach a goal: every stage runs on it in seconds, with no simulator installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Camera, Step
from nightshift.errors import SimulatorError
from nightshift.types import Array, Body, Observation, Scene, Split, Task

TASKS = [
    Task(suite="fake", name=name, language=f"reach {name}", index=index, suite_size=2)
    for index, name in enumerate(("near", "far"))
]
_STEP = 0.05
"""Metres that a full action moves the point, as in operational-space control."""
_REACHED = 0.02
STATES: dict[Split, int] = {"train": 200, "eval": 50}


class FakeEnv:
    """The gripper is a point; the goal is a cube of no size. Success is being there."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._point = np.zeros(3)
        self._goal = np.zeros(3)

    def reset(self, split: Split, init_state: int) -> Observation:
        random = np.random.default_rng([self.task.index, split == "eval", init_state])
        self._point = np.zeros(3)
        self._goal = random.uniform(0.1, 0.2 * (1 + self.task.index), size=3)
        return self._observe()

    def step(self, action: Array) -> Step:
        self._point = self._point + _STEP * np.clip(action[:3], -1, 1)
        return Step(self._observe(), bool(np.abs(self._point - self._goal).max() < _REACHED))

    def scene(self) -> Scene:
        return Scene(
            gripper_position=self._point,
            gripper_rotation=np.eye(3),
            gripper_opening=0.08,
            bodies={"goal": Body(position=self._goal, rotation=np.eye(3), half_size=np.zeros(3))},
            joints={},
            goal=(("reach", "goal"),),
        )

    def full_state(self) -> NDArray[np.float64]:
        return np.concatenate([self._point, self._goal])

    def look(self, cameras: Sequence[Camera]) -> Mapping[Camera, NDArray[np.uint8]]:
        raise SimulatorError("the fake environment has no cameras", "leave cameras out of policy.inputs in params.yaml")

    def render(self) -> NDArray[np.uint8] | None:
        return None

    def close(self) -> None:
        """Nothing is held."""

    def _observe(self) -> Observation:
        task = np.zeros(self.task.suite_size, dtype=np.float32)
        task[self.task.index] = 1
        return {
            "proprio": self._point.astype(np.float32),
            "objects": (self._goal - self._point).astype(np.float32),
            "task": task,
        }
