"""Simulators that the pilot moves, one for each task, and the mirror that draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from nightshift.envs.base import Fleet
from nightshift.teleop.mirror import Development, Image, Mirror
from nightshift.teleop.plant import After
from nightshift.teleop.recorder import SIMULATOR
from nightshift.types import Array, Observation, Task

_ACTIVE = np.ones(1, np.bool_)


class Simulators:
    """Time stands still between two steps, so that there is nothing to stop and nothing to wake."""

    judge = SIMULATOR
    needs_pilot = False

    def __init__(self, make_fleet: Callable[[Task], Fleet], mirror: Mirror, clock: Callable[[], float]) -> None:
        self._make_fleet = make_fleet
        self._mirror = mirror
        self._clock = clock
        self._fleets: dict[str, Fleet] = {}
        self._task = ""
        self._observation: Observation = {}

    def open(self, task: Task) -> None:
        """A simulator is built when it is reset."""

    def reset(self, task: Task, init_state: int) -> Observation:
        if task.name not in self._fleets:
            self._fleets[task.name] = self._make_fleet(task)
        self._task = task.name
        fleet = self._fleets[task.name]
        self._mirror.show(fleet.sibling())
        self._observation = _only_row(fleet.reset("train", [init_state]))
        self._mirror.reset(init_state, self._clock())
        return self._observation

    def wake(self) -> Observation:
        return self._observation

    def step(self, action: Array) -> After:
        after = self._fleets[self._task].step(action[None], _ACTIVE)
        self._mirror.step(action, self._clock())
        unstable, success = bool(after.unstable[0]), bool(after.success[0])
        if not unstable:  # what an unstable simulation shows means nothing
            self._observation = _only_row(after.observation)
        return After(self._observation, success=success and not unstable, unstable=unstable)

    def idle(self) -> None:
        """The mirror draws by itself."""

    def stop(self, why: str) -> bool:
        return True

    def look(self, cameras: Sequence[str]) -> Mapping[str, Image]:
        return self._mirror.look(cameras).result()

    def develop(self, actions: Array, cameras: Sequence[str]) -> Future[Development]:
        return self._mirror.develop(actions, cameras)

    def let_go(self) -> None:
        """Nobody is waited for."""

    def close(self) -> None:
        self._mirror.close(self._fleets.values())


def _only_row(observation: Observation) -> dict[str, Array]:
    """Of a fleet of one, copied: the fleet overwrites its arrays."""
    return {name: np.array(values[0]) for name, values in observation.items()}
