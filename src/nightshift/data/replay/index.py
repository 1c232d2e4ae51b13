"""Which trajectories a buffer holds, oldest first, and which sample of which one a number means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.data.replay.trajectory import Rows, TrajectoryBatch
from nightshift.errors import DataError

INDEX = "trajectory_index.json"
LEGACY_INDEX = "trajector_index.json"
METADATA = "metadata.json"


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

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[int, Entry] = {}
        self._numbers = np.zeros((1024, 2), np.int64)  # by position: samples up to its end, id
        self._first = self._end = 0  # positions in use
        for entry in entries:
            self.append(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, trajectory_id: int) -> Entry:
        return self._entries[trajectory_id]

    def __contains__(self, trajectory_id: int) -> bool:
        return trajectory_id in self._entries

    @property
    def total_samples(self) -> int:
        return self._samples_before(self._end) - self._samples_before(self._first)

    def append(self, entry: Entry) -> None:
        if self._end == len(self._numbers):
            self._make_room()
        self._numbers[self._end] = self._samples_before(self._end) + entry.num_samples, entry.trajectory_id
        self._end += 1
        self._entries[entry.trajectory_id] = entry

    def pop_oldest(self) -> Entry:
        entry = self._entries.pop(int(self._numbers[self._first, 1]))
        self._first += 1
        return entry

    def set_sum(self, trajectory_id: int, sha256: str) -> None:
        self._entries[trajectory_id] = replace(self._entries[trajectory_id], sha256=sha256)

    def window_samples(self, newest: int) -> int:
        """Samples in the newest trajectories; 0 means all of them."""
        return self._samples_before(self._end) - self._samples_before(self._window_start(newest))

    def locate(self, samples: Rows, newest: int) -> tuple[Rows, Rows]:
        """For samples counted from the start of the window: ids of their trajectories, and their rows in them."""
        start = self._window_start(newest)
        samples = samples + self._samples_before(start)
        # As torch.bucketize(right=True): the first trajectory that ends beyond the sample.
        position = start + np.searchsorted(self._numbers[start : self._end, 0], samples, side="right")
        begins = np.where(position > 0, self._numbers[position - 1, 0], 0)
        return self._numbers[position, 1], samples - begins

    def _window_start(self, newest: int) -> int:
        return self._first if newest == 0 else max(self._first, self._end - newest)

    def _samples_before(self, position: int) -> int:
        return int(self._numbers[position - 1, 0]) if position else 0

    def _make_room(self) -> None:
        """Let go of what was popped, and double: both are paid for by the appends in between."""
        kept = self._numbers[max(self._first - 1, 0) : self._end].copy()
        self._first = min(self._first, 1)
        self._end = len(kept)
        self._numbers = np.zeros((max(1024, 2 * len(kept)), 2), np.int64)
        self._numbers[: len(kept)] = kept


def to_json(entries: Iterable[Entry]) -> dict[str, Any]:
    listed = {str(entry.trajectory_id): asdict(entry) for entry in entries}
    return {"trajectory_index": listed, "trajectory_id_list": [entry["trajectory_id"] for entry in listed.values()]}


def from_json(content: Mapping[str, Any], path: Path) -> list[Entry]:
    """Entries in their order; also of an index that RLinf wrote."""
    try:
        listed = content["trajectory_index"]
        return [_entry(listed[str(trajectory_id)]) for trajectory_id in content["trajectory_id_list"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not an index of trajectories: {error!r}") from None


def _entry(content: Mapping[str, Any]) -> Entry:
    return Entry(
        trajectory_id=int(content["trajectory_id"]),
        num_samples=int(content["num_samples"]),
        shape=tuple(int(size) for size in content["shape"]),
        max_episode_length=int(content["max_episode_length"]),
        model_weights_id=str(content["model_weights_id"]),
        sha256=str(content.get("sha256", "")),
    )
