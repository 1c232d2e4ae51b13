"""Validation of trajectories before a replay buffer stores them, and of the schema that they share."""

from __future__ import annotations

import re

import numpy as np

from nightshift.data.replay.trajectory import FLAGS, NO_ROW, RowIndices, TrajectoryBatch, adjacent_rows
from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError

TrajectorySchema = dict[str, tuple[str, tuple[int, ...]]]
"""Name → dtype and shape of one row."""

WEIGHTS_ID = re.compile(r"[A-Za-z0-9-]{0,64}")
"""The weights id is part of file names."""


def check(trajectory: TrajectoryBatch) -> None:
    """Raise DataError with field, episode and step if a trajectory is inconsistent."""
    check_bounds(trajectory)
    for name, column in [*trajectory.columns().items(), *trajectory.frames.items()]:
        if column.dtype.name not in DTYPES or not column.dtype.isnative:
            raise DataError(f"{name} of a trajectory is {column.dtype}; it must be one of {', '.join(DTYPES)}")
    for name in FLAGS:
        column = getattr(trajectory, name)
        if column is not None and column.dtype != np.bool_:
            raise DataError(f"{name} of a trajectory is {column.dtype}, not bool")
    _check_identity(trajectory)
    _check_ends(trajectory)
    _check_finite(trajectory)


def check_bounds(trajectory: TrajectoryBatch) -> None:
    """Check what `gather` relies on to stay in bounds: all columns have all rows, and rows point to existing frames."""
    for name in ("episode", "t", "curr", "next"):
        column = getattr(trajectory, name)
        if column is not None and (column.dtype != np.int64 or column.ndim != len(("T", "B"))):
            raise DataError(f"{name} of a trajectory is {column.dtype} {list(column.shape)}, not int64 [T, B]")
    if not trajectory.num_samples:
        raise DataError(f"a trajectory of shape {list(trajectory.episode.shape)} has no steps")
    for name, column in trajectory.columns().items():
        if column.shape[:2] != trajectory.shape:
            steps, envs = trajectory.shape
            raise DataError(f"{name} of a trajectory has shape {list(column.shape)}, not [{steps}, {envs}, …]")
    for name, frames in trajectory.frames.items():
        for pointer in (trajectory.curr, trajectory.next):
            if pointer is not None and (pointer.min() < 0 or pointer.max() >= len(frames)):
                raise DataError(f"a trajectory has {len(frames)} frames of {name} and rows that point beyond them")
    if not WEIGHTS_ID.fullmatch(trajectory.model_weights_id):
        raise DataError(f"model_weights_id {trajectory.model_weights_id!r} is not made of letters, digits and dashes")


def schema(trajectory: TrajectoryBatch) -> TrajectorySchema:
    rows = {name: (column.dtype.name, column.shape[2:]) for name, column in trajectory.columns().items()}
    return rows | {
        f"frames.{name}": (frames.dtype.name, frames.shape[1:]) for name, frames in trajectory.frames.items()
    }


def check_schema(found: TrajectorySchema, wanted: TrajectorySchema) -> None:
    """All trajectories of a buffer must have the same fields, because one batch holds rows of several."""
    if found == wanted:
        return
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            raise DataError(
                f"{name} of a trajectory is {_describe(found, name)}; in this buffer it is {_describe(wanted, name)}",
                "use another buffer for trajectories with other fields",
            )


def _describe(schema: TrajectorySchema, name: str) -> str:
    if name not in schema:
        return "missing"
    dtype, shape = schema[name]
    return f"{dtype} {list(shape)}"


def _check_identity(trajectory: TrajectoryBatch) -> None:
    episode, t = trajectory.episode.ravel(), trajectory.t.ravel()
    order = np.lexsort((t, episode))
    same_episode = np.diff(episode[order]) == 0
    twice = np.flatnonzero(same_episode & (np.diff(t[order]) == 0))
    if len(twice):
        raise DataError(_at("a trajectory contains a step twice", trajectory, int(order[twice[0]])))
    env = order % trajectory.shape[1]
    crossing = np.flatnonzero(same_episode & (np.diff(env) != 0))
    if len(crossing):
        raise DataError(_at("an episode is in two environments", trajectory, int(order[1:][crossing[0]])))


def _check_ends(trajectory: TrajectoryBatch) -> None:
    _, after = adjacent_rows(trajectory.episode, trajectory.t)
    goes_on = after != NO_ROW
    ended = row_flags(trajectory.terminations) | row_flags(trajectory.truncations)
    wrong = np.flatnonzero(ended & goes_on)
    if len(wrong):
        raise DataError(_at("an episode continues after its end", trajectory, int(wrong[0])))
    if trajectory.next is not None:
        wrong = np.flatnonzero(goes_on & (trajectory.next.ravel() != trajectory.curr.ravel()[after]))
        if len(wrong):
            raise DataError(
                _at("the next frame of a step is not the current frame of the step after it", trajectory, int(wrong[0]))
            )


def _check_finite(trajectory: TrajectoryBatch) -> None:
    for name, column in trajectory.columns().items():
        wrong = _not_finite(column.reshape(trajectory.num_samples, -1))
        if len(wrong):
            raise DataError(_at(f"{name} of a trajectory is not finite", trajectory, int(wrong[0])))
    for name, frames in trajectory.frames.items():
        for wrong_frame in _not_finite(frames.reshape(len(frames), -1)):
            _refuse_frame(name, trajectory, int(wrong_frame))


def _refuse_frame(name: str, trajectory: TrajectoryBatch, frame: int) -> None:
    """Raise DataError with the step whose curr or next frame it is; a frame without a step is never read."""
    for pointer, field in ((trajectory.curr, "curr_obs"), (trajectory.next, "next_obs")):
        if pointer is not None and frame in pointer:
            row = int(np.flatnonzero(pointer == frame)[0])
            raise DataError(_at(f"{field}.{name} of a trajectory is not finite", trajectory, row))


def _not_finite(rows: Column) -> RowIndices:
    """The rows with NaN or infinity. Integer arrays (images) are skipped."""
    return np.flatnonzero(~np.isfinite(rows).all(axis=1)) if rows.dtype.kind == "f" else np.zeros(0, np.int64)


def row_flags(column: Column) -> Column:
    """One flag per row: whether any flag of the row is set."""
    return np.asarray(column.reshape(column.shape[0] * column.shape[1], -1).any(axis=1))


def _at(what: str, trajectory: TrajectoryBatch, row: int) -> str:
    episode, t = int(trajectory.episode.ravel()[row]), int(trajectory.t.ravel()[row])
    return f"{what} (episode {episode}, step {t})"
