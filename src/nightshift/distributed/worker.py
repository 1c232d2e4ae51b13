"""What a simulator process does: holds simulators and a copy of the policy, and plays what it is asked to."""

from __future__ import annotations

from dataclasses import replace

import torch

from nightshift import config, envs, policies
from nightshift.distributed.base import MakeFleet, PolicySnapshot
from nightshift.distributed.rollout import play
from nightshift.envs.base import Fleet
from nightshift.errors import SimulatorError
from nightshift.policies.base import Policy
from nightshift.types import RolloutRequest, Task, Trajectory


class Worker:
    """Remembers nothing that could change a result: a fresh worker answers the same."""

    def __init__(self, env: config.Env, make_fleet: MakeFleet = envs.make_fleet) -> None:
        torch.set_num_threads(1)  # one order of summation, as in every other worker
        self._horizon = envs.horizon(env)
        self._protocol = env.protocol
        self._tasks: dict[str, Task] = {task.name: task for task in envs.tasks(env)}
        self._make_fleet = make_fleet
        self._fleets: dict[str, Fleet] = {}
        self._moves = 0

    def run(self, request: RolloutRequest, policy: PolicySnapshot | None) -> list[Trajectory]:
        fleet = self._fleet(request.task)
        self._move()
        if policy is None:
            return play(fleet, request, None, self._horizon, self._move)
        played = play(fleet, request, restore(policy), self._horizon, self._move)
        return [replace(episode, version=policy.version) for episode in played]

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

    def _move(self) -> None:
        self._moves += 1


def restore(snapshot: PolicySnapshot) -> Policy:
    policy = policies.build(snapshot.spec)
    # Arrays from Ray's object store are read-only, so torch gets copies.
    policy.load_state_dict({name: torch.tensor(values) for name, values in snapshot.weights.items()})
    return policy


def snapshot(policy: Policy, version: int = 0) -> PolicySnapshot:
    weights = {name: tensor.detach().numpy().copy() for name, tensor in policy.state_dict().items()}
    return PolicySnapshot(spec=policy.spec, weights=weights, version=version)
