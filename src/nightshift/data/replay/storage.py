"""The storage interface of a replay buffer, and the storage in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nightshift.data.replay import trajectory_file
from nightshift.data.replay.address_table import AddressTable, FlatTrajectory
from nightshift.data.replay.index import TrajectoryEntry, TrajectoryIndex
from nightshift.data.replay.trajectory import NO_ROW, TrajectoryBatch, as_immutable
from nightshift.data.replay.validation import check, check_bounds
from nightshift.errors import DataError

TrajectoryExport = Callable[[Path], str]
"""Writes a trajectory's file to a path and returns its sha256; called without the lock, inside `files_frozen`."""
TrajectoryLoader = Callable[[TrajectoryEntry], TrajectoryBatch | Path]
"""Loads a trajectory of a checkpoint: the trajectory itself, or the path of its safetensors file."""


class EpisodeFile(Protocol):
    """An episode that stays in its file, such as one of a learner's inbox."""

    @property
    def num_samples(self) -> int:
        """The number of its transitions, at least 1."""

    def read(self, *, verify: bool) -> TrajectoryBatch:
        """Memory-mapped views of the file; `verify` compares its content with its checksum, if it has one."""


class Storage(Protocol):
    """Open trajectories are in `table`, and the index holds their slots.

    Methods are called with the buffer's lock held, unless they say otherwise.
    """

    table: AddressTable

    def put(self, entry: TrajectoryEntry, trajectory: TrajectoryBatch) -> None:
        """Store a trajectory that is already in the index."""

    def open(self, entries: Iterable[TrajectoryEntry]) -> None:
        """Open these trajectories, which are not open yet; they stay open until the next `evict`."""

    def evict(self) -> None:
        """Close the oldest open files beyond the cache size."""

    def remove(self, entry: TrajectoryEntry) -> None:
        """Remove a trajectory that is no longer in the index."""

    def export(self, entry: TrajectoryEntry) -> TrajectoryExport: ...

    def replace_all(
        self, entries: Sequence[TrajectoryEntry], source: TrajectoryLoader, metadata: Mapping[str, Any]
    ) -> None:
        """Replace all trajectories. Called inside `files_frozen`.

        After an error nothing has changed; after a kill the folder has either the old or the new content.
        """

    def files_frozen(self) -> contextlib.AbstractContextManager[Any]:
        """While this context is open no file is created or deleted. Acquired before the lock."""

    def wait_for_writer(self) -> None:
        """Raise errors of the writer thread, and wait while too many writes are pending. Called without the lock."""

    def flush(self) -> None:
        """Wait until everything is written, or raise. Called without the lock."""

    def close(self) -> None:
        """Flush and stop the writer. Called without the lock."""


class OpenFiles:
    """The open files of a storage, at most `limit` after `evict`, first in first out."""

    def __init__(self, table: AddressTable, index: TrajectoryIndex, limit: int) -> None:
        self._table = table
        self._index = index
        self._limit = limit
        self._slots: dict[int, int] = {}  # by id, in the order of opening

    def add(self, trajectory_id: int, flat: FlatTrajectory) -> None:
        slot = self._table.put(flat)
        self._slots[trajectory_id] = slot
        self._index.set_slot(trajectory_id, slot)

    def evict(self) -> None:
        while len(self._slots) > self._limit:
            trajectory_id = next(iter(self._slots))
            self.close(trajectory_id)
            self._index.set_slot(trajectory_id, NO_ROW)

    def close(self, trajectory_id: int) -> None:
        """Let go of a file if it is open; the last batch that uses it unmaps it."""
        slot = self._slots.pop(trajectory_id, None)
        if slot is not None:
            self._table.remove(slot)


class InMemoryStorage:
    """Keeps trajectories in memory, and views of episodes that are files already; only a checkpoint writes to disk."""

    def __init__(self, index: TrajectoryIndex, cache_size: int) -> None:
        self.table = AddressTable()
        self._index = index
        self._cache_size = cache_size
        self._slots: dict[int, int] = {}  # by id: trajectories in memory
        self._files: dict[int, EpisodeFile] = {}  # by id: episodes in files
        self._verified: set[int] = set()  # ids of the files whose whole content has been checked
        self._open = OpenFiles(self.table, index, cache_size)

    def put(self, entry: TrajectoryEntry, trajectory: TrajectoryBatch) -> None:
        slot = self.table.put(FlatTrajectory(trajectory))
        self._slots[entry.trajectory_id] = slot
        self._index.set_slot(entry.trajectory_id, slot)

    def put_file(self, entry: TrajectoryEntry, file: EpisodeFile) -> None:
        """Store an episode that is already in the index; its file is opened when it is first sampled."""
        self._files[entry.trajectory_id] = file

    def open(self, entries: Iterable[TrajectoryEntry]) -> None:
        for entry in entries:
            is_new = entry.trajectory_id not in self._verified
            trajectory = _read_episode(self._files[entry.trajectory_id], entry, verify=is_new)
            self._open.add(entry.trajectory_id, FlatTrajectory(as_immutable(trajectory)))
            self._verified.add(entry.trajectory_id)

    def evict(self) -> None:
        self._open.evict()

    def remove(self, entry: TrajectoryEntry) -> None:
        if self._files.pop(entry.trajectory_id, None):
            self._open.close(entry.trajectory_id)
            self._verified.discard(entry.trajectory_id)
        else:
            self.table.remove(self._slots.pop(entry.trajectory_id))

    def export(self, entry: TrajectoryEntry) -> TrajectoryExport:
        file = self._files.get(entry.trajectory_id)
        if file is not None:
            return lambda path: trajectory_file.write(path, _read_episode(file, entry, verify=True))
        return partial(trajectory_file.write, trajectory=self.table.flat(self._slots[entry.trajectory_id]).trajectory)

    def replace_all(
        self, entries: Sequence[TrajectoryEntry], source: TrajectoryLoader, metadata: Mapping[str, Any]
    ) -> None:
        table = AddressTable()
        slots = {entry.trajectory_id: table.put(FlatTrajectory(_loaded(source(entry), entry))) for entry in entries}
        self.table, self._slots = table, slots
        self._files, self._verified = {}, set()
        self._open = OpenFiles(table, self._index, self._cache_size)
        self._index.reset(entries)
        for trajectory_id, slot in slots.items():
            self._index.set_slot(trajectory_id, slot)

    def files_frozen(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def wait_for_writer(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_file(path: Path, entry: TrajectoryEntry) -> FlatTrajectory:
    """Open the file of a trajectory as memory-mapped views."""
    try:
        flat = FlatTrajectory(trajectory_file.read(path))
    except FileNotFoundError:
        raise missing(path) from None
    if flat.trajectory.num_samples != entry.num_samples:
        raise DataError(
            f"{path} has {flat.trajectory.num_samples} samples and the index says {entry.num_samples}",
            "load a complete checkpoint",
        )
    return flat


def _read_episode(file: EpisodeFile, entry: TrajectoryEntry, *, verify: bool) -> TrajectoryBatch:
    try:
        trajectory = file.read(verify=verify)
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} is missing; the replay buffer holds it", "restore the file") from None
    check(trajectory) if verify else check_bounds(trajectory)
    if trajectory.num_samples != entry.num_samples:
        raise DataError(
            f"episode {int(trajectory.episode[0, 0])} has {trajectory.num_samples} transitions, "
            f"and {entry.num_samples} when it was added",
            "restore its file",
        )
    return trajectory


def missing(path: Path) -> DataError:
    return DataError(f"{path} is missing, and the index lists it", "load a complete checkpoint")


def _loaded(source: TrajectoryBatch | Path, entry: TrajectoryEntry) -> TrajectoryBatch:
    return (
        as_immutable(open_file(source, entry).trajectory, copy=True)
        if isinstance(source, Path)
        else as_immutable(source)
    )
