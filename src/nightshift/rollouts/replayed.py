"""Playing episodes of the expert again, from their recorded actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nightshift.envs.base import Fleet
from nightshift.errors import RolloutError
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
        lanes, step = np.flatnonzero(self.active), self._recording.steps
        if any(step >= len(self._recorded[lane]) for lane in lanes):
            raise RolloutError(
                f"{self.request.task}, state {self.request.init_state}, took another course when the same actions were "
                f"played again: {self._fleet.task.suite} is not deterministic",
                "set machine.threads to 1 in params.yaml: then demos are played once",
            )
        actions = np.stack([self._recorded[lane][step] for lane in lanes.tolist()])[:, None]
        self.decide(lanes, actions, np.zeros_like(actions), {})
        self._play(self._steps_to_go)
