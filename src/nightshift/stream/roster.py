"""The actors of a learner, known by their requests: polls for weights go on while they play."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from nightshift.data.episode import NO_POLICY

ABSENT_SECONDS = 30.0
"""Without a request for so long an actor counts as gone; one that is started again is back sooner."""


@dataclass(frozen=True, slots=True)
class _Seen:
    until: float  # when the actor counts as gone
    version: int  # of the weights that it has


@dataclass(frozen=True, slots=True)
class _Transfer:
    actor: str
    until: float  # when it has taken too long


class Roster:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._transfers: dict[Hashable, _Transfer] = {}
        """By connection."""
        self._noted = threading.Condition()

    def note(self, actor: str, version: int) -> None:
        """An actor has polled, and has the weights of this version now."""
        with self._noted:
            self._seen[actor] = _Seen(self._clock() + ABSENT_SECONDS, version)
            self._transfers = {key: one for key, one in self._transfers.items() if one.actor != actor}
            self._noted.notify_all()

    def note_transfer(self, actor: str, seconds: float, connection: Hashable) -> None:
        """A frame from or to an actor has begun, which may take so long: meanwhile the actor cannot poll."""
        with self._noted:
            self._hear(actor)
            begun = self._transfers.get(connection)
            until = self._clock() + seconds + ABSENT_SECONDS
            self._transfers[connection] = _Transfer(actor, max(until, begun.until) if begun else until)

    def note_end(self, connection: Hashable) -> None:
        """A connection has ended, and its transfers with it."""
        with self._noted:
            if ended := self._transfers.pop(connection, None):
                self._hear(ended.actor)

    def present(self) -> list[str]:
        """The names of the actors with a request lately."""
        with self._noted:
            return self._present()

    def wait_until_all_have(self, version: int, timeout: float) -> bool:
        """Wait until the actors that are present have weights of this version; False after the timeout."""
        with self._noted:
            return self._noted.wait_for(
                lambda: all(self._seen[actor].version >= version for actor in self._present()), timeout
            )

    def _hear(self, actor: str) -> None:
        version = self._seen[actor].version if actor in self._seen else NO_POLICY
        self._seen[actor] = _Seen(self._clock() + ABSENT_SECONDS, version)

    def _present(self) -> list[str]:
        now = self._clock()
        polled = {actor for actor, seen in self._seen.items() if seen.until >= now}
        return sorted(polled | {transfer.actor for transfer in self._transfers.values() if transfer.until >= now})
