"""Many LIBERO simulations in one process, stepped by one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import ActionSpace, States, Steps
from nightshift.envs.libero.env import LiberoEnv, usable_actions
from nightshift.envs.libero.stepping import Addresses
from nightshift.envs.libero.suites import LiberoSuite
from nightshift.envs.protocols import DEFAULT, Protocol
from nightshift.types import Array, Observation, Scene, Split, Task

Lanes = NDArray[np.int64]


class LiberoFleet:
    """Simulations that share one compiled model. Stepping releases the GIL, so threads can share the work.

    Example:
        fleet = LIBERO_MINI.make_fleet(task)
        observation = fleet.reset("train", [0, 1, 2, 3])
        observation, success, unstable = fleet.step(np.zeros((4, 7), np.float32), np.ones(4, bool))
    """

    def __init__(
        self,
        suite: LiberoSuite,
        task: Task,
        protocol: Protocol = DEFAULT,
        *,
        threads: int = 1,
        train_states: States | None = None,
    ) -> None:
        self._lanes = [LiberoEnv(suite, task, protocol, train_states=train_states)]
        self._step_addresses: Addresses = np.empty((0, 0), np.int64)
        self._observation_addresses = self._step_addresses
        self._observation: dict[str, Array] = {}
        self._success = np.zeros(0, np.bool_)
        self._unstable = np.zeros(0, np.bool_)
        self._steps = 0
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads) if threads > 1 else None

    @property
    def task(self) -> Task:
        return self._lanes[0].task

    @property
    def action_space(self) -> ActionSpace:
        return self._lanes[0].action_space

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        while len(self._lanes) < len(init_states):
            self._lanes.append(self._lanes[0].with_new_data())
        rows = [lane.reset(split, state) for lane, state in zip(self._lanes, init_states, strict=False)]
        self._observation = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        used = self._lanes[: len(init_states)]
        self._step_addresses = np.stack([lane.step_addresses for lane in used])
        self._observation_addresses = np.stack([lane.observation_addresses for lane in used])
        self._success, self._unstable = np.zeros((2, len(init_states)), np.bool_)
        self._steps = 0
        return self._observation

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        self._steps += 1
        lanes = np.flatnonzero(active)
        self._advance(lanes, usable_actions(self.task, self._steps, actions[lanes]))
        self._success[:], self._unstable[:] = False, False
        self._lanes[0].observer.write(self._observation_addresses[lanes], lanes, self._observation)
        for lane in lanes.tolist():
            self._unstable[lane] = self._lanes[lane].is_unstable()
            self._success[lane] = not self._unstable[lane] and self._lanes[lane].is_solved()
        return Steps(self._observation, self._success, self._unstable)

    def scene(self, lane: int) -> Scene:
        return self._lanes[lane].scene()

    def render(self, lane: int) -> NDArray[np.uint8] | None:
        return self._lanes[lane].render()

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        if self._executor:
            self._executor.shutdown()

    def _advance(self, lanes: Lanes, actions: NDArray[np.float64]) -> None:
        step = self._lanes[0].stepping.step
        if self._executor is None:
            step(self._step_addresses[lanes], actions)
            return
        parts = np.array_split(np.arange(len(lanes)), self._threads)
        list(self._executor.map(lambda part: step(self._step_addresses[lanes[part]], actions[part]), parts))
