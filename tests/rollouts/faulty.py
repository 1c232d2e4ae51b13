"""Simulators that fail or become unstable, as LIBERO's native code may, on the fake suite."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nightshift import config, envs
from nightshift.envs.base import Env, Steps
from nightshift.envs.fake import FakeFleet
from nightshift.envs.sequential_fleet import SequentialFleet
from nightshift.types import Array, Observation, Split, Task

AT_STEP = 2
CRAWL_SECONDS = 30.0


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def hang() -> None:
    time.sleep(3600)


def hang_with_the_gil() -> None:
    time.sleep(0.5)
    ctypes.PyDLL(None).sleep(3600)  # unlike CDLL, PyDLL does not let go of the GIL


def raise_something() -> None:
    raise MemoryError("no room for the contacts")


@dataclass(frozen=True)
class Faulty:
    """Makes fleets that fail on some init states: every time, or only while a file of that number is there."""

    faults: Mapping[int, Callable[[], None]]
    once: Path | None = None

    def __call__(self, task: Task, env: config.Env) -> FaultyFleet:
        return FaultyFleet(lambda: envs.make(task, env), self)

    def strike(self, state: int) -> None:
        if self.once is not None:
            try:
                (self.once / str(state)).unlink()
            except FileNotFoundError:
                return
        self.faults[state]()


class FaultyFleet(FakeFleet):
    def __init__(self, make: Callable[[], Env], faulty: Faulty) -> None:
        super().__init__(make)
        self._faulty = faulty
        self._state = -1
        self._steps = 0

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        self._state, self._steps = init_states[0], 0
        return super().reset(split, init_states)

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        self._steps += 1
        if self._steps == AT_STEP and self._state in self._faulty.faults:
            self._faulty.strike(self._state)
        return super().step(actions, active)

    def sibling(self) -> FaultyFleet:
        return FaultyFleet(self._make, self._faulty)


@dataclass(frozen=True)
class Slow:
    """Makes fleets that crawl in the first process that asks for one, and others everywhere else."""

    once: Path
    """A file that is there until then; it comes back if that process ever finishes an episode."""
    others: Callable[[Task, config.Env], SequentialFleet]

    def __call__(self, task: Task, env: config.Env) -> SequentialFleet:
        try:
            self.once.unlink()
        except FileNotFoundError:
            return self.others(task, env)
        return SlowFleet(lambda: envs.make(task, env), self.once)


class SlowFleet(SequentialFleet):
    """Goes on with every step, but slowly: never stuck, and done in minutes."""

    def __init__(self, make: Callable[[], Env], done: Path) -> None:
        super().__init__(make)
        self._done = done

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        time.sleep(CRAWL_SECONDS)
        after = super().step(actions, active)
        if after.success.any():
            self._done.touch()
        return after


@dataclass(frozen=True)
class Unstable:
    """Makes fleets whose first simulator becomes unstable on some init states, after AT_STEP steps."""

    states: frozenset[int]

    def __call__(self, task: Task, env: config.Env) -> UnstableFleet:
        return UnstableFleet(lambda: envs.make(task, env), self.states)


class UnstableFleet(FakeFleet):
    """Shows numbers that are not finite once the physics is unstable."""

    def __init__(self, make: Callable[[], Env], states: frozenset[int]) -> None:
        super().__init__(make)
        self._states = states
        self._state = -1
        self._steps = 0

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        self._state, self._steps = init_states[0], 0
        return super().reset(split, init_states)

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        self._steps += 1
        after = super().step(actions, active)
        if self._state not in self._states or self._steps < AT_STEP or not active[0]:
            return after
        for values in after.observation.values():
            if values.dtype == np.float32:
                values[0] = np.nan
        first = np.arange(len(active)) == 0
        return Steps(after.observation, after.success, first)

    def sibling(self) -> UnstableFleet:
        return UnstableFleet(self._make, self._states)
