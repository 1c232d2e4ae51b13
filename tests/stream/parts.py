"""Spools, inboxes and learners to test with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import LearnerEndpoint
from nightshift.stream.message import Message, MessageHeader, checksum
from nightshift.stream.spool import Spool
from tests.data.examples import PROVENANCE, make

RUN = "night-1"


def open_spool(folder: Path, actor: str = "arm", **options: Any) -> Spool:
    return Spool(folder, run=RUN, actor=actor, **options)


def open_endpoint(folder: Path) -> LearnerEndpoint:
    return LearnerEndpoint.open(folder, run=RUN)


def episode_id(number: int, *, run: str = RUN, actor: str = "arm", epoch: int = 1) -> EpisodeId:
    return EpisodeId(run, actor, epoch, number)


def episode_of(who: EpisodeId, **changes: Any) -> Episode:
    """The episode as its actor writes it to the spool."""
    return make(seed=who.number, **{"provenance": replace(PROVENANCE, origin=who.key), **changes})


def message(who: EpisodeId, **changes: Any) -> Message:
    return message_of(who, episodes.to_bytes(episode_of(who, **changes)))


def message_of(who: EpisodeId, content: bytes) -> Message:
    return Message(MessageHeader(who, checksum([content])), content)


def contents(inbox: Inbox) -> dict[EpisodeId, bytes]:
    """The bytes of every stored episode; fails if one is stored twice."""
    stored_episodes = inbox.stored_after(0)
    stored = {stored.header.episode_id: stored.path.read_bytes() for stored in stored_episodes}
    assert len(stored) == len(stored_episodes) == len(inbox)
    return stored
