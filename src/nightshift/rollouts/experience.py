"""Experience that is played with the pool of this process.

What an episode is played from depends on its ticket and the seed alone, so it does not matter which process plays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.experience import Experience, Order
from nightshift.rewards.reward import SIMULATOR, Reward
from nightshift.rollouts.base import Pool
from nightshift.rollouts.schedule import shuffled
from nightshift.types import Controller, InterventionSettings, RolloutRequest, Task, Trajectory

_SEED_DOMAIN = 2
"""Separates this random order of states from those of demos and of groups."""


class Tickets:
    """Tasks take turns, and so do the init states of a task, in random order."""

    def __init__(
        self,
        states: Mapping[Task, Sequence[int]],
        *,
        seed: int,
        reward: Reward = SIMULATOR,
        interventions: InterventionSettings | None = None,
    ) -> None:
        """`states`: those of every task that may be learned from; `reward` says what it needs to see;
        `interventions`: who may take over."""
        self._states = [
            (task.name, shuffled(task, chosen, seed=seed, domain=_SEED_DOMAIN)) for task, chosen in states.items()
        ]
        self._seed = seed
        self._reward = reward
        self._interventions = interventions

    def request(self, ticket: int, controller: Controller) -> RolloutRequest:
        turn, index = divmod(ticket, len(self._states))
        task, states = self._states[index]
        request = RolloutRequest(
            task=task,
            split="train",
            init_state=states[turn % len(states)],
            controller=controller,
            seed=int(np.random.SeedSequence([self._seed, _SEED_DOMAIN, ticket]).generate_state(1)[0]),
            interventions=self._interventions,
        )
        return self._reward.request(request)


def play_tickets(pool: Pool, tickets: Tickets, chosen: Sequence[int], order: Order) -> Iterator[tuple[int, Trajectory]]:
    """Some tickets of an order with their episodes as they finish, in any order; some may be invalid."""
    requests = [tickets.request(ticket, order.controller) for ticket in chosen]
    for index, (trajectory,) in pool.run(requests, order.policy) if requests else ():
        yield chosen[index], trajectory


@dataclass(frozen=True)
class LocalEpisode:
    """An episode of a store."""

    path: Path

    @cached_property
    def transitions(self) -> int:
        return self.load().length - 1

    def load(self, *, verify: bool = True) -> Episode:
        """`verify` has no effect: the file has no checksum."""
        return episodes.load(self.path)


class LocalExperience(Experience):
    """Plays a round when it is collected: the same episodes as those of actors, without the overlap."""

    source = "machine.actors: 0"

    def __init__(
        self,
        pool: Pool,
        tickets: Tickets,
        store: EpisodeStore,
        to_episode: Callable[[Trajectory], Episode],
        *,
        at_once: int,
        staleness: int,
    ) -> None:
        super().__init__(at_once=at_once, staleness=staleness)
        self._pool = pool
        self._tickets = tickets
        self._store = store
        self._to_episode = to_episode

    def _announce(self) -> None:
        """Nothing is played before it is collected."""

    def _collect(self, order: Order) -> list[LocalEpisode]:
        """A run that was killed after its checkpoint has stored some of these episodes before."""
        missing = [ticket for ticket in order.tickets if _key(ticket) not in self._store]
        for ticket, trajectory in play_tickets(self._pool, self._tickets, missing, order):
            if trajectory.valid:
                self._store.put(_key(ticket), self._to_episode(trajectory))
        return [LocalEpisode(self._store.path(_key(t))) for t in order.tickets if _key(t) in self._store]

    def _stored(self, tickets: range) -> list[LocalEpisode]:
        return [LocalEpisode(self._store.path(key)) for key in self._store.keys() if int(key) < tickets.stop]  # noqa: SIM118


def _key(ticket: int) -> str:
    return f"{ticket:08d}"
