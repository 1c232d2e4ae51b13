"""Experience for off-policy learning: episodes from training states, each by the newest policy.

Episodes have tickets: 0, 1, 2, … What an episode is played from depends on its ticket and the seed alone, so it does
not matter which process plays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.experience import SOURCE, check_source, first_valid
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rewards.reward import SIMULATOR, Reward
from nightshift.rollouts.base import Pool
from nightshift.types import Controller, RolloutRequest, Task, Trajectory

_SEED_DOMAIN = 2
"""Separates this random order of states from those of demos and of groups."""


class Experience(Protocol):
    """Where episodes come from."""

    def play(self, policy: PolicySnapshot, controller: Controller) -> list[Episode]:
        """The next episodes, on disk; `controller` is "sample" or "random"."""
        ...

    def played(self) -> Iterator[Episode]:
        """All episodes so far, in order."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """JSON from which `restore` continues, with the episodes that were on disk then."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Tickets:
    """Tasks take turns, and so do the init states of a task, in random order."""

    def __init__(self, states: Mapping[Task, Sequence[int]], *, seed: int, reward: Reward = SIMULATOR) -> None:
        """`states`: those of every task that may be learned from; `reward` says what it needs to see."""
        self._states = [(task.name, _shuffled(task, chosen, seed)) for task, chosen in states.items()]
        self._seed = seed
        self._reward = reward

    def request(self, ticket: int, controller: Controller) -> RolloutRequest:
        turn, index = divmod(ticket, len(self._states))
        task, states = self._states[index]
        request = RolloutRequest(
            task=task,
            split="train",
            init_state=states[turn % len(states)],
            controller=controller,
            seed=int(np.random.SeedSequence([self._seed, _SEED_DOMAIN, ticket]).generate_state(1)[0]),
        )
        return self._reward.request(request)


def play_tickets(
    pool: Pool, tickets: Tickets, numbers: Sequence[int], policy: PolicySnapshot, controller: Controller
) -> list[Trajectory]:
    """In the order of `numbers`; some may be invalid."""
    requests = [tickets.request(number, controller) for number in numbers]
    results = {index: trajectory for index, (trajectory,) in pool.run(requests, policy)}
    return [results[index] for index in range(len(requests))]


class LocalExperience:
    """Plays with a pool of this process."""

    def __init__(
        self,
        pool: Pool,
        tickets: Tickets,
        store: EpisodeStore,
        to_episode: Callable[[Trajectory], Episode],
        *,
        at_once: int,
    ) -> None:
        """`at_once` episodes per call of `play`."""
        self._pool = pool
        self._tickets = tickets
        self._store = store
        self._to_episode = to_episode
        self._at_once = at_once
        self._requested = 0

    def play(self, policy: PolicySnapshot, controller: Controller) -> list[Episode]:
        """Those that the simulator failed in are left out."""
        return first_valid(lambda: self._round(policy, controller))

    def _round(self, policy: PolicySnapshot, controller: Controller) -> list[Episode]:
        """A run that was killed after its checkpoint has stored some of these episodes before."""
        numbers = range(self._requested, self._requested + self._at_once)
        missing = [number for number in numbers if _key(number) not in self._store]
        played = play_tickets(self._pool, self._tickets, missing, policy, controller) if missing else []
        for number, trajectory in zip(missing, played, strict=True):
            if trajectory.valid:
                self._store.put(_key(number), self._to_episode(trajectory))
        self._requested = numbers.stop
        return [self._store.get(_key(number)) for number in numbers if _key(number) in self._store]

    def played(self) -> Iterator[Episode]:
        return (self._store.get(key) for key in self._store.keys() if int(key) < self._requested)  # noqa: SIM118

    @property
    def state(self) -> dict[str, Any]:
        return {"requested": self._requested, SOURCE: "machine.actors: 0"}

    def restore(self, state: Mapping[str, Any]) -> None:
        check_source(state, self.state)
        self._requested = state["requested"]

    def metrics(self) -> dict[str, float]:
        return {}


def _key(number: int) -> str:
    return f"{number:08d}"


def _shuffled(task: Task, states: Sequence[int], seed: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, task.index, _SEED_DOMAIN]).permutation(states).tolist()
    return order
