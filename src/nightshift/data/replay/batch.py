"""Batches of transitions from several trajectories, with frame stacks and n-step returns that stay inside an episode.

Both follow the (episode, t) of a row to the previous or next step. They stop where that step is not in the trajectory:
at the start or end of the episode, at missing steps, and at the end of the trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.replay.address_table import AFTER, BEFORE, FRAMES, Selection
from nightshift.data.replay.buffer_pool import BufferPool
from nightshift.data.replay.gather import Addresses, Rows, gather, gather_all, prefetch
from nightshift.data.replay.trajectory import FORWARD_INPUTS, NO_ROW, RowIndices
from nightshift.data.tensors import Column
from nightshift.errors import DataError

TransitionBatch = dict[str, Any]
"""Arrays [n, …] under RLinf's keys; "curr_obs", "next_obs" and "forward_inputs" are dicts of arrays."""

_LAST_STEP = ("terminations", "truncations", "dones")
"""An n-step transition has these flags of its last step."""


@dataclass(frozen=True, kw_only=True)
class TransitionSpec:
    """How a row becomes a transition: how many frames are stacked, and the length and discount of the return."""

    frame_stack: int = 1
    n_step: int = 1
    discount: float | None = None

    def __post_init__(self) -> None:
        if self.frame_stack < 1 or self.n_step < 1:
            raise DataError(f"frame_stack is {self.frame_stack} and n_step is {self.n_step}; both must be at least 1")
        if self.n_step > 1 and self.discount is None:
            raise DataError(f"a return over {self.n_step} steps needs a discount", "pass `discount`")


def assemble(selection: Selection, rows: RowIndices, spec: TransitionSpec, *, cold: bool) -> TransitionBatch:
    """The transitions that begin at these rows, with frames as `Rows`; `cold` if some files may not be cached yet."""
    reader = _Reader(selection)
    last, rewards, steps = _returns(reader, rows, spec)
    batch: TransitionBatch = {"rewards": rewards}
    trajectory = selection.example.trajectory
    for name in trajectory.columns():
        if name not in ("rewards", "curr", "next"):
            batch[name] = reader.column(name, last if name in _LAST_STEP else rows)
    batch["mask"] = 1 - batch["terminations"].reshape(len(rows), -1).any(axis=1).astype(np.float32)
    batch["discounts"] = _power(spec, steps).astype(np.float32)
    wanted = {"curr_obs": reader.column("curr", _history(reader, rows, spec.frame_stack))}
    if trajectory.next is not None:
        next_frames = reader.column("next", last)[:, None]
        earlier = [reader.column("curr", _history(reader, last, spec.frame_stack - 1))] if spec.frame_stack > 1 else []
        wanted["next_obs"] = np.concatenate([*earlier, next_frames], axis=1)
    batch |= reader.frames(wanted, squeeze=spec.frame_stack == 1, cold=cold)
    return _nested(batch)


def gathered(batch: TransitionBatch, pool: BufferPool) -> TransitionBatch:
    """The batch with all of its `Rows` copied into arrays."""
    jobs: list[tuple[Addresses, Column]] = []
    complete = _with_arrays(batch, pool, jobs)
    gather_all(jobs)
    return complete


def _with_arrays(batch: TransitionBatch, pool: BufferPool, jobs: list[tuple[Addresses, Column]]) -> TransitionBatch:
    """The batch with arrays in place of `Rows`, which are filled by `jobs`."""
    complete: TransitionBatch = {}
    for name, value in batch.items():
        complete[name] = value
        if isinstance(value, dict):
            complete[name] = _with_arrays(value, pool, jobs)
        elif isinstance(value, Rows):
            complete[name] = pool.empty(value.shape, value.dtype)
            sources = value.addresses.ravel()
            if value.is_cold:
                prefetch(sources, complete[name].nbytes // len(sources))
            jobs.append((sources, complete[name].reshape(len(sources), -1)))
    return complete


class _Reader:
    """Reads columns of the trajectories of one batch."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection

    def column(self, name: str, rows: RowIndices) -> Column:
        """The column's values [n, …, …] at row numbers [n, …], row i in the trajectory of sample i."""
        example = self._selection.example.arrays[name]
        out: Column = np.empty((rows.size, *example.shape[1:]), example.dtype)
        gather(self._addresses(name, rows).ravel(), out)
        return out.reshape(*rows.shape, *out.shape[1:])

    def frames(self, wanted: Mapping[str, RowIndices], *, squeeze: bool, cold: bool) -> dict[str, dict[str, Rows]]:
        """Frames by key and camera name, for frame numbers [n, k]; `squeeze` drops the axis k."""
        return {
            key: {
                name: self._frames_of(name, numbers, squeeze=squeeze, cold=cold)
                for name in self._selection.example.trajectory.frames
            }
            for key, numbers in wanted.items()
        }

    def _frames_of(self, name: str, numbers: RowIndices, *, squeeze: bool, cold: bool) -> Rows:
        example = self._selection.example.arrays[f"{FRAMES}{name}"]
        return Rows(
            addresses=self._addresses(f"{FRAMES}{name}", numbers),
            shape=(*(numbers.shape[:1] if squeeze else numbers.shape), *example.shape[1:]),
            dtype=example.dtype,
            owners=(self._selection,),
            is_cold=cold,
        )

    def _addresses(self, name: str, rows: RowIndices) -> Addresses:
        """The address of the column's row in memory for each of the row numbers [n, …]."""
        example = self._selection.example.arrays[name]
        base_addresses = self._selection.base_addresses[:, self._selection.columns[name]]
        sources: Addresses = base_addresses.reshape(-1, *[1] * (rows.ndim - 1)) + rows * (
            example.nbytes // len(example)
        )
        return sources


def _returns(reader: _Reader, rows: RowIndices, spec: TransitionSpec) -> tuple[RowIndices, Column, NDArray[np.int64]]:
    """The last row of each n-step transition, the discounted sum of its rewards, and its number of steps."""
    last, steps = rows, np.ones(len(rows), np.int64)
    rewards = reader.column("rewards", rows)
    if spec.n_step == 1:
        return last, rewards, steps
    going = np.ones(len(rows), np.bool_)
    returns = rewards.astype(np.float64)
    for _ in range(spec.n_step - 1):
        # No step follows the end of an episode (`validation` checks that), so the end flags need not be read here.
        after = reader.column(AFTER, last)
        going &= after != NO_ROW
        last = np.where(going, after, last)
        weight = np.where(going, _power(spec, steps), 0)
        returns += reader.column("rewards", last) * weight.reshape(-1, *[1] * (returns.ndim - 1))
        steps += going
    return last, returns.astype(rewards.dtype if rewards.dtype.kind == "f" else np.float32), steps


def _power(spec: TransitionSpec, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.power(1.0 if spec.discount is None else spec.discount, steps)


def _history(reader: _Reader, rows: RowIndices, length: int) -> RowIndices:
    """[n, length] the last steps up to `rows`, oldest first; before its start an episode repeats its first step."""
    history = [rows]
    for _ in range(length - 1):
        before = reader.column(BEFORE, history[-1])
        history.append(np.where(before == NO_ROW, history[-1], before))
    return np.stack(history[::-1], axis=1)


def _nested(batch: TransitionBatch) -> TransitionBatch:
    free = {name: batch.pop(name) for name in list(batch) if name.startswith(FORWARD_INPUTS)}
    if free:
        batch["forward_inputs"] = {name.removeprefix(FORWARD_INPUTS): column for name, column in free.items()}
    return batch
