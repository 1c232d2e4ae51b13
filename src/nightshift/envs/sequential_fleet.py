"""A fleet that steps its simulators one after the other, for a simulator that has no vectorised step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import ActionSpace, Env, Steps
from nightshift.errors import UnstablePhysics
from nightshift.types import Array, Observation, Scene, Split, Task


class _Stepping(Protocol):
    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps: ...


def step_by_step(fleet: _Stepping, actions: Array, active: NDArray[np.bool_]) -> tuple[Steps, NDArray[np.int64]]:
    """`Fleet.advance` of a fleet that has `step` alone."""
    going, made = active.copy(), np.zeros(len(active), np.int64)
    success, unstable = np.zeros((2, len(active)), np.bool_)
    observation: Observation = {}
    for step in range(actions.shape[1]):
        if going.any():
            observation, solved, broken = fleet.step(actions[:, step], going)
            made += going
            success |= going & solved
            unstable |= going & broken
            going &= ~(solved | broken)
    return Steps(observation, success, unstable), made


class SequentialFleet:
    def __init__(self, make: Callable[[], Env]) -> None:
        self._make = make
        self._envs = [make()]
        self._observation: dict[str, Array] = {}

    @property
    def task(self) -> Task:
        return self._envs[0].task

    @property
    def action_space(self) -> ActionSpace:
        return self._envs[0].action_space

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        while len(self._envs) < len(init_states):
            self._envs.append(self._make())
        rows = [env.reset(split, state) for env, state in zip(self._envs, init_states, strict=False)]
        self._observation = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return self._observation

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        success, unstable = np.zeros((2, len(active)), np.bool_)
        for lane in np.flatnonzero(active).tolist():
            try:
                observation, success[lane] = self._envs[lane].step(actions[lane])
            except UnstablePhysics:
                unstable[lane] = True
                continue
            for name, values in observation.items():
                self._observation[name][lane] = values
        return Steps(self._observation, success, unstable)

    def advance(self, actions: Array, active: NDArray[np.bool_]) -> tuple[Steps, NDArray[np.int64]]:
        return step_by_step(self, actions, active)

    def look(self, lanes: NDArray[np.int64], cameras: Sequence[str]) -> Mapping[str, NDArray[np.uint8]]:
        images = [self._envs[lane].camera_images(cameras) for lane in lanes.tolist()]
        return {camera: np.stack([image[camera] for image in images]) for camera in cameras}

    def sibling(self) -> SequentialFleet:
        return SequentialFleet(self._make)

    def scene(self, lane: int) -> Scene:
        return self._envs[lane].scene()

    def render(self, lane: int) -> NDArray[np.uint8] | None:
        return self._envs[lane].render()

    def close(self) -> None:
        for env in self._envs:
            env.close()
