"""A simulator process: it holds simulators and a copy of the policy, and plays the requests it is given."""

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
from nightshift.rollouts.rollout import EpisodeRunner
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Task, Trajectory

BUSY, TRANSFER = "busy", "transfer"
"""What a worker's time is spent on: playing, and loading a policy. The rest is waiting."""


class Worker:
    """Keeps no state that could change a result: a new worker gives the same answers."""

    def __init__(
        self, env: config.Env, make_fleet: MakeFleet = envs.make_fleet, driver: Mapping[str, str] | None = None
    ) -> None:
        """`driver`: the driver's package versions, where it may be on another machine."""
        self._mismatch = version_check.mismatch_error(driver, env.suite) if driver is not None else None
        torch.set_num_threads(1)  # one order of summation, as in every other worker
        self._horizon = envs.horizon(env)
        self._env = env
        self._tasks: dict[str, Task] = {task.name: task for task in envs.tasks(env)}
        self._make_fleet = make_fleet
        self._fleets: dict[str, Fleet] = {}
        self._policy: tuple[str, Policy] | None = None
        self._heartbeats = 0

    def run(
        self, request: RolloutRequest, policy: PolicySnapshot | None
    ) -> tuple[list[Trajectory], Mapping[str, float]]:
        """The episodes, and the seconds they took: in transfer, and busy; of these in simulation and inference."""
        if self._mismatch:  # not raised by __init__: Ray does not pass on the error of an actor that cannot start
            raise self._mismatch
        stopwatch = Stopwatch()
        with stopwatch.timing(TRANSFER):
            restored = self._restored(policy)
        with stopwatch.timing(BUSY):
            runner = EpisodeRunner(self._fleet(request.task), self._horizon, self._beat, stopwatch)
            self._beat()
            played = runner.play(request, restored)
        if policy is not None:
            played = [replace(episode, version=policy.version) for episode in played]
        return played, dict(stopwatch.seconds)

    def heartbeats(self) -> int:
        """A counter that grows with every control step; another thread may ask for it while `run` is busy."""
        return self._heartbeats

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
            self._fleets[task] = self._make_fleet(self._tasks[task], self._env)
        return self._fleets[task]

    def _restored(self, snapshot: PolicySnapshot | None) -> Policy | None:
        """Built once per policy, however many requests it plays."""
        if snapshot is None:
            return None
        if self._policy is None or self._policy[0] != snapshot.token:
            self._policy = snapshot.token, restore(snapshot)
        return self._policy[1]

    def _beat(self) -> None:
        self._heartbeats += 1
