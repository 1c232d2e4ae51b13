"""Open trajectories and the memory addresses of their arrays: one row of addresses per trajectory.

All trajectories of a table have the same fields, so the address of any row of any trajectory is an addition in numpy.
The slot of a trajectory is the number of its row in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nightshift.data.replay import validation
from nightshift.data.replay.gather import Addresses, address
from nightshift.data.replay.trajectory import RowIndices, TrajectoryBatch, adjacent_rows
from nightshift.data.replay.validation import TrajectorySchema, check_schema

BEFORE = "before"
AFTER = "after"
"""[R] columns of every trajectory: the rows of the previous and the next step, or NO_ROW."""
FRAMES = "frames."


class FlatTrajectory:
    """A trajectory with its time and environment axes flattened to R = T·B rows."""

    def __init__(self, trajectory: TrajectoryBatch) -> None:
        self.trajectory = trajectory
        self.schema = validation.schema(trajectory)
        before, after = adjacent_rows(trajectory.episode, trajectory.t)
        self.arrays = {
            **{name: column.reshape(-1, *column.shape[2:]) for name, column in trajectory.columns().items()},
            **{f"{FRAMES}{name}": frames for name, frames in trajectory.frames.items()},
            BEFORE: before,
            AFTER: after,
        }
        self.addresses = [address(self.arrays[name]) for name in sorted(self.arrays)]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The trajectory of each of n samples; a trajectory may occur several times."""

    columns: dict[str, int]  # name → its column in `base_addresses`
    base_addresses: Addresses  # [n, columns] start addresses of the arrays of each sample's trajectory
    trajectories: tuple[FlatTrajectory | None, ...]  # keeps the arrays at these addresses alive

    @property
    def example(self) -> FlatTrajectory:
        assert self.trajectories[0] is not None
        return self.trajectories[0]


class AddressTable:
    """Accessed under the buffer's lock. A selection stays valid without it, since it keeps its trajectories alive."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all trajectories and the schema."""
        self.schema: TrajectorySchema = {}
        self._columns: dict[str, int] = {}
        self._addresses = np.zeros((0, 0), np.int64)
        self._flats: list[FlatTrajectory | None] = []
        self._free: list[int] = []

    def check(self, schema: TrajectorySchema) -> None:
        """Raise DataError if the schema differs from that of the table."""
        if self.schema:
            check_schema(schema, self.schema)

    def put(self, flat: FlatTrajectory) -> int:
        """Add a trajectory and return its slot."""
        self.check(flat.schema)
        if not self.schema:
            self.schema = flat.schema
            self._columns = {name: column for column, name in enumerate(sorted(flat.arrays))}
            self._addresses = np.zeros((64, len(self._columns)), np.int64)
        if not self._free:
            self._free.append(len(self._flats))
            self._flats.append(None)
        slot = self._free.pop()
        if slot == len(self._addresses):
            self._addresses = np.concatenate([self._addresses, np.zeros_like(self._addresses)])
        self._addresses[slot] = flat.addresses
        self._flats[slot] = flat
        return slot

    def flat(self, slot: int) -> FlatTrajectory:
        flat = self._flats[slot]
        assert flat is not None
        return flat

    def remove(self, slot: int) -> None:
        self._flats[slot] = None
        self._free.append(slot)

    def select(self, slots: RowIndices) -> Selection:
        trajectories = tuple(map(self._flats.__getitem__, slots.tolist()))
        return Selection(columns=self._columns, base_addresses=self._addresses[slots], trajectories=trajectories)
