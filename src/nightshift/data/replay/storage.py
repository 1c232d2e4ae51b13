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
from nightshift.data.replay.trajectory import TrajectoryBatch, as_immutable
from nightshift.errors import DataError

TrajectoryExport = Callable[[Path], str]
"""Writes a trajectory's file to a path and returns its sha256; called without the lock, inside `files_frozen`."""
TrajectoryLoader = Callable[[TrajectoryEntry], TrajectoryBatch | Path]
"""Loads a trajectory of a checkpoint: the trajectory itself, or the path of its safetensors file."""


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


class InMemoryStorage:
    """Keeps all trajectories in memory; only a checkpoint writes them to disk."""

    def __init__(self, index: TrajectoryIndex) -> None:
        self.table = AddressTable()
        self._index = index
        self._slots: dict[int, int] = {}

    def put(self, entry: TrajectoryEntry, trajectory: TrajectoryBatch) -> None:
        slot = self.table.put(FlatTrajectory(trajectory))
        self._slots[entry.trajectory_id] = slot
        self._index.set_slot(entry.trajectory_id, slot)

    def open(self, entries: Iterable[TrajectoryEntry]) -> None:
        raise AssertionError("all trajectories are open")

    def evict(self) -> None:
        pass

    def remove(self, entry: TrajectoryEntry) -> None:
        self.table.remove(self._slots.pop(entry.trajectory_id))

    def export(self, entry: TrajectoryEntry) -> TrajectoryExport:
        return partial(trajectory_file.write, trajectory=self.table.flat(self._slots[entry.trajectory_id]).trajectory)

    def replace_all(
        self, entries: Sequence[TrajectoryEntry], source: TrajectoryLoader, metadata: Mapping[str, Any]
    ) -> None:
        table = AddressTable()
        slots = {entry.trajectory_id: table.put(FlatTrajectory(_loaded(source(entry), entry))) for entry in entries}
        self.table, self._slots = table, slots
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


def missing(path: Path) -> DataError:
    return DataError(f"{path} is missing, and the index lists it", "load a complete checkpoint")


def _loaded(source: TrajectoryBatch | Path, entry: TrajectoryEntry) -> TrajectoryBatch:
    return (
        as_immutable(open_file(source, entry).trajectory, copy=True)
        if isinstance(source, Path)
        else as_immutable(source)
    )
