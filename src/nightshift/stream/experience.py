"""Experience from actors in other processes: the learner orders episodes together with the weights that play them.

An order has tickets. Each is assigned to one of the actors that are there (`roster`), which plays it and sends the
episode with its ticket. A ticket of an actor that has gone is assigned to another. The learner waits for all tickets
and takes each once, so an actor that was killed and plays an order again changes nothing, and neither does the number
of actors: learning is the same as with one process.

All orders that are open are published together, so an actor that is slow or was restarted misses none. Actors play
nothing that was not ordered: a learner that stands still holds them back after `staleness` rounds.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nightshift.data.episode import Episode
from nightshift.data.experience import Experience, Order
from nightshift.data.tensors import Column
from nightshift.errors import DataError, StreamError
from nightshift.policies.arrays import BFLOAT16
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.stream.inbox import Inbox, StoredEpisode
from nightshift.stream.link import LearnerEndpoint
from nightshift.stream.roster import ABSENT_SECONDS
from nightshift.stream.spool import SPOOLED
from nightshift.stream.weights import Weights
from nightshift.telemetry import experience as names

_ORDERS = "orders"
"""The array among the weights that has the orders as JSON."""
_IN_BFLOAT16 = "bfloat16"
"""In that JSON: the weights whose arrays hold the bits of a bfloat16, which files of arrays do not have."""
_TICKET, _LOST, _COUNTERS = "ticket", "lost", "counters"
"""In the metadata of an episode."""
_CHECK_SECONDS = 1.0
_Received = tuple[StoredEpisode, bool]
"""An episode, and whether the simulator failed in it."""

_log = logging.getLogger(__name__)


def orders_to_arrays(orders: Sequence[Order], assigned: Mapping[int, str], job: Mapping[str, Any]) -> dict[str, Column]:
    """Open orders as the weights that a learner publishes; none of them tells actors that learning is over.

    `assigned`: the actor of each ticket. `job`: JSON that an actor on another machine needs besides.
    """
    policies = {order.policy.version: order.policy for order in orders}
    content = {
        "job": dict(job),
        "assigned": {str(ticket): actor for ticket, actor in assigned.items()},
        "orders": [
            {"tickets": list(order.tickets), "controller": order.controller, "version": order.policy.version}
            for order in orders
        ],
        "policies": [_describe(policy) for policy in policies.values()],
    }
    weights = {
        _weight(version, name): values.view(np.int16) if values.dtype == BFLOAT16 else values
        for version, one in policies.items()
        for name, values in one.weights.items()
    }
    return {**weights, _ORDERS: np.frombuffer(json.dumps(content).encode(), np.uint8)}


def orders_from_weights(weights: Weights) -> tuple[list[Order], dict[int, str]]:
    """The open orders, and the actor of each ticket that is assigned."""
    arrays = weights.arrays()
    content = _content(arrays)
    policies = {one["version"]: _policy(one, arrays) for one in content["policies"]}
    orders = [
        Order(tickets=one["tickets"], controller=one["controller"], policy=policies[one["version"]])
        for one in content["orders"]
    ]
    return orders, {int(ticket): actor for ticket, actor in content["assigned"].items()}


def job_from_weights(weights: Weights) -> dict[str, Any]:
    job: dict[str, Any] = _content(weights.arrays())["job"]
    return job


def _content(arrays: Mapping[str, Column]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(arrays[_ORDERS].tobytes())
    return content


def _describe(policy: PolicySnapshot) -> dict[str, Any]:
    """Everything but the weights, as JSON."""
    bfloat16 = [name for name, values in policy.weights.items() if values.dtype == BFLOAT16]
    return {"version": policy.version, "spec": dict(policy.spec), _IN_BFLOAT16: bfloat16}


def _policy(content: Mapping[str, Any], arrays: Mapping[str, Column]) -> PolicySnapshot:
    prefix = _weight(content["version"], "")
    weights = {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
    weights |= {name: weights[name].view(BFLOAT16) for name in content[_IN_BFLOAT16]}
    return PolicySnapshot(spec=content["spec"], weights=weights, version=content["version"])


def _weight(version: int, name: str) -> str:
    return f"{version}.{name}"


def with_ticket(
    episode: Episode, ticket: int, *, lost: bool = False, counters: Mapping[str, float] | None = None
) -> Episode:
    """`lost`: the simulator failed, and the episode says so in the place of the one that was ordered.

    `counters` of the actor's spool come to the learner in this way.
    """
    added = {_TICKET: ticket, _LOST: lost, _COUNTERS: dict(counters or {})}
    return replace(episode, metadata={**episode.metadata, **added})


class StreamedExperience(Experience):
    """Example: StreamedExperience(LearnerEndpoint(inbox, publisher), at_once=8, staleness=1).play(policy, "sample")"""

    source = "machine.actors above 0"

    def __init__(
        self,
        endpoint: LearnerEndpoint,
        *,
        at_once: int,
        staleness: int,
        job: Mapping[str, Any] | None = None,
        check_actors: Callable[[], None] = lambda: None,
    ) -> None:
        """`job`: what an actor on another machine must know; JSON.

        `check_actors` is called at least every second while episodes are waited for.
        """
        super().__init__(at_once=at_once, staleness=staleness)
        self._job = job or {}
        self._roster = endpoint.roster
        self._assigned: dict[int, str] = {}
        self._published: dict[int, str | None] = {}  # tickets and their actors
        self._inbox: Inbox = endpoint.inbox
        self._publisher = endpoint.publisher
        self._check_actors = check_actors
        self._position = 0
        self._by_ticket: dict[int, _Received] = {}
        self._counters: dict[str, Mapping[str, float]] = {}  # of every actor, with its newest episode

    def end(self, timeout: float = 0.0) -> None:
        """Tell the actors that learning is over, and wait until all have heard it."""
        version = self._publisher.publish(orders_to_arrays([], {}, self._job))
        self._roster.wait_until_all_have(version, timeout)

    def metrics(self) -> dict[str, float]:
        summed: Counter[str] = Counter()
        for counters in self._counters.values():
            summed.update(counters)
        present = self._roster.present()
        spooled = sum(counters.get(SPOOLED, 0.0) for actor, counters in self._counters.items() if actor in present)
        return {
            **self._inbox.metrics(),
            **{name: float(value) for name, value in summed.items() if name != SPOOLED},
            names.ORDERED: float(sum(len(self._missing(order.tickets)) for order in self._orders)),
            names.SPOOLED: float(spooled),
            names.RECEIVED: float(sum(ticket >= self._collected for ticket in self._by_ticket)),
            names.PUBLISHED_VERSION: float(self._publisher.version),
        }

    def _announce(self) -> None:
        """Publish what is missing of the open orders, if that or the actors that are to play it have changed."""
        self._receive()
        missing = [replace(order, tickets=self._missing(order.tickets)) for order in self._orders]
        tickets = [ticket for order in missing for ticket in order.tickets]
        self._assign(tickets)
        wanted = {ticket: self._assigned.get(ticket) for ticket in tickets}
        if not wanted.items() <= self._published.items():
            orders = [order for order in missing if order.tickets]
            self._publisher.publish(orders_to_arrays(orders, self._assigned, self._job))
            self._published = wanted

    def _assign(self, tickets: Sequence[int]) -> None:
        """Every ticket to an actor that is there: to the one that has it, else to one with the fewest tickets."""
        present = self._roster.present()
        kept = {ticket: self._assigned[ticket] for ticket in tickets if self._assigned.get(ticket) in present}
        if present:
            held = Counter(dict.fromkeys(present, 0))
            held.update(kept.values())
            for ticket in tickets:
                if ticket not in kept:
                    kept[ticket] = min(present, key=lambda actor: (held[actor], actor))
                    held[kept[ticket]] += 1
        self._assigned = kept

    def _collect(self, order: Order) -> list[StoredEpisode]:
        since, is_warned = time.monotonic(), False
        while self._missing(order.tickets):
            if not is_warned and time.monotonic() - since > ABSENT_SECONDS and not self._roster.present():
                _log.warning("no actor has connected for %.0f s: episodes are waited for", ABSENT_SECONDS)
                is_warned = True
            self._inbox.check()
            self._check_rejected()
            self._check_actors()
            self._announce()
            self._inbox.wait_for_episode(self._position, _CHECK_SECONDS)
            self._receive()
        return self._stored(order.tickets)

    def _stored(self, tickets: Iterable[int]) -> list[StoredEpisode]:
        self._receive()
        tickets = list(tickets)
        if missing := self._missing(tickets):
            raise DataError(
                f"the episodes of the tickets {', '.join(map(str, missing))} were learned from, and "
                f"{self._inbox.folder} has them no more",
                "bring their files back, or remove the folder of checkpoints and run again: they are played again",
            )
        received = (self._by_ticket[ticket] for ticket in tickets)
        return [episode for episode, is_lost in received if not is_lost]

    def _missing(self, tickets: Iterable[int]) -> list[int]:
        return [ticket for ticket in tickets if ticket not in self._by_ticket]

    def _receive(self) -> None:
        for stored in self._inbox.stored_after(self._position):
            metadata = stored.load(verify=False).metadata
            ticket = metadata.get(_TICKET)
            if not isinstance(ticket, int):
                raise StreamError(f"{stored.path} has no ticket", "remove it: this learner did not order it")
            self._by_ticket.setdefault(ticket, (stored, bool(metadata.get(_LOST))))
            self._counters[stored.header.episode_id.actor] = metadata.get(_COUNTERS, {})
            self._position = stored.position

    def _check_rejected(self) -> None:
        """An episode that is rejected would be waited for without end: its actor has sent it and goes on."""
        if self._inbox.last_rejection:
            raise StreamError(
                f"an episode of an actor was rejected: {self._inbox.last_rejection}",
                "its file is in the folder rejected of that actor; run again: its ticket is played again",
            )
