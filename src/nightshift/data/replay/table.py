"""Trajectories that are at hand, and where in memory each of their arrays lies: one row of addresses per trajectory.

All trajectories of a table have the same fields, so rows of any of them are found by adding numbers, however many there
are. A trajectory has a slot, which is the number of its row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nightshift.data.replay.checks import Schema, check_schema, schema
from nightshift.data.replay.gather import Addresses, address
from nightshift.data.replay.trajectory import Rows, TrajectoryBatch, neighbours

BEFORE = "before"
AFTER = "after"
"""[R] columns of every trajectory: the row of the step before and after each row, or NONE."""
FRAMES = "frames."


class Flat:
    """A trajectory with its rows end to end, R = T·B."""

    def __init__(self, trajectory: TrajectoryBatch) -> None:
        self.trajectory = trajectory
        self.schema = schema(trajectory)
        before, after = neighbours(trajectory.episode, trajectory.t)
        self.arrays = {
            **{name: column.reshape(-1, *column.shape[2:]) for name, column in trajectory.columns().items()},
            **{f"{FRAMES}{name}": frames for name, frames in trajectory.frames.items()},
            BEFORE: before,
            AFTER: after,
        }
        self.addresses = [address(self.arrays[name]) for name in sorted(self.arrays)]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The trajectories of n samples: one may be there many times."""

    columns: dict[str, int]  # name → its column in `bases`
    bases: Addresses  # [n, columns] where the arrays of each sample's trajectory begin
    held: tuple[Flat | None, ...]  # keeps what lies at these addresses alive

    @property
    def example(self) -> Flat:
        assert self.held[0] is not None
        return self.held[0]


class Table:
    """Changed and read under the buffer's lock; a selection is good for as long as it is held."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty, and open to any fields."""
        self.schema: Schema = {}
        self._columns: dict[str, int] = {}
        self._addresses = np.zeros((0, 0), np.int64)
        self._flats: list[Flat | None] = []
        self._free: list[int] = []

    def check(self, form: Schema) -> None:
        """Refuse what does not have the fields of the others."""
        if self.schema:
            check_schema(form, self.schema)

    def put(self, flat: Flat) -> int:
        """Its slot."""
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

    def flat(self, slot: int) -> Flat:
        flat = self._flats[slot]
        assert flat is not None
        return flat

    def remove(self, slot: int) -> None:
        self._flats[slot] = None
        self._free.append(slot)

    def select(self, slots: Rows) -> Selection:
        held = tuple(map(self._flats.__getitem__, slots.tolist()))
        return Selection(columns=self._columns, bases=self._addresses[slots], held=held)
