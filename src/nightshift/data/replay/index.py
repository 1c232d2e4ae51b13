"""Which trajectories a buffer holds, oldest first, and which sample of which one a number means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.data.replay.checks import WEIGHTS_ID
from nightshift.data.replay.trajectory import NONE, Rows, TrajectoryBatch
from nightshift.errors import DataError

INDEX = "trajectory_index.json"
LEGACY_INDEX = "trajector_index.json"
METADATA = "metadata.json"
OLDEST = "oldest"
"""In the index of a folder that a buffer works in: files from this id on are wanted, listed yet or not."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    trajectory_id: int
    num_samples: int
    shape: tuple[int, ...]
    max_episode_length: int
    model_weights_id: str
    sha256: str = ""  # of its file, once there is one

    def file_name(self, suffix: str) -> str:
        return f"trajectory_{self.trajectory_id}_{self.model_weights_id}{suffix}"

    @classmethod
    def of(cls, trajectory_id: int, trajectory: TrajectoryBatch) -> Entry:
        return cls(
            trajectory_id=trajectory_id,
            num_samples=trajectory.num_samples,
            shape=trajectory.shape,
            max_episode_length=trajectory.max_episode_length,
            model_weights_id=trajectory.model_weights_id,
        )


class Index:
    """Adding and looking up cost the same however many there are."""

    def __init__(self) -> None:
        self.reset(())

    def reset(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[int, Entry] = {}
        self._ends = np.zeros(1024, np.int64)  # by position: samples up to its end
        self._ids = np.zeros(1024, np.int64)
        self._slots = np.zeros(1024, np.int64)
        self._first = self._end = 0  # positions in use
        for entry in entries:
            self.append(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, trajectory_id: int) -> Entry:
        return self._entries[trajectory_id]

    @property
    def total_samples(self) -> int:
        return self._samples_before(self._end) - self._samples_before(self._first)

    def append(self, entry: Entry) -> None:
        """Its id is larger than those before."""
        if self._end == len(self._ends):
            self._make_room()
        self._ends[self._end] = self._samples_before(self._end) + entry.num_samples
        self._ids[self._end] = entry.trajectory_id
        self._slots[self._end] = NONE
        self._end += 1
        self._entries[entry.trajectory_id] = entry

    def pop_oldest(self) -> Entry:
        entry = self._entries.pop(int(self._ids[self._first]))
        self._first += 1
        return entry

    def set_slot(self, trajectory_id: int, slot: int) -> None:
        """Note where a trajectory is at hand; NONE if it no longer is."""
        ids = self._ids[self._first : self._end]
        self._slots[self._first + np.searchsorted(ids, trajectory_id)] = slot

    def window_samples(self, newest: int) -> int:
        """Samples in the newest trajectories; 0 means all of them."""
        return self._samples_before(self._end) - self._samples_before(self._window_start(newest))

    def locate(self, samples: Rows, newest: int) -> tuple[Rows, Rows]:
        """For samples counted from the start of the window: positions of their trajectories, and their rows in them."""
        start = self._window_start(newest)
        samples = samples + self._samples_before(start)
        # As torch.bucketize(right=True): the first trajectory that ends beyond the sample.
        position = start + np.searchsorted(self._ends[start : self._end], samples, side="right")
        begins = np.where(position > 0, self._ends[position - 1], 0)
        return position, samples - begins

    def ids(self, positions: Rows) -> Rows:
        return self._ids[positions]

    def slots(self, positions: Rows) -> Rows:
        return self._slots[positions]

    def _window_start(self, newest: int) -> int:
        return self._first if newest == 0 else max(self._first, self._end - newest)

    def _samples_before(self, position: int) -> int:
        return int(self._ends[position - 1]) if position else 0

    def _make_room(self) -> None:
        """Let go of what was popped, and double: both are paid for by the appends in between."""
        kept = slice(max(self._first - 1, 0), self._end)
        room = np.zeros(max(1024, self._end - kept.start), np.int64)
        self._ends, self._ids, self._slots = (np.append(a[kept], room) for a in (self._ends, self._ids, self._slots))
        self._end -= kept.start
        self._first = min(self._first, 1)


def to_json(entries: Iterable[Entry]) -> dict[str, Any]:
    listed = {str(entry.trajectory_id): asdict(entry) for entry in entries}
    return {"trajectory_index": listed, "trajectory_id_list": [entry["trajectory_id"] for entry in listed.values()]}


def from_json(content: Mapping[str, Any], path: Path) -> list[Entry]:
    """Entries in their order; also of an index that RLinf wrote."""
    try:
        listed = content["trajectory_index"]
        entries = [_entry(listed[str(trajectory_id)]) for trajectory_id in content["trajectory_id_list"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not an index of trajectories: {error!r}") from None
    if any(left.trajectory_id >= right.trajectory_id for left, right in pairwise(entries)):
        raise DataError(f"{path} lists trajectories out of order or twice")
    return entries


def _entry(content: Mapping[str, Any]) -> Entry:
    entry = Entry(
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
