"""The interface between an actor and its learner, and the link for an actor and a learner in one process."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nightshift.closing import Closing
from nightshift.data.schema import Range
from nightshift.errors import NightshiftError, StreamError
from nightshift.stream.inbox import Inbox
from nightshift.stream.message import Ack, Message
from nightshift.stream.roster import Roster
from nightshift.stream.weights import WeightPublisher, Weights

INBOX_FOLDER = "inbox"
WEIGHTS_FOLDER = "weights"


class LinkDown(StreamError):
    """The learner cannot be reached or reports an error; the sender retries."""


class LearnerChanged(NightshiftError):
    """Another learner, or the same one started again, is at the address: it knows nothing of what was ordered."""


class Link(Protocol):
    """Not thread-safe. Every failure raises LinkDown, after which the link may be used again."""

    def send(self, messages: Iterable[Message]) -> Iterator[Ack]:
        """Send messages and yield one ack for each, in order."""
        ...

    def weights(self, newer_than: int) -> Weights | None:
        """The latest weights, or None if their version is not above `newer_than`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LearnerEndpoint(Closing):
    """What a learner offers to actors over any link: an inbox for episodes and a publisher of weights."""

    inbox: Inbox
    publisher: WeightPublisher
    roster: Roster = field(default_factory=Roster)
    incarnation: str = field(default_factory=secrets.token_hex)
    """Differs whenever the learner is started: an actor with orders of an earlier one must ask for its job again."""

    @classmethod
    def open(cls, folder: Path, *, run: str, ranges: Mapping[str, Range] | None = None) -> LearnerEndpoint:
        """The inbox and the weights in one folder, which holds all that a restarted learner needs of them."""
        return cls(Inbox(folder / INBOX_FOLDER, run=run, ranges=ranges), WeightPublisher(folder / WEIGHTS_FOLDER))

    def close(self) -> None:
        self.inbox.close()
        self.publisher.close()


class LocalLink:
    """Connects an actor and a learner in one process."""

    def __init__(self, endpoint: LearnerEndpoint, *, actor: str = "") -> None:
        """`actor`: its name, for a learner that orders episodes from the actors that it knows."""
        self._endpoint = endpoint
        self._actor = actor

    def send(self, messages: Iterable[Message]) -> Iterator[Ack]:
        for message in messages:
            try:
                ack = self._endpoint.inbox.receive(message)
            except (NightshiftError, OSError) as error:
                raise _down(error) from error
            yield ack

    def weights(self, newer_than: int) -> Weights | None:
        try:
            weights = self._endpoint.publisher.latest(newer_than)
        except NightshiftError as error:
            raise _down(error) from error
        if self._actor:
            self._endpoint.roster.note(self._actor, weights.version if weights else newer_than)
        return weights

    def close(self) -> None:
        pass


def _down(error: Exception) -> LinkDown:
    return LinkDown(f"the learner reports an error: {error}")
