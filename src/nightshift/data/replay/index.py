"""The index of a replay buffer: its trajectories, oldest first, and the mapping from sample numbers to rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.data.replay.trajectory import NO_ROW, RowIndices, TrajectoryBatch
from nightshift.data.replay.validation import WEIGHTS_ID
from nightshift.errors import DataError

INDEX = "trajectory_index.json"
RLINF_INDEX = "trajector_index.json"
METADATA = "metadata.json"
OLDEST = "oldest"
"""Key in the index of an `auto_save_path`: files from this id on belong to the buffer even if they are not listed."""


@dataclass(frozen=True, kw_only=True)
class TrajectoryEntry:
    trajectory_id: int
    num_samples: int
    shape: tuple[int, ...]
    max_episode_length: int
    model_weights_id: str
    sha256: str = ""  # of its file, if it has been written

    def file_name(self, suffix: str) -> str:
        return f"trajectory_{self.trajectory_id}_{self.model_weights_id}{suffix}"

    @classmethod
    def of(cls, trajectory_id: int, trajectory: TrajectoryBatch) -> TrajectoryEntry:
        return cls(
            trajectory_id=trajectory_id,
            num_samples=trajectory.num_samples,
            shape=trajectory.shape,
            max_episode_length=trajectory.max_episode_length,
            model_weights_id=trajectory.model_weights_id,
        )

    @classmethod
    def of_episode(cls, trajectory_id: int, num_samples: int) -> TrajectoryEntry:
        """The entry of an episode in a file that has not been opened."""
        return cls(
            trajectory_id=trajectory_id,
            num_samples=num_samples,
            shape=(num_samples, 1),
            max_episode_length=num_samples,
            model_weights_id="",
        )


class TrajectoryIndex:
    """Append and lookup take time independent of the number of trajectories, apart from binary search."""

    def __init__(self) -> None:
        self.reset(())

    def reset(self, entries: Iterable[TrajectoryEntry]) -> None:
        self._entries: dict[int, TrajectoryEntry] = {}
        self._ends = np.zeros(1024, np.int64)  # by position: number of samples up to the end of the trajectory
        self._ids = np.zeros(1024, np.int64)
        self._slots = np.zeros(1024, np.int64)
        self._first = self._end = 0  # positions in use
        for entry in entries:
            self.append(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[TrajectoryEntry]:
        return iter(self._entries.values())

    def __getitem__(self, trajectory_id: int) -> TrajectoryEntry:
        return self._entries[trajectory_id]

    @property
    def total_samples(self) -> int:
        return self._samples_before(self._end) - self._samples_before(self._first)

    def append(self, entry: TrajectoryEntry) -> None:
        """Ids must be ascending."""
        if self._end == len(self._ends):
            self._make_room()
        self._ends[self._end] = self._samples_before(self._end) + entry.num_samples
        self._ids[self._end] = entry.trajectory_id
        self._slots[self._end] = NO_ROW
        self._end += 1
        self._entries[entry.trajectory_id] = entry

    def pop_oldest(self) -> TrajectoryEntry:
        entry = self._entries.pop(int(self._ids[self._first]))
        self._first += 1
        return entry

    def set_slot(self, trajectory_id: int, slot: int) -> None:
        """Set the slot of an open trajectory in the address table; NO_ROW when it is closed."""
        ids = self._ids[self._first : self._end]
        self._slots[self._first + np.searchsorted(ids, trajectory_id)] = slot

    def window_samples(self, newest: int) -> int:
        """The number of samples in the newest trajectories; 0 means all trajectories."""
        return self._samples_before(self._end) - self._samples_before(self._window_start(newest))

    def locate(self, samples: RowIndices, newest: int) -> tuple[RowIndices, RowIndices]:
        """The trajectory's position and the row in it for each sample number, counted from the start of the window."""
        start = self._window_start(newest)
        samples = samples + self._samples_before(start)
        # The first trajectory that ends beyond the sample, as torch.bucketize(right=True) finds it.
        position = start + np.searchsorted(self._ends[start : self._end], samples, side="right")
        begins = np.where(position > 0, self._ends[position - 1], 0)
        return position, samples - begins

    def ids(self, positions: RowIndices) -> RowIndices:
        return self._ids[positions]

    def slots(self, positions: RowIndices) -> RowIndices:
        return self._slots[positions]

    def _window_start(self, newest: int) -> int:
        return self._first if newest == 0 else max(self._first, self._end - newest)

    def _samples_before(self, position: int) -> int:
        return int(self._ends[position - 1]) if position else 0

    def _make_room(self) -> None:
        """Drop popped positions and double the arrays, which is amortised over the appends in between."""
        kept = slice(max(self._first - 1, 0), self._end)
        room = np.zeros(max(1024, self._end - kept.start), np.int64)
        self._ends, self._ids, self._slots = (np.append(a[kept], room) for a in (self._ends, self._ids, self._slots))
        self._end -= kept.start
        self._first = min(self._first, 1)


def to_json(entries: Iterable[TrajectoryEntry]) -> dict[str, Any]:
    listed = {str(entry.trajectory_id): asdict(entry) for entry in entries}
    return {"trajectory_index": listed, "trajectory_id_list": [entry["trajectory_id"] for entry in listed.values()]}


def from_json(content: Mapping[str, Any], path: Path) -> list[TrajectoryEntry]:
    """Parse an index of ours or of RLinf; entries keep their order."""
    try:
        listed = content["trajectory_index"]
        entries = [_entry(listed[str(trajectory_id)]) for trajectory_id in content["trajectory_id_list"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not an index of trajectories: {error!r}") from None
    if any(left.trajectory_id >= right.trajectory_id for left, right in pairwise(entries)):
        raise DataError(f"{path} lists trajectories out of order or twice")
    return entries


def _entry(content: Mapping[str, Any]) -> TrajectoryEntry:
    entry = TrajectoryEntry(
        trajectory_id=int(content["trajectory_id"]),
        num_samples=int(content["num_samples"]),
        shape=tuple(int(size) for size in content["shape"]),
        max_episode_length=int(content["max_episode_length"]),
        model_weights_id=str(content["model_weights_id"]),
        sha256=str(content.get("sha256", "")),
    )
    if entry.num_samples < 1 or not WEIGHTS_ID.fullmatch(entry.model_weights_id):
        raise ValueError(entry)
    return entry
