"""Spools, inboxes and learners to test with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.stream.identity import Identity
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import Desk
from nightshift.stream.message import Label, Parcel, checksum
from nightshift.stream.spool import Spool
from nightshift.stream.weights import Publisher
from tests.data.examples import PROVENANCE, make

RUN = "night-1"


def open_spool(folder: Path, actor: str = "arm", **options: Any) -> Spool:
    return Spool(folder, run=RUN, actor=actor, **options)


def open_desk(folder: Path) -> Desk:
    return Desk(Inbox(folder / "inbox", run=RUN), Publisher(folder / "weights"))


def identity(number: int, *, run: str = RUN, actor: str = "arm", epoch: int = 1) -> Identity:
    return Identity(run, actor, epoch, number)


def episode_of(who: Identity, **changes: Any) -> Episode:
    """The episode as its actor would have spooled it."""
    return make(seed=who.number, **{"provenance": replace(PROVENANCE, origin=who.key), **changes})


def parcel(who: Identity, **changes: Any) -> Parcel:
    return parcel_of(who, episodes.to_bytes(episode_of(who, **changes)))


def parcel_of(who: Identity, content: bytes) -> Parcel:
    return Parcel(Label(who, checksum([content])), content)


def contents(inbox: Inbox) -> dict[Identity, bytes]:
    """What is stored, byte by byte; one that is stored twice is an error."""
    arrivals = inbox.since(0)
    stored = {arrival.label.identity: arrival.path.read_bytes() for arrival in arrivals}
    assert len(stored) == len(arrivals) == len(inbox)
    return stored
