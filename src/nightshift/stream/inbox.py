"""The learner's episodes on disk: every episode it has accepted, each once, in the order of arrival.

inbox/  lock
        episodes/  schema.json, <position>.<transitions>.<episode_id>.<checksum>.safetensors

One rename commits an episode together with its ID, position, number of transitions and checksum, so they cannot
disagree after a crash. To recover, the inbox lists its folder and opens no file.

Three locks: `_naming` orders the renames, `_syncing` is held while the folder reaches the disk, and `_arrived` guards
what readers see. A reader never waits for the disk. Episodes that are renamed during a sync share the next one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nightshift import files
from nightshift.closing import Closing
from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.schema import Range
from nightshift.data.tensors import Content
from nightshift.errors import DataError, NightshiftError, StreamError
from nightshift.project.locks import Claim
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.message import Ack, Message, MessageHeader, checksum

EPISODES = "episodes"
NO_ROOM = "the learner takes no more episodes until it has sampled those that it has"
_NOT_AN_EPISODE = (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)
"""Raised by decoding or validating a safetensors file whose arrays or header do not form an episode."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """An episode that the inbox has committed to disk."""

    position: int  # counts from 1 in the order of arrival
    transitions: int
    header: MessageHeader
    path: Path

    def load(self, *, verify: bool = True) -> Episode:
        """Load the episode; its arrays are memory-mapped views of its file. `verify` reads all of it once."""
        return episodes.load(self.path, self._verify if verify else None)

    def _verify(self, content: Content) -> None:
        if checksum([content.data]) != self.header.checksum:
            raise DataError(
                f"{self.path} is damaged: its checksum is not the one in its name",
                "restore it from a backup",
            )


class Inbox(Closing):
    """Stores the episodes of one run. Thread-safe; one process at a time may open the folder."""

    def __init__(self, folder: Path, *, run: str, ranges: Mapping[str, Range] | None = None) -> None:
        self._run = run
        self._claim = Claim(folder, StreamError)
        self._store = EpisodeStore(folder / EPISODES, ranges=ranges)
        self._store.sweep()
        self._stored = _recover(self._store)
        self._known = {stored.header.episode_id: stored for stored in self._stored}
        self._check_recovered()
        self._last = self._stored[-1].position if self._stored else 0
        self._transitions = sum(stored.transitions for stored in self._stored)
        self._named = self._last
        self._renamed: list[StoredEpisode] = []  # in place, but a power cut may still undo the rename
        self._naming = threading.Lock()
        self._syncing = threading.Lock()
        self._arrived = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._sync_failed = False
        self._failure: NightshiftError | OSError | None = None
        self._last_rejection = ""
        self._has_room: Callable[[], bool] = lambda: True

    @property
    def folder(self) -> Path:
        """Of the stored episodes."""
        return self._store.folder

    @property
    def transitions(self) -> int:
        """The number of transitions of all stored episodes."""
        return self._transitions

    def accept_while(self, has_room: Callable[[], bool]) -> None:
        """Defer new episodes while `has_room` returns False: their actors keep them and send them again later."""
        self._has_room = has_room

    def receive(self, message: Message) -> Ack:
        """Store an episode, unless it is a duplicate, invalid, or there is no room for it now."""
        try:
            self._check_run(message.header)
            if self._is_stored(message.header):
                ack = Ack(message.header, "duplicate")
            elif not self._has_room():
                ack = Ack(message.header, "deferred", NO_ROOM)
            else:
                ack = self._commit(message, self._validate(message))
        except DataError as error:
            _log.warning("rejected: %s", error.what)
            if message.header.episode_id.run == self._run:
                self._last_rejection = error.what
            ack = Ack(message.header, "rejected", error.what)
        except (NightshiftError, OSError) as error:
            self._failure = error
            raise
        with self._arrived:
            self._failure = None
            self._counts[ack.outcome] += 1
        return ack

    @property
    def last_rejection(self) -> str:
        """Why an episode of this run was rejected last; "" if none was since the inbox was opened."""
        return self._last_rejection

    def check(self) -> None:
        """Raise if the episode that came last could not be stored, as on a full disk; its actor sends it again."""
        self._check_sync()
        if self._failure is not None:
            raise StreamError(
                f"an episode could not be stored in {self._store.folder}: {self._failure}",
                "fix the disk and run again: the actor has kept the episode",
            )

    def stored_after(self, position: int) -> list[StoredEpisode]:
        """The episodes after `position`, in order of arrival; a reader that keeps its position sees each once."""
        with self._arrived:
            return self._stored[bisect_right(self._stored, position, key=lambda stored: stored.position) :]

    def wait_for_episode(self, position: int, timeout: float | None = None) -> bool:
        """Wait until there is an episode after `position`; False after the timeout. StreamError if none can come."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._last > position or self._sync_failed, timeout)
            if self._last > position:
                return True
            self._check_sync()
            return False

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, episode_id: EpisodeId) -> bool:
        return episode_id in self._known

    def metrics(self) -> dict[str, float]:
        names = ("accepted", "duplicate", "rejected", "deferred")
        with self._arrived:
            counted = {f"inbox/{name}": float(self._counts[name]) for name in names}
            return counted | {"inbox/stored": float(len(self._stored))}

    def close(self) -> None:
        self._claim.release()

    def _check_run(self, header: MessageHeader) -> None:
        if header.episode_id.run != self._run:
            raise DataError(f"{header.episode_id}: this learner belongs to run {self._run}")

    def _check_recovered(self) -> None:
        """Reject a folder that no learner of this run can have written."""
        if runs := {episode_id.run for episode_id in self._known} - {self._run}:
            found = f"{self._store.folder} holds episodes of run {', '.join(sorted(runs))}, not of {self._run}"
            raise DataError(found, "use another folder, or use the name of that run")
        if len(self._known) < len(self._stored):
            raise DataError(f"{self._store.folder} holds an episode twice", "move one of the files out of the folder")

    def _is_stored(self, header: MessageHeader) -> bool:
        """Whether this episode is in place, and then also on disk."""
        known = self._known.get(header.episode_id)
        if known is None:
            return False
        if known.header != header:
            raise DataError(f"{header.episode_id}: another episode is stored under this ID")
        self._make_durable(known.position)
        return True

    def _validate(self, message: Message) -> int:
        """Check an episode and return the number of its transitions."""
        episode_id = message.header.episode_id
        if checksum([message.payload]) != message.header.checksum:
            raise DataError(f"{episode_id}: its checksum does not match its content; it was damaged in transit")
        try:
            episode = _decode(message)
            if episode.provenance.origin != episode_id.key:
                raise DataError(f"{episode_id}: provenance.origin says {episode.provenance.origin!r}")
            with self._naming if self._store.schema is None else contextlib.nullcontext():
                self._store.admit(episode, str(episode_id))
            return episode.length - 1
        except _NOT_AN_EPISODE as error:
            raise DataError(f"{episode_id}: it is not an episode: {error!r}") from None

    def _commit(self, message: Message, transitions: int) -> Ack:
        header = message.header
        with files.staged(self._store.path(header.key), [message.payload]) as temporary:
            with self._naming:
                is_new = header.episode_id not in self._known
                if is_new:
                    self._check_sync()
                    stored = _stored_episode(self._store, self._named + 1, transitions, header)
                    temporary.replace(stored.path)
                    self._named = stored.position
                    self._renamed.append(stored)
                    self._known[header.episode_id] = stored
            self._is_stored(header)
        return Ack(header, "accepted" if is_new else "duplicate")

    def _make_durable(self, position: int) -> None:
        """Return when the episode at `position` is on disk and readers see it; one sync serves all that wait."""
        if position <= self._last:
            return
        with self._syncing:
            if position <= self._last:
                return
            self._check_sync()
            with self._naming:
                renamed, self._renamed = self._renamed, []
            self._sync()
            with self._arrived:
                self._stored.extend(renamed)
                self._last = renamed[-1].position
                self._transitions += sum(stored.transitions for stored in renamed)
                self._arrived.notify_all()

    def _sync(self) -> None:
        try:
            with files.translated_errors(self._store.folder):
                files.sync(self._store.folder)
        except BaseException:
            with self._arrived:
                self._sync_failed = True  # only a new listing of the folder shows what is there
                self._arrived.notify_all()
            raise

    def _check_sync(self) -> None:
        if self._sync_failed:
            raise StreamError(f"{self._store.folder} could not be written", "fix the disk and restart the learner")


def _recover(store: EpisodeStore) -> list[StoredEpisode]:
    """List the committed episodes, and sync the folder in case the last process died between rename and sync."""
    stored_episodes, keys = [], store.keys()
    for key in keys:
        try:
            position, transitions, name = key.split(".", 2)
            header = MessageHeader.from_key(name)
            stored_episodes.append(_stored_episode(store, int(position), int(transitions), header))
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


def _stored_episode(store: EpisodeStore, position: int, transitions: int, header: MessageHeader) -> StoredEpisode:
    return StoredEpisode(position, transitions, header, store.path(f"{position:09d}.{transitions}.{header.key}"))
