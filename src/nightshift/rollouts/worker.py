"""What a simulator process does: holds simulators and a copy of the policy, and plays what it is asked to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from nightshift import config, envs
from nightshift.cluster import version_check
from nightshift.envs.base import Fleet
from nightshift.errors import SimulatorError
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import PolicySnapshot, restore
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.rollout import Game, play
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Task, Trajectory

BUSY, TRANSFER = "busy", "transfer"
"""A worker plays, or it takes over a policy; everything else is waiting."""


class Worker:
    """Remembers nothing that could change a result: a fresh worker answers the same."""

    def __init__(
        self, env: config.Env, make_fleet: MakeFleet = envs.make_fleet, driver: Mapping[str, str] | None = None
    ) -> None:
        """`driver`: the versions of who sends the requests, where that may be another machine."""
        self._refusal = version_check.refusal(driver, env.suite) if driver is not None else None
        torch.set_num_threads(1)  # one order of summation, as in every other worker
        self._horizon = envs.horizon(env)
        self._protocol = env.protocol
        self._tasks: dict[str, Task] = {task.name: task for task in envs.tasks(env)}
        self._make_fleet = make_fleet
        self._fleets: dict[str, Fleet] = {}
        self._policy: tuple[str, Policy] | None = None
        self._moves = 0

    def run(
        self, request: RolloutRequest, policy: PolicySnapshot | None
    ) -> tuple[list[Trajectory], Mapping[str, float]]:
        """The episodes, and the seconds they took: in transfer, and busy; of these in simulation and inference."""
        if self._refusal:  # not raised by __init__: an actor that cannot start leaves no error for people
            raise self._refusal
        watch = Stopwatch()
        with watch.timing(TRANSFER):
            restored = self._restored(policy)
        with watch.timing(BUSY):
            game = Game(self._fleet(request.task), self._horizon, self._move, watch)
            self._move()
            played = play(game, request, restored)
        if policy is not None:
            played = [replace(episode, version=policy.version) for episode in played]
        return played, dict(watch.seconds)

    def progress(self) -> int:
        """A number that moves with every control step, for another thread to ask while `run` is busy."""
        return self._moves

    def close(self) -> None:
        for fleet in self._fleets.values():
            fleet.close()
        self._fleets.clear()

    def _fleet(self, task: str) -> Fleet:
        if task not in self._tasks:
            raise SimulatorError(
                f"no task {task!r} here; there are {', '.join(self._tasks)}", "edit env.tasks in params.yaml"
            )
        if task not in self._fleets:
            self._fleets[task] = self._make_fleet(self._tasks[task], self._protocol)
        return self._fleets[task]

    def _restored(self, snapshot: PolicySnapshot | None) -> Policy | None:
        """Built once, however many requests it plays."""
        if snapshot is None:
            return None
        if self._policy is None or self._policy[0] != snapshot.token:
            self._policy = snapshot.token, restore(snapshot)
        return self._policy[1]

    def _move(self) -> None:
        self._moves += 1
