"""Experience for off-policy learning: episodes on disk, in rounds that are ordered together with the policy that plays.

Episodes have tickets: 0, 1, 2, … A round is the next few of them. Rounds are ordered ahead of the one that is learned
from by `staleness`, so they can be played while the learner updates:

    staleness 0   order 0 ─ play 0 ─ update 0 ─ order 1 ─ play 1 ─ update 1
    staleness 1   order 0, 1 ─ play 0 ─┬ update 0 ─ order 2 ─┬ update 1 ─ order 3
                                       └ play 1 ─────────────┴ play 2

Which policy plays a ticket depends on the number of its round alone, and not on how fast anything is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from nightshift.data.episode import Episode
from nightshift.errors import ConfigError, RolloutError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.telemetry import experience as names
from nightshift.types import Controller

SOURCE = "source"
"""Key in the state of a source: the setting that it comes from."""
_ORDERED = "ordered."
"""Prefix of the tensors in a checkpoint that are policies of rounds that were ordered ahead."""
_LOST_ROUNDS = 10


class ExperienceEpisode(Protocol):
    """An episode on disk; its file is mapped only while the loaded episode is in use."""

    @property
    def transitions(self) -> int: ...

    def load(self, *, verify: bool = True) -> Episode: ...


@dataclass(frozen=True, kw_only=True)
class Order:
    """A round of episodes to play, and the policy that plays them."""

    tickets: Sequence[int]
    controller: Controller
    policy: PolicySnapshot
    ordered_at: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What was played of an order."""

    episodes: Sequence[ExperienceEpisode]
    """In the order of tickets, without those that the simulator failed in."""
    invalid: int
    """Episodes that the simulator failed in, also in rounds that were passed over because it failed in all of them."""
    weight_age: int
    """Versions by which the policy that played is behind the newest one."""
    weight_age_seconds: float
    """Since the order with the weights that played."""


class Experience(ABC):
    """Where episodes come from."""

    source: ClassVar[str]
    """The setting that chooses this source."""

    def __init__(self, *, at_once: int, staleness: int) -> None:
        """`at_once` episodes per round; `staleness` rounds are ordered ahead."""
        self._at_once = at_once
        self._staleness = staleness
        self._orders: deque[Order] = deque()
        self._collected = 0

    def play(self, policy: PolicySnapshot, controller: Controller) -> Round:
        """Order rounds with this policy until `staleness` of them are ahead, and return the oldest round.

        `controller` is "sample" or "random".
        """
        invalid = 0
        for _ in range(_LOST_ROUNDS):
            while len(self._orders) <= self._staleness:
                self._orders.append(Order(tickets=self._next_tickets(), controller=controller, policy=policy))
            self._announce()
            order = self._orders[0]
            episodes = self._collect(order)
            self._orders.popleft()
            self._collected += len(order.tickets)
            invalid += len(order.tickets) - len(episodes)
            if episodes:
                return Round(
                    episodes=episodes,
                    invalid=invalid,
                    weight_age=policy.version - order.policy.version,
                    weight_age_seconds=time.monotonic() - order.ordered_at,
                )
        raise RolloutError(
            f"the simulator failed in every episode of {_LOST_ROUNDS} rounds in a row", "see the warnings above"
        )

    def episodes(self) -> Sequence[ExperienceEpisode]:
        """Those of all rounds that `play` has returned, in order."""
        return self._stored(range(self._collected))

    @property
    def state(self) -> dict[str, Any]:
        """JSON from which `restore` continues, together with `tensors` and the episodes that were on disk then."""
        ordered = [
            {"controller": one.controller, "spec": dict(one.policy.spec), "version": one.policy.version}
            for one in self._orders
        ]
        return {"collected": self._collected, "ordered": ordered, SOURCE: self.source}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The policies of the rounds that are ordered ahead, for a checkpoint."""
        return {
            f"{_ORDERED}{index}.{name}": tensor
            for index, order in enumerate(self._orders)
            for name, tensor in order.policy.tensors().items()
        }

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue with what `state` and `tensors` were; other tensors of the checkpoint are left alone."""
        if state[SOURCE] != self.source:  # they keep their episodes in different places
            raise ConfigError(
                f"this training began with {state[SOURCE]}, and params.yaml now has {self.source}",
                f"set {state[SOURCE]} in params.yaml and run again: it resumes",
            )
        self._collected = state["collected"]
        self._orders.clear()
        for index, one in enumerate(state["ordered"]):
            prefix = f"{_ORDERED}{index}."
            weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            policy = PolicySnapshot.of(one["spec"], weights, one["version"])
            self._orders.append(Order(tickets=self._next_tickets(), controller=one["controller"], policy=policy))

    def metrics(self) -> dict[str, float]:
        return {names.ORDERED: float(sum(len(order.tickets) for order in self._orders))}

    def _next_tickets(self) -> range:
        first = self._collected + len(self._orders) * self._at_once
        return range(first, first + self._at_once)

    @abstractmethod
    def _announce(self) -> None:
        """Called when all rounds are ordered that may be played by now."""

    @abstractmethod
    def _collect(self, order: Order) -> Sequence[ExperienceEpisode]:
        """The valid episodes of an order, when all of it has been played."""

    @abstractmethod
    def _stored(self, tickets: range) -> Sequence[ExperienceEpisode]:
        """The valid episodes of tickets that have been collected."""


def without_ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that are not those of an `Experience`."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_ORDERED)}
