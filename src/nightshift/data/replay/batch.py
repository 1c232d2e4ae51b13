"""Batches of rows from several trajectories, with frame stacks and n-step returns that stay inside an episode.

Both walk from a row to the row of the step before or after, which is known by (episode, t). Where there is none (the
episode starts or ends, steps are missing, the trajectory ends) the walk stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.replay.gather import Addresses, gather, gather_all, prefetch
from nightshift.data.replay.recycling import Recycler
from nightshift.data.replay.table import AFTER, BEFORE, FRAMES, Selection
from nightshift.data.replay.trajectory import FORWARD_INPUTS, NONE, Rows
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


def assemble(selection: Selection, rows: Rows, view: View, recycler: Recycler, *, cold: bool) -> Batch:
    """The transitions that begin at these rows of the selected trajectories; `cold`: some are still on disk."""
    reader = _Reader(selection, recycler)
    last, rewards, steps = _returns(reader, rows, view)
    batch: Batch = {"rewards": rewards}
    trajectory = selection.example.trajectory
    for name in trajectory.columns():
        if name not in ("rewards", "curr", "next"):
            batch[name] = reader.column(name, last if name in _LAST_STEP else rows)
    batch["mask"] = 1 - batch["terminations"].reshape(len(rows), -1).any(axis=1).astype(np.float32)
    batch["discounts"] = _power(view, steps).astype(np.float32)
    wanted = {"curr_obs": reader.column("curr", _history(reader, rows, view.stack))}
    if trajectory.next is not None:
        led_to = reader.column("next", last)[:, None]
        seen = [reader.column("curr", _history(reader, last, view.stack - 1))] if view.stack > 1 else []
        wanted["next_obs"] = np.concatenate([*seen, led_to], axis=1)
    batch |= reader.frames(wanted, squeeze=view.stack == 1, cold=cold)
    return _nested(batch)


class _Reader:
    """Reads the same samples' trajectories, column by column."""

    def __init__(self, selection: Selection, recycler: Recycler) -> None:
        self._selection = selection
        self._recycler = recycler

    def column(self, name: str, rows: Rows) -> Column:
        """For row numbers [n, …] that are in the trajectories: the column's entries [n, …, …]."""
        sources, out = self._job(name, rows)
        gather(sources, out)
        return out.reshape(*rows.shape, *out.shape[1:])

    def frames(self, wanted: Mapping[str, Rows], *, squeeze: bool, cold: bool) -> dict[str, dict[str, Column]]:
        """Frames by key and name, for frame numbers [n, k]; k is dropped if `squeeze`."""
        jobs: list[tuple[Addresses, Column]] = []
        found: dict[str, dict[str, Column]] = {}
        for key, numbers in wanted.items():
            found[key] = {}
            shape = numbers.shape[:1] if squeeze else numbers.shape
            for name in self._selection.example.trajectory.frames:
                sources, out = self._job(f"{FRAMES}{name}", numbers)
                jobs.append((sources, out))
                found[key][name] = out.reshape(*shape, *out.shape[1:])
        if cold:
            for sources, out in jobs:
                prefetch(sources, out.nbytes // len(out))
        gather_all(jobs)
        return found

    def _job(self, name: str, rows: Rows) -> tuple[Addresses, Column]:
        """Where the entries lie, and room for them."""
        example = self._selection.example.arrays[name]
        bases = self._selection.bases[:, self._selection.columns[name]].reshape(-1, *[1] * (rows.ndim - 1))
        sources = (bases + rows * (example.nbytes // len(example))).ravel()
        return sources, self._recycler.empty((rows.size, *example.shape[1:]), example.dtype)


def _returns(reader: _Reader, rows: Rows, view: View) -> tuple[Rows, Column, NDArray[np.int64]]:
    """The last row of each n-step transition, the discounted sum of its rewards, and how many steps it has."""
    last, steps = rows, np.ones(len(rows), np.int64)
    rewards = reader.column("rewards", rows)
    if view.n_step == 1:
        return last, rewards, steps
    going = np.ones(len(rows), np.bool_)
    returns = rewards.astype(np.float64)
    for _ in range(view.n_step - 1):
        # An episode does not go on after its end (`checks`), so there is no need to ask whether a row ended it.
        after = reader.column(AFTER, last)
        going &= after != NONE
        last = np.where(going, after, last)
        weight = np.where(going, _power(view, steps), 0)
        returns += reader.column("rewards", last) * weight.reshape(-1, *[1] * (returns.ndim - 1))
        steps += going
    return last, returns.astype(rewards.dtype if rewards.dtype.kind == "f" else np.float32), steps


def _power(view: View, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.power(1.0 if view.discount is None else view.discount, steps)


def _history(reader: _Reader, rows: Rows, length: int) -> Rows:
    """[n, length] the rows of the last steps up to `rows`, oldest first; before the first there is the first again."""
    history = [rows]
    for _ in range(length - 1):
        before = reader.column(BEFORE, history[-1])
        history.append(np.where(before == NONE, history[-1], before))
    return np.stack(history[::-1], axis=1)


def _nested(batch: Batch) -> Batch:
    free = {name: batch.pop(name) for name in list(batch) if name.startswith(FORWARD_INPUTS)}
    if free:
        batch["forward_inputs"] = {name.removeprefix(FORWARD_INPUTS): column for name, column in free.items()}
    return batch
