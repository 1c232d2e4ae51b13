"""The simulators of a process: a fleet for every request that is being played, kept for the next one of its task."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from concurrent.futures import Executor

from nightshift import config, envs
from nightshift.envs.base import Fleet, SharingFleet
from nightshift.errors import SimulatorError
from nightshift.rollouts.base import MakeFleet
from nightshift.types import Task


class Fleets:
    """The first fleet of a task compiles its model, which takes seconds; its siblings share it."""

    def __init__(self, env: config.Env, make_fleet: MakeFleet, threads: Executor | None) -> None:
        """`threads`: those that simulate, where they are several."""
        self._env = env
        self._threads = threads
        self._make_fleet = make_fleet
        self._tasks: dict[str, Task] = {task.name: task for task in envs.tasks(env)}
        self._first: dict[str, Fleet] = {}
        self._idle: defaultdict[str, list[Fleet]] = defaultdict(list)
        self._all: list[Fleet] = []

    def take(self, task: str) -> Fleet:
        """A fleet for one request, to be given back or discarded after it."""
        if task not in self._tasks:
            raise SimulatorError(
                f"no task {task!r} here; there are {', '.join(self._tasks)}", "edit env.tasks in params.yaml"
            )
        if self._idle[task]:
            return self._idle[task].pop()
        if task in self._first:
            fleet = self._first[task].sibling()
        else:
            fleet = self._first[task] = self._make_fleet(self._tasks[task], self._env)
            if self._threads is not None and isinstance(fleet, SharingFleet):
                fleet.share(self._threads)
        self._all.append(fleet)
        return fleet

    def give_back(self, fleet: Fleet) -> None:
        self._idle[fleet.task.name].append(fleet)

    def discard(self, fleet: Fleet) -> None:
        """Never use this fleet again, nor its model if it was the first: something in it failed.

        It is closed with all the others, since siblings that are being played share its model and its GL context.
        """
        if self._first.get(fleet.task.name) is fleet:
            del self._first[fleet.task.name]

    def close(self) -> None:
        for fleet in reversed(self._all):  # a sibling before the fleet that it shares the model of
            with contextlib.suppress(Exception):  # simulators raise anything
                fleet.close()
        self._all.clear()
        self._first.clear()
        self._idle.clear()
