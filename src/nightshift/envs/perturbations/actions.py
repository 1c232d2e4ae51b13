"""Perturbations of the way from the policy to the simulator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.perturbations.base import EpisodeKey, Perturbation
from nightshift.types import GRIPPER_CLOSED, GRIPPER_OPEN, Array, PerturbationSpec

NOISE_PER_LEVEL = 0.1
"""Standard deviation at strength 1; the dimensions of an action go from -1 to 1."""
SLIP_STRETCH = 40
"""Control steps in which at most one slip begins, and ends."""
SLIPS_PER_LEVEL = 0.1
"""Share of these stretches that have a slip at strength 1."""
SLIP_STEPS = 8
"""For which the hand opens, and for which it closes after that: as long as it takes all the way."""


class ActionDelay(Perturbation):
    """Actions arrive late by as many control steps as the strength says; until the first arrives the arm is told
    nothing: zeros."""

    name = "action_delay"
    kind = "action"
    is_whole = True
    summary = "actions arrive one control step (50 ms) late"

    def __init__(self, spec: PerturbationSpec, key: EpisodeKey) -> None:
        super().__init__(spec, key)
        self._waiting: Array | None = None

    def change_actions(self, actions: Array, steps: NDArray[np.int64]) -> Array:
        if self._waiting is None:
            self._waiting = np.zeros((len(actions), int(self.strength), actions.shape[2]), actions.dtype)
        queue = np.concatenate([self._waiting, actions], axis=1)
        self._waiting = queue[:, actions.shape[1] :]
        return queue[:, : actions.shape[1]]


class ActionNoise(Perturbation):
    """Gaussian noise on every dimension of every action."""

    name = "action_noise"
    kind = "action"
    summary = f"noise with a standard deviation of {NOISE_PER_LEVEL} on every dimension of an action"

    def change_actions(self, actions: Array, steps: NDArray[np.int64]) -> Array:
        noise = np.empty_like(actions)
        for lane, first in enumerate(steps.tolist()):
            for place in range(actions.shape[1]):
                random = self.random(lane, first + place)
                noise[lane, place] = random.standard_normal(actions.shape[2], dtype=np.float32)
        return actions + np.float32(NOISE_PER_LEVEL * self.strength) * noise


class GripperSlips(Perturbation):
    """At random times the hand lets go of what it holds and closes on nothing, whatever it is told. Demos in which that
    happens show how to notice it and grasp again."""

    name = "gripper_slips"
    kind = "gripper"
    summary = "in 10 % of all stretches of 2 s the hand opens for 0.4 s and closes for 0.4 s without being told"

    def __init__(self, spec: PerturbationSpec, key: EpisodeKey) -> None:
        super().__init__(spec, key)
        self._begins: dict[tuple[int, int], int | None] = {}

    def change_actions(self, actions: Array, steps: NDArray[np.int64]) -> Array:
        changed = actions.copy()
        for lane, first in enumerate(steps.tolist()):
            for place in range(actions.shape[1]):
                forced = self._forced(lane, first + place)
                if forced is not None:
                    changed[lane, place, -1] = forced
        return changed

    def _forced(self, lane: int, step: int) -> float | None:
        """What the gripper is made to do in a control step; None if it does what it is told."""
        stretch, place = divmod(step, SLIP_STRETCH)
        if (lane, stretch) not in self._begins:
            self._begins[lane, stretch] = self._begin(lane, stretch)
        begin = self._begins[lane, stretch]
        if begin is None or not begin <= place < begin + 2 * SLIP_STEPS:
            return None
        return GRIPPER_OPEN if place < begin + SLIP_STEPS else GRIPPER_CLOSED

    def _begin(self, lane: int, stretch: int) -> int | None:
        """The place in its stretch at which a slip begins; None without one."""
        random = self.random(lane, stretch)
        place = int(random.integers(SLIP_STRETCH - 2 * SLIP_STEPS + 1))
        return place if random.random() < SLIPS_PER_LEVEL * self.strength else None
