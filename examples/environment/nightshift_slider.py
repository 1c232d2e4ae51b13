"""A suite of its own: a block on a table that a force in the plane slides to a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nightshift import config
from nightshift.envs.base import ActionSpace, ArraySpec, InitStates, Predicate, States, Step, Suite, stored_split
from nightshift.envs.protocols import Protocol
from nightshift.envs.sequential_fleet import SequentialFleet
from nightshift.types import INSTRUCTION, Array, Body, Observation, Scene, Split, Task

NAME = "slider"
TASKS = [Task(suite=NAME, name="slide", language="slide the block to the target", index=0, suite_size=1)]
STATES = {"train": 100, "eval": 50}
ACTIONS = ActionSpace(size=2)
REACHED = 0.05  # metres
ACCELERATION = 0.08  # metres per step and step, at full force
FRICTION = 0.5  # share of the speed that a step takes away


class SliderSuite(Suite):
    name = NAME
    action_space = ACTIONS

    def tasks(self) -> list[Task]:
        return list(TASKS)

    def goal(self, task: Task) -> Sequence[Predicate]:
        return [("slide", "block", "target")]

    def state_space(self) -> Mapping[str, ArraySpec]:
        return {"block": ArraySpec((4,)), "target": ArraySpec((2,))}

    def init_states(self, task: Task, split: Split) -> InitStates:
        """The simulator makes a state from its index. Change the digest when it makes other states."""
        return InitStates(count=STATES[stored_split(split)], digest="slider-1")

    def make_env(self, task: Task, protocol: Protocol, cameras: config.Cameras) -> SliderEnv:
        return SliderEnv(task)

    def make_fleet(
        self, task: Task, protocol: Protocol, cameras: config.Cameras, train_states: States | None = None
    ) -> SequentialFleet:
        """One simulator after the other; one that steps them together implements `envs.base.Fleet` itself."""
        return SequentialFleet(lambda: self.make_env(task, protocol, cameras))

    def expert(self, scene: Scene) -> Array:
        """Demos are collected from it: a spring to the target."""
        way = scene.bodies["target"].position - scene.bodies["block"].position
        return np.clip(4 * way[:2], -1, 1).astype(np.float32)


class SliderEnv:
    action_space = ACTIONS

    def __init__(self, task: Task) -> None:
        self.task = task
        self._place, self._speed, self._target = np.zeros((3, 2))

    def reset(self, split: Split, init_state: int) -> Observation:
        random = np.random.default_rng([stored_split(split) == "eval", init_state])
        self._place, self._speed = np.zeros((2, 2))
        self._target = random.uniform(-0.5, 0.5, size=2)
        return self._observe()

    def step(self, action: Array) -> Step:
        self._speed = (1 - FRICTION) * self._speed + ACCELERATION * self.action_space.clip(action)
        self._place = self._place + self._speed
        return Step(self._observe(), bool(np.linalg.norm(self._target - self._place) < REACHED))

    def scene(self) -> Scene:
        """What `expert` sees."""
        return Scene(
            gripper_position=np.append(self._place, 0.0),
            gripper_rotation=np.eye(3),
            gripper_opening=0.0,
            bodies={"block": _body(self._place), "target": _body(self._target)},
            joints={},
            goal=(("slide", "block", "target"),),
        )

    def full_state(self) -> NDArray[np.float64]:
        return np.concatenate([self._place, self._speed, self._target])

    def camera_images(self, cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        """A suite with cameras names them in `Suite.cameras`; docs/architecture.md, How an episode is played."""
        return {}

    def render(self) -> NDArray[np.uint8] | None:
        """No films."""
        return None

    def close(self) -> None:
        """There is nothing to free."""

    def _observe(self) -> Observation:
        return {
            "block": np.concatenate([self._place, self._speed]).astype(np.float32),
            "target": (self._target - self._place).astype(np.float32),
            INSTRUCTION: np.array(self.task.language),
        }


def _body(place: NDArray[np.float64]) -> Body:
    return Body(position=np.append(place, 0.0), rotation=np.eye(3), half_size=np.zeros(3))


SLIDER = SliderSuite()
