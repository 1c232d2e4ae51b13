"""Which groups an iteration learns from: requested in waves until enough of them pass the filter.

    Sampler                    across iterations: cursors, solved states, success rate of every task
      └─ begin() ─▶ Round      one iteration
                     wave()    requests for the groups that are still missing; none when done or out of waves
                     take()    their groups, in the order of the requests: accepted, or filtered and replaced

The requests depend on params.yaml and on earlier outcomes alone: not on the number of workers or learner ranks, nor on
the order in which groups finish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from nightshift import config
from nightshift.rollouts.schedule import Ring, shuffled
from nightshift.types import RolloutRequest, Task, Trajectory

Group = list[Trajectory]

_STREAM = 1
"""Separates this random order of states from the one that demos are collected in: RL that starts on the states of the
demos would show too high a success rate at first."""
_MEMORY = 0.8
"""Weight of the past in the moving average of a task's success rate."""


class Sampler:
    def __init__(self, states: Mapping[Task, Sequence[int]], settings: config.Rloo, *, seed: int) -> None:
        """`states`: the init states of every task that may be learned from."""
        self._settings = settings.sampling
        self._group_size = settings.group_size
        self._groups = settings.groups
        self._temperatures = np.linspace(settings.temperature, settings.temperature_end, settings.iterations)
        self._seed = seed
        self._tasks = Ring([task.name for task in states])
        self._states = {
            task.name: Ring(shuffled(task, chosen, seed=seed, domain=_STREAM)) for task, chosen in states.items()
        }
        self._solved: dict[str, dict[int, int]] = {task.name: {} for task in states}
        self._rates: dict[str, float] = {}
        self._requested: dict[str, float] = {task.name: 0.0 for task in states}
        self._tickets = 0
        self._rounds = 0

    def begin(self) -> Round:
        """The next iteration, on its tasks."""
        self._rounds += 1
        count = min(self._settings.tasks_at_once or len(self._tasks), len(self._tasks))
        return Round(self, self._tasks.take(count), self._groups, self._settings)

    def request(self, task: str) -> RolloutRequest:
        """A group of the task from its next init state."""
        ticket = self._tickets
        self._tickets += 1
        return RolloutRequest(
            task=task,
            split="train",
            init_state=self._next_state(task),
            controller="sample",
            seed=int(np.random.SeedSequence([self._seed, ticket]).generate_state(1)[0]),
            count=self._group_size,
            temperature=float(self._temperatures[min(self._rounds, len(self._temperatures)) - 1]),
        )

    def observe(self, group: Group) -> None:
        """Update what is known about the group's task and init state."""
        request, rate = group[0].request, success_rate(group)
        before = self._rates.get(request.task, rate)
        self._rates[request.task] = _MEMORY * before + (1 - _MEMORY) * rate
        if rate == 1:
            self._solved[request.task][request.init_state] = 0
        else:
            self._solved[request.task].pop(request.init_state, None)

    def next_task(self, tasks: Sequence[str]) -> str:
        """The task with the fewest groups relative to its weight, counted over all iterations."""
        task = min(tasks, key=lambda name: self._requested[name])
        self._requested[task] += 1 / self._weight(task)
        return task

    def _weight(self, task: str) -> float:
        """1 for a task that is solved half the time, `curriculum_floor` for one that is always or never solved."""
        rate, floor = self._rates.get(task, 0.5), self._settings.curriculum_floor
        return floor + (1 - floor) * 4 * rate * (1 - rate)

    @property
    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs to request the same groups, as JSON."""
        return {
            "tickets": self._tickets,
            "rounds": self._rounds,
            "tasks": self._tasks.cursor,
            "states": {task: ring.cursor for task, ring in self._states.items()},
            "solved": {task: sorted(solved.items()) for task, solved in self._solved.items()},
            "rates": dict(self._rates),
            "requested": dict(self._requested),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._tickets = state["tickets"]
        self._rounds = state["rounds"]
        self._tasks.cursor = state["tasks"]
        for task, cursor in state["states"].items():
            self._states[task].cursor = cursor
        self._solved = {task: dict(map(tuple, solved)) for task, solved in state["solved"].items()}
        self._rates = dict(state["rates"])
        self._requested = dict(state["requested"])

    def _next_state(self, task: str) -> int:
        """The next state of the ring. A solved one is skipped `skip_solved` times before it is played again."""
        ring, solved = self._states[task], self._solved[task]
        for _ in range(len(ring)):
            (state,) = ring.take(1)
            if state not in solved or solved[state] >= self._settings.skip_solved:
                return state
            solved[state] += 1
        return ring.take(1)[0]


class Round:
    """One iteration: requests waves of groups until `groups` of them are accepted."""

    def __init__(self, sampler: Sampler, tasks: Sequence[str], groups: int, settings: config.Sampling) -> None:
        self._sampler = sampler
        self._tasks = tasks
        self._groups = groups
        self._settings = settings
        self._waves = 0
        self.accepted: list[Group] = []
        self.surplus: list[Group] = []
        self.played: list[Group] = []
        self.times: Mapping[str, float] = {}

    @property
    def missing(self) -> int:
        return self._groups - len(self.accepted)

    def wave(self) -> list[RolloutRequest]:
        if not self.missing or self._waves == self._settings.waves:
            return []
        self._waves += 1
        count = math.ceil(self.missing * self._settings.oversample)
        return [self._sampler.request(self._sampler.next_task(self._tasks)) for _ in range(count)]

    def take(self, groups: Sequence[Group]) -> None:
        """Add the groups of a wave, in the order of its requests."""
        for group in groups:
            valid = all(episode.valid for episode in group)
            if valid:
                self._sampler.observe(group)
            keeps = valid and self._keeps(group)
            accepts = keeps and self.missing > 0
            played = group if accepts else _outcomes(group)
            self.played.append(played)
            if keeps:
                (self.accepted if accepts else self.surplus).append(played)

    def by_rank(self, ranks: int) -> list[list[Group]]:
        """What each rank learns from: consecutive parts of the accepted groups, as even as possible."""
        bounds = [round(rank * len(self.accepted) / ranks) for rank in range(ranks + 1)]
        return [self.accepted[start:end] for start, end in pairwise(bounds)]

    def _keeps(self, group: Group) -> bool:
        return self._settings.min_success_rate <= success_rate(group) <= self._settings.max_success_rate


def success_rate(group: Group) -> float:
    return sum(episode.success for episode in group) / len(group)


def _outcomes(group: Group) -> Group:
    """A group that is counted and not learned from: what it saw may be gigabytes.

    Arrays are copied: those of a Ray worker are views of one object, which each of them would hold in the store.
    """
    return [
        replace(
            episode,
            observations={},
            final={},
            latents={},
            actions=episode.actions.copy(),
            executed=episode.executed.copy(),
            log_probs=episode.log_probs.copy(),
        )
        for episode in group
    ]
