"""Playing episodes of the expert again, from their recorded actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nightshift.envs.base import Fleet
from nightshift.rollouts.experts import no_expert
from nightshift.rollouts.rollout import GroupPlay, Observer
from nightshift.types import RolloutRequest, Trajectory


class ReplayedPlay(GroupPlay):
    """Every action is a decision, as it was: noise on the actions and the simulation are the same again."""

    def __init__(
        self,
        request: RolloutRequest,
        fleet: Fleet,
        observer: Observer,
        horizon: int,
        on_step: Callable[[], None],
        recorded: Sequence[Trajectory],
    ) -> None:
        super().__init__(request, fleet, observer, horizon, on_step, no_expert)
        self._recorded = [episode.actions for episode in recorded]

    def advance(self) -> None:
        lanes = np.flatnonzero(self.active)
        actions = np.stack([self._recorded[lane][self._recording.steps] for lane in lanes.tolist()])[:, None]
        self.decide(lanes, actions, np.zeros_like(actions), {})
        self._play(self._steps_to_go)
