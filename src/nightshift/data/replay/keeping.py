"""Where the trajectories of a buffer lie: what that must offer, and the simple case, in which all are in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nightshift.data.replay import formats
from nightshift.data.replay.index import Entry, Index
from nightshift.data.replay.table import Flat, Table
from nightshift.data.replay.trajectory import TrajectoryBatch, own
from nightshift.errors import DataError

Export = Callable[[Path], str]
"""Puts a trajectory's file at a path and says its sha256; runs without the lock, inside `steady`."""
Source = Callable[[Entry], TrajectoryBatch | Path]
"""Where a trajectory comes from: itself, or a file of ours."""


class Keeping(Protocol):
    """What is at hand is in `table`, and the index knows its slots.

    Methods are called with the buffer's lock held, except where they say otherwise.
    """

    table: Table

    def put(self, entry: Entry, trajectory: TrajectoryBatch) -> None:
        """Keep one that the index already lists."""

    def open(self, entries: Iterable[Entry]) -> None:
        """Have these at hand, which are not, until the next `trim`."""

    def trim(self) -> None:
        """Let go of what was opened and is too much."""

    def drop(self, entry: Entry) -> None:
        """Forget one that the index no longer lists."""

    def export(self, entry: Entry) -> Export: ...

    def adopt(self, entries: Sequence[Entry], source: Source, metadata: Mapping[str, Any]) -> None:
        """Hold and list these instead of all there was. Inside `steady`.

        After an error all is as it was; after a kill a folder holds the old or the new.
        """

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        """While it lasts, no file comes or goes. Taken before the lock."""

    def keep_up(self) -> None:
        """Raise what went wrong behind the caller's back; wait if too much is pending. Without the lock."""

    def flush(self) -> None:
        """Everything is where it belongs, or an error. Without the lock."""

    def close(self) -> None:
        """Flush and stop. Without the lock."""


class InMemory:
    """Nothing on disk until a checkpoint."""

    def __init__(self, index: Index) -> None:
        self.table = Table()
        self._index = index
        self._slots: dict[int, int] = {}

    def put(self, entry: Entry, trajectory: TrajectoryBatch) -> None:
        slot = self.table.put(Flat(trajectory))
        self._slots[entry.trajectory_id] = slot
        self._index.set_slot(entry.trajectory_id, slot)

    def open(self, entries: Iterable[Entry]) -> None:
        raise AssertionError("everything is at hand")

    def trim(self) -> None:
        pass

    def drop(self, entry: Entry) -> None:
        self.table.remove(self._slots.pop(entry.trajectory_id))

    def export(self, entry: Entry) -> Export:
        return partial(formats.write, trajectory=self.table.flat(self._slots[entry.trajectory_id]).trajectory)

    def adopt(self, entries: Sequence[Entry], source: Source, metadata: Mapping[str, Any]) -> None:
        table = Table()
        slots = {entry.trajectory_id: table.put(Flat(_loaded(source(entry), entry))) for entry in entries}
        self.table, self._slots = table, slots
        self._index.reset(entries)
        for trajectory_id, slot in slots.items():
            self._index.set_slot(trajectory_id, slot)

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def keep_up(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_file(path: Path, entry: Entry) -> Flat:
    """A trajectory as views of its file."""
    try:
        flat = Flat(formats.read(path))
    except FileNotFoundError:
        raise missing(path) from None
    if flat.trajectory.num_samples != entry.num_samples:
        raise DataError(
            f"{path} has {flat.trajectory.num_samples} samples and the index says {entry.num_samples}",
            "load a checkpoint that is whole",
        )
    return flat


def missing(path: Path) -> DataError:
    return DataError(f"{path} is missing, and the index lists it", "load a checkpoint that is whole")


def _loaded(source: TrajectoryBatch | Path, entry: Entry) -> TrajectoryBatch:
    return own(open_file(source, entry).trajectory, copy=True) if isinstance(source, Path) else own(source)
