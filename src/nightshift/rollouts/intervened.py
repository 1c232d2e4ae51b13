"""Playing an episode in which somebody may take over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nightshift.envs.base import Fleet
from nightshift.errors import RolloutError
from nightshift.interventions.base import Intervention, Moment
from nightshift.rollouts.experts import no_expert
from nightshift.rollouts.rollout import GroupPlay, Observer
from nightshift.types import Array, RolloutRequest, Trajectory


class IntervenedPlay(GroupPlay):
    """One episode, played and recorded control step by control step.

    Before every step the source of interventions is shown what the policy would do. If it acts instead, the rest of the
    policy's chunk is dropped, and the policy decides anew for the next step: it is asked at every step of an
    intervention, and acts on what it sees when it gets control back. `actions` and `log_probs` of the trajectory are
    always the policy's own.
    """

    def __init__(
        self,
        request: RolloutRequest,
        fleet: Fleet,
        observer: Observer,
        horizon: int,
        on_step: Callable[[], None],
        intervention: Intervention,
    ) -> None:
        if request.count > 1 or request.controller == "expert":
            raise RolloutError(f"{request.count} episodes of the {request.controller} cannot be intervened in")
        super().__init__(request, fleet, observer, horizon, on_step, no_expert)
        self._intervention = intervention
        self._flags: list[bool] = []

    def reset(self) -> None:
        self._intervention.before_reset()
        super().reset()
        self._intervention.begin(self._fleet.task)

    def see(self) -> None:
        """Every step is seen and recorded: any of them may be somebody else's."""
        self._observer.see(self._fleet)
        if not self.done:
            self._recording.add_decision(np.flatnonzero(self.active), self._observer.seen)

    def advance(self) -> None:
        """One control step."""
        planned, log_probs = self._actions[:, [self._used]], self._log_probs[:, [self._used]]
        override = self._intervention.override(self._moment(planned[0, 0]))
        self._flags.append(override is not None)
        self._used = self._actions.shape[1] if override is not None else self._used + 1
        taken = planned if override is None else np.asarray(override, np.float32)[None, None]
        self._execute(planned, taken, log_probs)

    def trajectories(self, version: int) -> list[Trajectory]:
        self._intervention.end()
        return [replace(one, interventions=np.array(self._flags)) for one in super().trajectories(version)]

    @property
    def _steps_per_observation(self) -> int:
        return 1

    @property
    def _is_look_due(self) -> bool:
        return True

    def _moment(self, planned: Array) -> Moment:
        return Moment(
            step=self._recording.steps,
            observation={name: np.array(values[0]) for name, values in self._observer.seen.items()},
            scene=lambda: self._fleet.scene(0),
            picture=lambda: self._fleet.render(0),
            policy_action=planned,
        )
