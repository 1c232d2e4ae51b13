"""Experience for off-policy learning: episodes from training states, each by the newest policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.errors import RolloutError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import Pool
from nightshift.rollouts.schedule import Ring
from nightshift.types import Controller, RolloutRequest, Task, Trajectory

_STREAM = 2
"""Separates this random order of states from those of demos and of groups."""


class Experience(Protocol):
    """Where episodes come from."""

    def play(self, policy: PolicySnapshot, controller: Controller) -> list[Episode]:
        """The next episodes, on disk; `controller` is "sample" or "random"."""
        ...

    def played(self) -> Iterable[Episode]:
        """All episodes so far, in order."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """JSON from which `restore` continues, with the episodes that were on disk then."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def restart(self) -> None:
        """Begin from nothing, also after a run that was killed before its first checkpoint."""
        ...


class LocalExperience:
    """Plays with a pool of this process. Which episode comes next depends on the seed and the number of episodes before
    it alone; tasks take turns, and the states of a task do, in random order."""

    def __init__(
        self,
        pool: Pool,
        states: Mapping[Task, Sequence[int]],
        store: EpisodeStore,
        to_episode: Callable[[Trajectory], Episode],
        *,
        at_once: int,
        seed: int,
    ) -> None:
        """`states`: the init states of every task that may be learned from. `at_once` episodes per call of `play`."""
        self._pool = pool
        self._store = store
        self._to_episode = to_episode
        self._at_once = at_once
        self._seed = seed
        self._tasks = Ring([task.name for task in states])
        self._states = {task.name: Ring(_shuffled(task, chosen, seed)) for task, chosen in states.items()}
        self._requested = self._stored = 0

    def play(self, policy: PolicySnapshot, controller: Controller) -> list[Episode]:
        """Those that the simulator failed in are left out."""
        requests = [self._request(controller) for _ in range(self._at_once)]
        results = {index: trajectory for index, (trajectory,) in self._pool.run(requests, policy)}
        played = [results[index] for index in range(len(requests)) if results[index].valid]
        if not played:
            raise RolloutError("the simulator failed in every episode of a round", "run again: it resumes")
        return [self._put(trajectory) for trajectory in played]

    def played(self) -> Iterator[Episode]:
        return (self._store.get(_key(number)) for number in range(self._stored))

    @property
    def state(self) -> dict[str, Any]:
        cursors = {task: ring.cursor for task, ring in self._states.items()}
        return {"requested": self._requested, "stored": self._stored, "tasks": self._tasks.cursor, "states": cursors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Episodes that were stored after that state are removed: they will be played again, the same."""
        self._requested, self._stored = state["requested"], state["stored"]
        self._tasks.cursor = state["tasks"]
        for task, cursor in state["states"].items():
            self._states[task].cursor = cursor
        self._remove_later()

    def restart(self) -> None:
        self._remove_later()

    def _remove_later(self) -> None:
        later = [key for key in self._store.keys() if int(key) >= self._stored]  # noqa: SIM118 - a store is no dict
        for key in later:
            self._store.path(key).unlink()

    def _request(self, controller: Controller) -> RolloutRequest:
        (task,) = self._tasks.take(1)
        (state,) = self._states[task].take(1)
        ticket = self._requested
        self._requested += 1
        seed = int(np.random.SeedSequence([self._seed, _STREAM, ticket]).generate_state(1)[0])
        return RolloutRequest(task=task, split="train", init_state=state, controller=controller, seed=seed)

    def _put(self, trajectory: Trajectory) -> Episode:
        key = _key(self._stored)
        self._store.put(key, self._to_episode(trajectory))
        self._stored += 1
        return self._store.get(key)


def _key(number: int) -> str:
    return f"{number:08d}"


def _shuffled(task: Task, states: Sequence[int], seed: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, task.index, _STREAM]).permutation(states).tolist()
    return order
