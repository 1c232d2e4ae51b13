"""Which task and init state each group of an iteration plays: a function of the iteration alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nightshift import envs
from nightshift.types import RolloutRequest, Task

_STREAM = 1
"""Tells the order of states here from the one demos are collected in: starting on the demos' states would flatter."""


class Schedule:
    """Tasks take turns; every task walks through its training states in a random order of its own, round and round."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, group_size: int, temperature: float) -> None:
        self._tasks = tasks
        self._seed = seed
        self._group_size = group_size
        self._temperature = temperature
        self._orders = {
            task.name: np.random.default_rng([seed, task.index, _STREAM]).permutation(
                envs.init_state_count(task, "train")
            )
            for task in tasks
        }

    def requests(self, iteration: int, groups: int) -> list[RolloutRequest]:
        """The groups of one iteration; position alone decides, so a resumed run asks for the same ones."""
        return [self._request(iteration * groups + position) for position in range(groups)]

    def _request(self, ticket: int) -> RolloutRequest:
        turn, task_index = divmod(ticket, len(self._tasks))
        task = self._tasks[task_index]
        order = self._orders[task.name]
        return RolloutRequest(
            task=task.name,
            split="train",
            init_state=int(order[turn % len(order)]),
            controller="sample",
            seed=int(np.random.SeedSequence([self._seed, ticket]).generate_state(1)[0]),
            count=self._group_size,
            temperature=self._temperature,
        )
