"""Experience from actors in other processes: the learner orders episodes together with the weights that play them.

An order is a range of tickets. Actors share its tickets among themselves, play them, and send each episode with its
ticket. The learner waits for all of them and takes each ticket once, so an actor that was killed and plays an order
again changes nothing, and neither does the number of actors: learning is the same as with one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nightshift.data.episode import Episode
from nightshift.data.experience import SOURCE, check_source, first_valid
from nightshift.data.tensors import Column
from nightshift.errors import StreamError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.stream.inbox import Inbox, StoredEpisode
from nightshift.stream.link import LearnerEndpoint
from nightshift.stream.weights import Weights
from nightshift.types import Controller

_ORDER = "order"
"""The array among the weights that has the order as JSON."""
_TICKET, _LOST = "ticket", "lost"
"""In the metadata of an episode."""
_CHECK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """Episodes to play, and the policy that plays them; none of both when learning is over."""

    tickets: range
    controller: Controller
    policy: PolicySnapshot | None

    def to_arrays(self) -> dict[str, Column]:
        """As the weights that a learner publishes."""
        policy = self.policy
        content: dict[str, Any] = {"tickets": [self.tickets.start, self.tickets.stop], "controller": self.controller}
        if policy is not None:
            dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in policy.dtypes.items()}
            content |= {"spec": dict(policy.spec), "version": policy.version, "dtypes": dtypes}
        weights = {f"weights.{name}": values for name, values in (policy.weights if policy else {}).items()}
        return {**weights, _ORDER: np.frombuffer(json.dumps(content).encode(), np.uint8)}

    @classmethod
    def from_weights(cls, weights: Weights) -> Order:
        arrays = weights.arrays()
        content = json.loads(arrays.pop(_ORDER).tobytes())
        policy = None
        if "spec" in content:
            policy = PolicySnapshot(
                spec=content["spec"],
                weights={name.removeprefix("weights."): values for name, values in arrays.items()},
                dtypes={name: getattr(torch, dtype) for name, dtype in content["dtypes"].items()},
                version=content["version"],
            )
        return cls(tickets=range(*content["tickets"]), controller=content["controller"], policy=policy)


def with_ticket(episode: Episode, ticket: int, *, lost: bool = False) -> Episode:
    """`lost`: the simulator failed, and the episode says so in the place of the one that was ordered."""
    return replace(episode, metadata={**episode.metadata, _TICKET: ticket, _LOST: lost})


class StreamedExperience:
    """Example: StreamedExperience(LearnerEndpoint(inbox, publisher), at_once=8).play(policy, "sample")"""

    def __init__(
        self, endpoint: LearnerEndpoint, *, at_once: int, check_actors: Callable[[], None] = lambda: None
    ) -> None:
        """`at_once` episodes per call of `play`; `check_actors` is called every second while they are waited for."""
        self._inbox: Inbox = endpoint.inbox
        self._publisher = endpoint.publisher
        self._at_once = at_once
        self._check_actors = check_actors
        self._position = 0
        self._arrived: dict[int, StoredEpisode] = {}
        self._requested = 0

    def play(self, policy: PolicySnapshot, controller: Controller) -> list[Episode]:
        """The next episodes, in the order of their tickets; those that a simulator failed in are left out."""
        return first_valid(lambda: self._round(policy, controller))

    def _round(self, policy: PolicySnapshot, controller: Controller) -> list[Episode]:
        tickets = range(self._requested, self._requested + self._at_once)
        self._take_arrived()
        if not self._has_all(tickets):
            self._publisher.publish(Order(tickets=tickets, controller=controller, policy=policy).to_arrays())
        while not self._has_all(tickets):
            if not self._inbox.wait_for_episode(self._position, _CHECK_SECONDS):
                self._check_actors()
            self._take_arrived()
        self._requested = tickets.stop
        return list(self._episodes(tickets))

    def played(self) -> Iterator[Episode]:
        self._take_arrived()
        return self._episodes(range(self._requested))

    def end(self) -> None:
        """Tell the actors that learning is over."""
        empty = range(self._requested, self._requested)
        self._publisher.publish(Order(tickets=empty, controller="sample", policy=None).to_arrays())

    @property
    def state(self) -> dict[str, Any]:
        return {"requested": self._requested, SOURCE: "machine.actors above 0"}

    def restore(self, state: Mapping[str, Any]) -> None:
        check_source(state, self.state)
        self._requested = state["requested"]

    def metrics(self) -> dict[str, float]:
        return {**self._inbox.metrics(), "stream/version": float(self._publisher.version)}

    def _take_arrived(self) -> None:
        for stored in self._inbox.stored_after(self._position):
            ticket = stored.load(verify=False).metadata.get(_TICKET)
            if not isinstance(ticket, int):
                raise StreamError(f"{stored.path} has no ticket", "remove it: this learner did not order it")
            self._arrived.setdefault(ticket, stored)
            self._position = stored.position

    def _has_all(self, tickets: range) -> bool:
        return all(ticket in self._arrived for ticket in tickets)

    def _episodes(self, tickets: range) -> Iterator[Episode]:
        loaded = (self._arrived[ticket].load() for ticket in tickets)
        return (episode for episode in loaded if not episode.metadata[_LOST])
