"""Which groups an iteration learns from: asked for in waves until there are enough that can teach.

    Sampler                    what lasts: cursors, which states are solved, how well each task goes
      └─ begin() ─▶ Round      one iteration
                     wave()    requests for what is still missing; none when done or out of waves
                     take()    their groups, in the order asked for: kept, or filtered and replaced

Nothing here depends on who is done first, so the same episodes give the same iteration on any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from nightshift import config, envs
from nightshift.rollouts.schedule import Ring
from nightshift.types import RolloutRequest, Task, Trajectory

Group = list[Trajectory]

_STREAM = 1
"""Tells the order of states here from the one demos are collected in: starting on the demos' states would flatter."""
_MEMORY = 0.8
"""How much of a task's success rate is memory, and not its last group."""
_LEAST_CHANCE = 0.1
"""A task that is solved, or hopeless, still gets this part of what one half solved gets: it may change."""


class Sampler:
    def __init__(self, tasks: Sequence[Task], settings: config.Rloo, *, seed: int) -> None:
        self._settings = settings.sampling
        self._group_size = settings.group_size
        self._groups = settings.groups
        self._temperature = settings.temperature
        self._seed = seed
        self._ranks = [Ring([task.name for task in tasks])]
        self._states = {task.name: Ring(_order(task, seed)) for task in tasks}
        self._solved: dict[str, dict[int, int]] = {task.name: {} for task in tasks}
        self._rates: dict[str, float] = {}
        self._asked: dict[str, float] = {task.name: 0.0 for task in tasks}
        self._tickets = 0

    def begin(self) -> Round:
        """An iteration: every rank turns to its next tasks."""
        at_once = self._settings.tasks_at_once
        chosen = [name for ring in self._ranks if len(ring) for name in ring.take(min(at_once or len(ring), len(ring)))]
        return Round(self, chosen, self._groups, self._settings)

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
            temperature=self._temperature,
        )

    def observe(self, group: Group) -> None:
        """Remember how a group went."""
        request, rate = group[0].request, success_rate(group)
        before = self._rates.get(request.task, rate)
        self._rates[request.task] = _MEMORY * before + (1 - _MEMORY) * rate
        if rate == 1:
            self._solved[request.task][request.init_state] = 0
        else:
            self._solved[request.task].pop(request.init_state, None)

    def next_task(self, tasks: Sequence[str]) -> str:
        """Whose turn it is: in turn, also from iteration to iteration; a curriculum makes the turns of tasks that can
        still teach shorter."""
        task = min(tasks, key=lambda name: self._asked[name])
        self._asked[task] += 1 / self._weight(task)
        return task

    def _weight(self, task: str) -> float:
        """How much a task can still teach: all the same without a curriculum."""
        if not self._settings.curriculum:
            return 1.0
        rate = self._rates.get(task, 0.5)
        return _LEAST_CHANCE + (1 - _LEAST_CHANCE) * 4 * rate * (1 - rate)

    @property
    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs to ask for the same groups, as JSON."""
        return {
            "tickets": self._tickets,
            "ranks": [ring.cursor for ring in self._ranks],
            "states": {task: ring.cursor for task, ring in self._states.items()},
            "solved": {task: sorted(solved.items()) for task, solved in self._solved.items()},
            "rates": dict(self._rates),
            "asked": dict(self._asked),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._tickets = state["tickets"]
        for ring, cursor in zip(self._ranks, state["ranks"], strict=True):
            ring.cursor = cursor
        for task, cursor in state["states"].items():
            self._states[task].cursor = cursor
        self._solved = {task: dict(map(tuple, solved)) for task, solved in state["solved"].items()}
        self._rates = dict(state["rates"])
        self._asked = dict(state["asked"])

    def _next_state(self, task: str) -> int:
        """The next in the ring; one that is solved is passed over until it has come up often enough to look again."""
        ring, solved = self._states[task], self._solved[task]
        for _ in range(len(ring)):
            (state,) = ring.take(1)
            if state not in solved or solved[state] >= self._settings.skip_solved:
                return state
            solved[state] += 1
        return ring.take(1)[0]


class Round:
    """One iteration's search for exactly `groups` groups that may be learned from."""

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
        """The groups of a wave, in the order they were asked for."""
        for group in groups:
            self.played.append(group)
            if not all(episode.valid for episode in group):
                continue
            self._sampler.observe(group)
            if self._keeps(group):
                (self.accepted if self.missing else self.surplus).append(group)

    def by_rank(self, ranks: int) -> list[list[Group]]:
        """What each rank learns from: its run of the groups in the order they were asked for, so that the update does
        not depend on how many ranks there are."""
        bounds = [round(rank * len(self.accepted) / ranks) for rank in range(ranks + 1)]
        return [self.accepted[start:end] for start, end in pairwise(bounds)]

    def _keeps(self, group: Group) -> bool:
        return self._settings.min_success_rate <= success_rate(group) <= self._settings.max_success_rate


def success_rate(group: Group) -> float:
    return sum(episode.success for episode in group) / len(group)


def _order(task: Task, seed: int) -> list[int]:
    count = envs.init_state_count(task, "train")
    order: list[int] = np.random.default_rng([seed, task.index, _STREAM]).permutation(count).tolist()
    return order
