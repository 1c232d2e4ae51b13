"""The episodes of a source that a person records: data/imports/NAME for successes, data/failures/NAME for the rest.

The source is an ordinary one that `dataset.sources` can name: a folder with a manifest, replaced as a whole whenever an
episode is saved or undone, so that it is complete at any time. `dataset` refuses failures, so they are kept apart.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift import files
from nightshift.data.episode import Episode, digest
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.schema import Range
from nightshift.data.sources import ALL_IMPORTS, DEMOS, ROLLOUTS
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError
from nightshift.project import locks, paths
from nightshift.teleop.recorder import unsaved_episode

ORIGIN = "teleop"
"""How the origin of an episode begins that was recorded here."""
FILM_SUFFIX = ".film"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_FRAME = struct.Struct("<II")
_DIGEST_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One episode as the page lists it."""

    number: int
    task: str
    init_state: int | None
    success: bool
    steps: int
    """Control steps."""
    intervened: int
    """Steps in which a person overrode the policy."""
    source: str
    """Of its provenance: human or policy."""
    who: str
    digest: str
    """Of what was measured and done; its film has this name. Numbers repeat in other clones of the project."""


Film = Sequence[tuple[int, bytes]]
"""What the pilot saw: the control step and the JPEG of each picture."""


class Library:
    """One process at a time records into a source."""

    def __init__(self, name: str, ranges: Mapping[str, Range]) -> None:
        if not _NAME.fullmatch(name) or name in (DEMOS, ROLLOUTS, ALL_IMPORTS):
            raise DataError(f"{name!r} cannot be the name of a source", "use letters, digits, _ and -; not demos")
        self.name = name
        self.successes = paths.IMPORTS / name
        self.failures = paths.FAILURES / name
        self.state = paths.TELEOP / name
        self.journal = self.state / "episode.jsonl"
        self._ranges = ranges
        self._check_source()
        self._claim = locks.Claim(self.state, DataError)
        self._films, self._undone = self.state / "films", self.state / "undone"
        shutil.rmtree(self._undone, ignore_errors=True)
        self._renumber_failures()
        self.entries: list[Entry] = sorted(self._listed(), key=lambda entry: entry.number)
        self.next_number = self._first_new = 1 + max((entry.number for entry in self.entries), default=-1)
        """Of the episode that is saved next."""
        self.lost = self._lost()
        """A sentence about the episode in the middle of which the session before this one ended, or nothing."""

    def close(self) -> None:
        """What was undone is gone for good."""
        shutil.rmtree(self._undone, ignore_errors=True)
        self._claim.release()

    @property
    def unsaved(self) -> str:
        """Which episode is in the making, in words; after a session, the one that was not kept."""
        return unsaved_episode(self.journal, [entry.number for entry in self.entries])

    def is_new(self, entry: Entry) -> bool:
        """Whether it was recorded in this session."""
        return entry.number >= self._first_new

    def check(self, episode: Episode) -> None:
        """DataError if such an episode could not be saved here, before anybody plays it."""
        for folder in (self.successes, self.failures):
            EpisodeStore(folder, ranges=self._ranges).check(episode, str(folder))

    def save(self, episode: Episode) -> Entry:
        """When this returns, the episode is durable and part of its source."""
        number = self.next_number
        key = _key(number)
        if episode.success:
            self._publish(added=(key, episode))
        else:
            EpisodeStore(self.failures, ranges=self._ranges).put(key, episode)
        entry = _entry(number, episode)
        self.entries.append(entry)
        self.next_number += 1
        return entry

    def keep_film(self, entry: Entry, film: Film) -> None:
        """What the pilot saw of an episode that is saved."""
        if film:
            files.write_chunks(self._film_path(entry), _film_chunks(film))

    def undo(self) -> Entry:
        """Take the last episode out; its file is kept aside until the session ends."""
        if not self.entries:
            raise DataError("there is no episode to undo")
        entry = self.entries[-1]
        key = _key(entry.number)
        folder = self.successes if entry.success else self.failures
        self._undone.mkdir(parents=True, exist_ok=True)
        aside = self._undone / f"{key}{SUFFIX}"
        aside.unlink(missing_ok=True)  # of a try that failed
        files.link_or_copy(folder / f"{key}{SUFFIX}", aside)
        if entry.success:
            self._publish(removed=key)
        else:
            (folder / f"{key}{SUFFIX}").unlink()
            files.sync(folder)
        self.entries.pop()
        self._film_path(entry).unlink(missing_ok=True)
        return entry

    def film(self, number: int) -> bytes:
        """The pictures of an episode, each behind its step and its size; empty where they are not on this machine."""
        for entry in self.entries:
            if entry.number == number:
                with contextlib.suppress(FileNotFoundError):
                    return self._film_path(entry).read_bytes()
        return b""

    def thumbnail(self, number: int) -> bytes:
        """The last picture of an episode, or nothing."""
        frames = read_film(self.film(number))
        return frames[-1][1] if frames else b""

    @property
    def pointer(self) -> Path:
        """By which DVC knows the source."""
        return paths.IMPORTS / f"{self.name}.dvc"

    def _lost(self) -> str:
        told = self.unsaved
        self.journal.unlink(missing_ok=True)
        return told and f"the session before this one ended in the middle of an episode ({told}): that episode is lost"

    def _check_source(self) -> None:
        if self.pointer.exists() and not self.successes.exists():
            next_step = f"get it with `dvc pull {self.pointer}`, or use another --name"
            raise DataError(f"{self.successes} is not here", next_step)
        if self.successes.exists():
            files.verify_folder(self.successes, "restore it, or record under another --name")
            store = EpisodeStore(self.successes)
            others = [key for key in store.keys() if not is_recorded_here(store.get(key))]  # noqa: SIM118
            if others:
                raise DataError(f"{self.successes} holds episodes of another origin", "record under another --name")

    def _renumber_failures(self) -> None:
        """Where successes of another clone have come with their numbers: failures are on this machine alone."""
        taken = set(_numbers(self.successes))
        failures = list(_numbers(self.failures))
        free = 1 + max([*taken, *failures], default=-1)
        for offset, number in enumerate(sorted(taken.intersection(failures))):
            old, new = (self.failures / f"{_key(one)}{SUFFIX}" for one in (number, free + offset))
            old.rename(new)
        if taken.intersection(failures):
            files.sync(self.failures)

    def _listed(self) -> Iterator[Entry]:
        for folder in (self.successes, self.failures):
            store = EpisodeStore(folder)
            for number in _numbers(folder):
                yield _entry(number, store.get(_key(number)))

    def _publish(self, added: tuple[str, Episode] | None = None, removed: str = "") -> None:
        """Replace the source by one with an episode more or less. Its other files are linked, and not read again."""
        known: dict[str, str] = {}
        if self.successes.exists():
            known = dict(json.loads((self.successes / files.MANIFEST).read_text())["sha256"])
        known.pop(f"{removed}{SUFFIX}", None)
        if not added and not any(name.endswith(SUFFIX) for name in known):
            self._remove_source()
            return
        with files.new_folder(self.successes, known) as new:
            for name in known:
                files.link_or_copy(self.successes / name, new / name)
            if added:
                EpisodeStore(new, ranges=self._ranges).put(*added)

    def _remove_source(self) -> None:
        """Its pointer first: one without a source asks for `dvc pull`, which would bring back what was undone."""
        self.pointer.unlink(missing_ok=True)
        files.remove_folder(self.successes)

    def _film_path(self, entry: Entry) -> Path:
        return self._films / f"{entry.digest}{FILM_SUFFIX}"


def is_recorded_here(episode: Episode) -> bool:
    return episode.provenance.origin.startswith(ORIGIN)


def read_film(content: bytes) -> list[tuple[int, bytes]]:
    frames, position = [], 0
    while position < len(content):
        step, size = _FRAME.unpack_from(content, position)
        position += _FRAME.size + size
        frames.append((step, content[position - size : position]))
    return frames


def _film_chunks(film: Film) -> Iterator[bytes]:
    for step, picture in film:
        yield _FRAME.pack(step, len(picture))
        yield picture


def _numbers(folder: Path) -> Iterator[int]:
    for key in EpisodeStore(folder).keys():  # noqa: SIM118 - a store is no dict
        if key.isdecimal():
            yield int(key)


def _key(number: int) -> str:
    return f"{number:06d}"


def _entry(number: int, episode: Episode) -> Entry:
    metadata: Mapping[str, Any] = episode.metadata
    return Entry(
        number=number,
        task=episode.provenance.task,
        init_state=episode.provenance.init_state,
        success=episode.success,
        steps=episode.length - 1,
        intervened=int(episode.interventions.sum()),
        source=episode.provenance.source,
        who=str(metadata.get("who", "")),
        digest=digest(episode)[:_DIGEST_LENGTH],
    )
