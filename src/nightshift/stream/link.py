"""The seam between an actor and its learner, and the link of those who share a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from nightshift.errors import NightshiftError, StreamError
from nightshift.stream.inbox import Inbox
from nightshift.stream.message import Parcel, Receipt
from nightshift.stream.weights import Publisher, Weights


class LinkDown(StreamError):
    """The learner cannot be reached, or cannot work, for now."""


class Link(Protocol):
    """Used by one thread at a time. Every failure is a LinkDown, after which the link may be used again."""

    def send(self, parcels: Iterable[Parcel]) -> Iterator[Receipt]:
        """Hand parcels over; yields one receipt each, as they come."""
        ...

    def weights(self, newer_than: int) -> Weights | None:
        """The newest weights, or None if there are none newer than those."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Desk:
    """Where a learner takes parcels and gives weights, whatever they travel over."""

    inbox: Inbox
    publisher: Publisher


class LocalLink:
    """Actor and learner in one process."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def send(self, parcels: Iterable[Parcel]) -> Iterator[Receipt]:
        for parcel in parcels:
            try:
                receipt = self._desk.inbox.receive(parcel)
            except (NightshiftError, OSError) as error:
                raise _down(error) from error
            yield receipt

    def weights(self, newer_than: int) -> Weights | None:
        try:
            return self._desk.publisher.newest(newer_than)
        except NightshiftError as error:
            raise _down(error) from error

    def close(self) -> None:
        pass


def _down(error: Exception) -> LinkDown:
    return LinkDown(f"the learner cannot work: {error}")
