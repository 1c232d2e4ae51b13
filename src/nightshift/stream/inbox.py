"""The learner's episodes on disk: every episode it has accepted, each once, in the order of arrival.

inbox/  lock
        episodes/  schema.json, <position>.<episode_id>.<checksum>.safetensors

One rename commits an episode together with its ID, position and checksum, so they cannot disagree after a crash. To
recover, the inbox lists its folder.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nightshift import files
from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.schema import Range
from nightshift.errors import DataError, StreamError
from nightshift.project.locks import Claim
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.message import Ack, Message, MessageHeader, checksum

EPISODES = "episodes"
_NOT_AN_EPISODE = (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)
"""Raised by decoding or validating a safetensors file whose arrays or header do not form an episode."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """An episode that the inbox has committed to disk."""

    position: int  # counts from 1 in the order of arrival
    header: MessageHeader
    path: Path

    def load(self) -> Episode:
        """Load the episode; its arrays are memory-mapped views of its file."""
        return episodes.load(self.path)


class Inbox:
    """Stores the episodes of one run. Thread-safe; one process at a time may open the folder."""

    def __init__(self, folder: Path, *, run: str, ranges: Mapping[str, Range] | None = None) -> None:
        self._run = run
        self._claim = Claim(folder, StreamError)
        self._episode_store = EpisodeStore(folder / EPISODES, ranges=ranges)
        self._stored = _recover(self._episode_store)
        self._known = {stored.header.episode_id: stored.header for stored in self._stored}
        self._check_recovered()
        self._last = self._stored[-1].position if self._stored else 0
        self._arrived = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._write_failed = False

    def receive(self, message: Message) -> Ack:
        """Store an episode, unless it is a duplicate or invalid."""
        try:
            self._check_run(message.header)
            ack = self._duplicate(message.header)
            if ack is None:
                self._validate(message)
                ack = self._commit(message)
        except DataError as error:
            _log.warning("rejected: %s", error.what)
            ack = Ack(message.header, "rejected", error.what)
        with self._arrived:
            self._counts[ack.outcome] += 1
        return ack

    def stored_after(self, position: int) -> list[StoredEpisode]:
        """The episodes after `position`, in order of arrival; a reader that keeps its position sees each once."""
        with self._arrived:
            return self._stored[bisect_right(self._stored, position, key=lambda stored: stored.position) :]

    def wait_for_episode(self, position: int, timeout: float | None = None) -> bool:
        """Wait until there is an episode after `position`; False after the timeout."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self._last > position, timeout)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, episode_id: EpisodeId) -> bool:
        return episode_id in self._known

    def metrics(self) -> dict[str, float]:
        with self._arrived:
            counted = {f"inbox/{name}": float(self._counts[name]) for name in ("accepted", "duplicate", "rejected")}
            return counted | {"inbox/stored": float(len(self._known))}

    def close(self) -> None:
        self._claim.release()

    def _check_run(self, header: MessageHeader) -> None:
        if header.episode_id.run != self._run:
            raise DataError(f"{header.episode_id}: this learner belongs to run {self._run}")

    def _check_recovered(self) -> None:
        """Reject a folder that no learner of this run can have written."""
        if runs := {episode_id.run for episode_id in self._known} - {self._run}:
            found = f"{self._episode_store.folder} holds episodes of run {', '.join(sorted(runs))}, not of {self._run}"
            raise DataError(found, "use another folder, or use the name of that run")
        if len(self._known) < len(self._stored):
            raise DataError(
                f"{self._episode_store.folder} holds an episode twice", "move one of the files out of the folder"
            )

    def _duplicate(self, header: MessageHeader) -> Ack | None:
        known = self._known.get(header.episode_id)
        if known is None:
            return None
        if known != header:
            raise DataError(f"{header.episode_id}: another episode is stored under this ID")
        return Ack(header, "duplicate")

    def _validate(self, message: Message) -> None:
        episode_id = message.header.episode_id
        if checksum([message.payload]) != message.header.checksum:
            raise DataError(f"{episode_id}: its checksum does not match its content; it was damaged in transit")
        try:
            episode = _decode(message)
            if episode.provenance.origin != episode_id.key:
                raise DataError(f"{episode_id}: provenance.origin says {episode.provenance.origin!r}")
            with self._arrived if self._episode_store.schema is None else contextlib.nullcontext():
                self._episode_store.admit(episode, str(episode_id))
        except _NOT_AN_EPISODE as error:
            raise DataError(f"{episode_id}: it is not an episode: {error!r}") from None

    def _commit(self, message: Message) -> Ack:
        """Files are written in parallel; renames are serialised by the lock."""
        header = message.header
        with files.staged(self._episode_store.path(header.key), [message.payload]) as temporary, self._arrived:
            if ack := self._duplicate(header):
                return ack
            if self._write_failed:
                raise StreamError(
                    f"{self._episode_store.folder} could not be written", "fix the disk and restart the learner"
                )
            stored = _stored_episode(self._episode_store, self._last + 1, header)
            # If the rename or the sync raises, only a new listing of the folder shows whether the file is there.
            self._write_failed = True
            files.settle(temporary, stored.path)
            self._write_failed = False
            self._stored.append(stored)
            self._known[header.episode_id] = header
            self._last = stored.position
            self._arrived.notify_all()
        return Ack(header, "accepted")


def _recover(store: EpisodeStore) -> list[StoredEpisode]:
    """List the committed episodes, and sync the folder in case the last process died between rename and sync."""
    stored_episodes, keys = [], store.keys()
    for key in keys:
        position, _, name = key.partition(".")
        try:
            stored_episodes.append(_stored_episode(store, int(position), MessageHeader.from_key(name)))
        except (ValueError, DataError):
            raise DataError(f"{store.path(key)} was not written by a learner", "move it out of the folder") from None
    if stored_episodes:
        files.sync(store.folder)
    return stored_episodes


def _decode(message: Message) -> Episode:
    try:
        return episodes.from_bytes(message.payload)
    except DataError as error:
        raise DataError(f"{message.header.episode_id}: {error.what}") from None


def _stored_episode(store: EpisodeStore, position: int, header: MessageHeader) -> StoredEpisode:
    return StoredEpisode(position, header, store.path(f"{position:09d}.{header.key}"))
