"""Perturbations of the way from the policy to the simulator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.perturbations.base import EpisodeKey, Perturbation
from nightshift.types import Array, PerturbationSpec

NOISE_PER_LEVEL = 0.1
"""Standard deviation at strength 1; the dimensions of an action go from -1 to 1."""


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
