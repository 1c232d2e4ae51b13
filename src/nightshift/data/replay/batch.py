"""Batches of rows from several trajectories, with frame stacks and n-step returns that stay inside an episode.

Both walk from a row to the row of the step before or after, which is known by (episode, t). Where there is none (the
episode starts or ends, steps are missing, the trajectory ends) the walk stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.replay.gather import Addresses, address, gather, prefetch
from nightshift.data.replay.trajectory import FORWARD_INPUTS, NONE, Rows, TrajectoryBatch, neighbours
from nightshift.data.tensors import Column
from nightshift.errors import DataError

Batch = dict[str, Any]
"""Arrays [n, …] by the rollout's keys; "curr_obs", "next_obs" and "forward_inputs" hold arrays by name."""

_LAST_STEP = ("terminations", "truncations", "dones")
"""Of an n-step transition these say how its last step ended."""


@dataclass(frozen=True, kw_only=True)
class View:
    """How a row becomes a transition: its last `stack` frames, its rewards over the next `n_step` steps."""

    stack: int = 1
    n_step: int = 1
    discount: float | None = None

    def __post_init__(self) -> None:
        if self.stack < 1 or self.n_step < 1:
            raise DataError(f"stack is {self.stack} and n_step is {self.n_step}; both must be at least 1")
        if self.n_step > 1 and self.discount is None:
            raise DataError(f"a return over {self.n_step} steps needs a discount", "pass `discount`")


class Flat:
    """A trajectory with its rows end to end, R = T·B, and where its arrays lie."""

    def __init__(self, trajectory: TrajectoryBatch) -> None:
        self.trajectory = trajectory
        self.columns = {name: a.reshape(-1, *a.shape[2:]) for name, a in trajectory.columns().items()}
        self.frames = trajectory.frames
        self.addresses = {name: address(column) for name, column in self.columns.items()}
        self.frame_addresses = {name: address(frames) for name, frames in self.frames.items()}

    @cached_property
    def neighbours(self) -> tuple[Rows, Rows]:
        """[R] the row before and the row after each row."""
        return neighbours(self.trajectory.episode, self.trajectory.t)


def assemble(flats: Sequence[Flat], which: Rows, rows: Rows, view: View, *, cold: bool) -> Batch:
    """The transitions that begin at row `rows[i]` of trajectory `flats[which[i]]`; `cold`: most are still on disk."""
    table = _Table(flats, which)
    last, rewards, steps = _returns(table, rows, view)
    batch: Batch = {"rewards": rewards}
    for name in flats[0].columns:
        if name not in ("rewards", "curr", "next"):
            batch[name] = table.column(name, last if name in _LAST_STEP else rows)
    batch["mask"] = 1 - batch["terminations"].reshape(len(rows), -1).any(axis=1).astype(np.float32)
    batch["discounts"] = _power(view, steps).astype(np.float32)
    wanted = {"curr_obs": table.column("curr", _history(table, rows, view.stack))}
    if flats[0].trajectory.next is not None:
        seen = table.column("curr", _history(table, last, view.stack - 1)) if view.stack > 1 else None
        led_to = table.column("next", last)[:, None]
        wanted["next_obs"] = led_to if seen is None else np.concatenate([seen, led_to], axis=1)
    batch |= table.frames(wanted, squeeze=view.stack == 1, cold=cold)
    return _nested(batch)


class _Table:
    """The same rows of the same trajectories, for every column."""

    def __init__(self, flats: Sequence[Flat], which: Rows) -> None:
        self.flats = flats
        self._which = which

    def column(self, name: str, rows: Rows) -> Column:
        """`rows` is [n, …], its entries valid; the result has one more of the column's own shape per entry."""
        columns = [flat.columns[name] for flat in self.flats]
        return self._take([flat.addresses[name] for flat in self.flats], columns[0], rows)

    def before(self, rows: Rows) -> Rows:
        return self._neighbour(0, rows)

    def after(self, rows: Rows) -> Rows:
        return self._neighbour(1, rows)

    def frames(self, wanted: Mapping[str, Rows], *, squeeze: bool, cold: bool) -> dict[str, dict[str, Column]]:
        """Frames by key and name, for frame numbers [n, k]; k is dropped if `squeeze`."""
        jobs: list[tuple[Addresses, Column]] = []
        found: dict[str, dict[str, Column]] = {}
        for key, numbers in wanted.items():
            found[key] = {}
            for name, example in self.flats[0].frames.items():
                sources = self._sources([flat.frame_addresses[name] for flat in self.flats], example, numbers)
                out = np.empty((numbers.size, *example.shape[1:]), example.dtype)
                jobs.append((sources, out))
                shape = numbers.shape[:1] if squeeze else numbers.shape
                found[key][name] = out.reshape(*shape, *example.shape[1:])
        if cold:
            for sources, out in jobs:
                prefetch(sources, out.nbytes // len(out))
        for sources, out in jobs:
            gather(sources, out)
        return found

    def _neighbour(self, side: int, rows: Rows) -> Rows:
        columns = [flat.neighbours[side] for flat in self.flats]
        return self._take([address(column) for column in columns], columns[0], rows)

    def _take(self, bases: list[int], example: Column, rows: Rows) -> Column:
        out = np.empty((rows.size, *example.shape[1:]), example.dtype)
        gather(self._sources(bases, example, rows), out)
        return out.reshape(*rows.shape, *example.shape[1:])

    def _sources(self, bases: list[int], example: Column, rows: Rows) -> Addresses:
        row_bytes = example.nbytes // len(example)
        per_row = np.array(bases, np.int64)[self._which].reshape(-1, *[1] * (rows.ndim - 1))
        return (per_row + rows * row_bytes).ravel()


def _returns(table: _Table, rows: Rows, view: View) -> tuple[Rows, Column, NDArray[np.int64]]:
    """The last row of each n-step transition, the discounted sum of its rewards, and how many steps it has."""
    last, steps = rows, np.ones(len(rows), np.int64)
    rewards = table.column("rewards", rows)
    if view.n_step == 1:
        return last, rewards, steps
    going = np.ones(len(rows), np.bool_)
    returns = rewards.astype(np.float64)
    for _ in range(view.n_step - 1):
        # An episode does not go on after its end (`checks`), so there is no need to ask whether a row ended it.
        after = table.after(last)
        going &= after != NONE
        last = np.where(going, after, last)
        weight = np.where(going, _power(view, steps), 0)
        returns += table.column("rewards", last) * weight.reshape(-1, *[1] * (returns.ndim - 1))
        steps += going
    return last, returns.astype(rewards.dtype if rewards.dtype.kind == "f" else np.float32), steps


def _power(view: View, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.power(1.0 if view.discount is None else view.discount, steps)


def _history(table: _Table, rows: Rows, length: int) -> Rows:
    """[n, length] the rows of the last steps up to `rows`, oldest first; before the first there is the first again."""
    history = [rows]
    for _ in range(length - 1):
        before = table.before(history[-1])
        history.append(np.where(before == NONE, history[-1], before))
    return np.stack(history[::-1], axis=1)


def _nested(batch: Batch) -> Batch:
    free = {name: batch.pop(name) for name in list(batch) if name.startswith(FORWARD_INPUTS)}
    if free:
        batch["forward_inputs"] = {name.removeprefix(FORWARD_INPUTS): column for name, column in free.items()}
    return batch
