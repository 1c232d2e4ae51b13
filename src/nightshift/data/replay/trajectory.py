"""A trajectory [T, B, …]: T steps of B parallel environments, each with one or several episodes.

Every row records its episode and step, so the order of steps never depends on the order of rows. Observations are
frames that rows point to, so each frame is stored once: the next frame of a step is the current frame of the step after
it, wherever that step is in the trajectory.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.mmap import MappedFile
from nightshift.data.tensors import Column
from nightshift.errors import DataError

NO_ROW = -1
"""Stands for a missing row number."""

RowIndices = NDArray[np.int64]

_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class TrajectoryBatch:
    """T × B transitions. Row t·B + b is step t of environment b."""

    episode: RowIndices  # [T, B] the episode of the step
    t: RowIndices  # [T, B] the number of the step in its episode
    actions: Column  # [T, B, …]
    rewards: Column  # [T, B, …]
    terminations: Column  # [T, B, …] bool: the task ended, do not bootstrap
    truncations: Column  # [T, B, …] bool: a time limit or a person ended the episode
    frames: Mapping[str, Column]  # each [F, …]: every observation, stored once
    curr: RowIndices  # [T, B] the frame before the action
    next: RowIndices | None  # [T, B] the frame after the action; None if it was not recorded
    dones: Column | None = None  # [T, B, …] bool
    intervene_flags: Column | None = None  # [T, B, …] bool: a person intervened
    versions: Column | None = None  # [T, B, …] policy version
    prev_logprobs: Column | None = None  # [T, B, …] log-probabilities of the actions under the behaviour policy
    prev_values: Column | None = None  # [T, B, …]
    forward_inputs: Mapping[str, Column] = field(default_factory=dict)  # each [T, B, …]: other model inputs
    max_episode_length: int = 0
    model_weights_id: str = ""

    @classmethod
    def from_observations(
        cls,
        curr_obs: Mapping[str, Column],
        next_obs: Mapping[str, Column],
        episode: RowIndices,
        t: RowIndices,
        columns: Mapping[str, Any],
    ) -> TrajectoryBatch:
        """From observations before and after each step, each [T, B, …]; `columns` are the other fields by name.

        next_obs of a step and curr_obs of the step after it must be equal byte for byte.
        """
        frames, curr, after = deduplicate_frames(curr_obs, next_obs, episode, t)
        return cls(frames=frames, curr=curr, next=after, episode=episode, t=t, **_with_weights_id(columns))

    @classmethod
    def from_episode_steps(
        cls,
        observations: Mapping[str, Column],
        columns: Mapping[str, Any],
        *,
        episode: int,
        terminated: bool,
        truncated: bool,
    ) -> TrajectoryBatch:
        """One environment with one episode: observations, each [N, …], and `columns` of N - 1 transitions.

        Nothing is copied, so memory-mapped arrays stay memory-mapped.
        """
        steps = len(columns["rewards"])
        last = np.arange(steps)[:, None] == steps - 1
        columns_of_env = {
            name: {key: value[:, None] for key, value in column.items()}
            if isinstance(column, Mapping)
            else column[:, None]
            for name, column in columns.items()
        }
        return cls(
            episode=np.full((steps, 1), episode, np.int64),
            t=np.arange(steps)[:, None],
            terminations=last & terminated,
            truncations=last & truncated,
            frames=observations,
            curr=np.arange(steps)[:, None],
            next=np.arange(1, steps + 1)[:, None],
            max_episode_length=steps,
            **_with_weights_id(columns_of_env),
        )

    @property
    def shape(self) -> tuple[int, int]:
        steps, envs = self.episode.shape
        return steps, envs

    @property
    def num_samples(self) -> int:
        return self.episode.size

    @property
    def curr_obs(self) -> dict[str, Column]:
        """The observations before each action, each [T, B, …]."""
        return {name: frames[self.curr] for name, frames in self.frames.items()}

    @property
    def next_obs(self) -> dict[str, Column]:
        """The observations after each action, each [T, B, …]."""
        return {} if self.next is None else {name: frames[self.next] for name, frames in self.frames.items()}

    def columns(self) -> dict[str, Column]:
        """Every array with a value per step, by name; forward inputs are named "forward_inputs.x"."""
        plain = {name: getattr(self, name) for name in COLUMNS}
        free = {f"{FORWARD_INPUTS}{name}": column for name, column in self.forward_inputs.items()}
        return {name: column for name, column in (plain | free).items() if column is not None}


FORWARD_INPUTS = "forward_inputs."
_NOT_COLUMNS = ("frames", "forward_inputs", "max_episode_length", "model_weights_id")
COLUMNS = tuple(entry.name for entry in fields(TrajectoryBatch) if entry.name not in _NOT_COLUMNS)
FLAGS = ("terminations", "truncations", "dones", "intervene_flags")


def as_immutable(trajectory: TrajectoryBatch, *, copy: bool = False) -> TrajectoryBatch:
    """The trajectory in immutable arrays: copies mutable arrays, or all arrays if `copy` is set.

    Copies share one block of memory, because a sample reads all columns of a row.
    """
    values: dict[str, Any] = {entry.name: getattr(trajectory, entry.name) for entry in fields(trajectory)}
    arrays = [
        array
        for value in values.values()
        for array in (value.values() if isinstance(value, Mapping) else [value])
        if isinstance(array, np.ndarray) and (copy or _is_mutable(array) or not array.flags.c_contiguous)
    ]
    copies = dict(zip(map(id, arrays), _copied(arrays), strict=True))
    for name, value in values.items():
        if isinstance(value, Mapping):
            values[name] = {key: copies.get(id(array), array) for key, array in value.items()}
        else:
            values[name] = copies.get(id(value), value)
    return TrajectoryBatch(**values)


def _is_mutable(array: Column) -> bool:
    """Whether the memory can be written through the array or through an array that it is a view of."""
    memory: Any = array
    while memory is not None:
        if isinstance(memory, np.ndarray):
            if memory.flags.writeable:
                return True
            memory = memory.base
        elif isinstance(memory, memoryview):
            memory = memory.obj
        else:
            return not _is_read_only(memory)
    return False


def _is_read_only(memory: Any) -> bool:
    if isinstance(memory, MappedFile):
        return True
    try:
        return memoryview(memory).readonly
    except (TypeError, ValueError):
        return False


def _copied(arrays: Sequence[Column]) -> list[Column]:
    """Read-only copies in one block of memory."""
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays], dtype=np.int64)
    block = np.empty(int(ends[-1]) if arrays else 0, np.uint8)
    copies = []
    for array, start in zip(arrays, [0, *ends.tolist()], strict=False):
        place: Column = block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        place[...] = array
        place.flags.writeable = False
        copies.append(place)
    block.flags.writeable = False
    return copies


def weights_id(versions: Column) -> str:
    """RLinf's id of the weights of these policy versions."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, versions.tobytes().hex()))


def adjacent_rows(episode: RowIndices, t: RowIndices) -> tuple[RowIndices, RowIndices]:
    """The rows of the previous and of the next step for each row of `episode.ravel()`, or NO_ROW."""
    episode, t = episode.ravel(), t.ravel()
    order = np.lexsort((t, episode))
    follows = (np.diff(episode[order]) == 0) & (np.diff(t[order]) == 1)
    earlier, later = order[:-1][follows], order[1:][follows]
    before, after = np.full(len(order), NO_ROW), np.full(len(order), NO_ROW)
    before[later] = earlier
    after[earlier] = later
    return before, after


def deduplicate_frames(
    curr_obs: Mapping[str, Column], next_obs: Mapping[str, Column], episode: RowIndices, t: RowIndices
) -> tuple[dict[str, Column], RowIndices, RowIndices | None]:
    """The distinct frames of a trajectory, and the numbers of the curr and the next frame of each step."""
    steps, envs = episode.shape
    flat_curr = {name: _flat(f"curr_obs.{name}", obs, (steps, envs)) for name, obs in curr_obs.items()}
    if not next_obs:
        return flat_curr, np.arange(steps * envs).reshape(steps, envs), None
    if set(next_obs) != set(curr_obs):
        raise DataError(f"next_obs has {sorted(next_obs)} and curr_obs has {sorted(curr_obs)}: they must be the same")
    flat_next = {name: _flat(f"next_obs.{name}", obs, (steps, envs)) for name, obs in next_obs.items()}
    _, after = adjacent_rows(episode, t)
    for name, obs in flat_curr.items():
        _check_shared(name, obs, flat_next[name], after, (episode.ravel(), t.ravel()))
    alone = np.flatnonzero(after == NO_ROW)  # their next frame is not the curr frame of any step
    position, extra = _frame_positions(steps, envs, alone)
    frames = {}
    for name, obs in flat_curr.items():
        frames[name] = np.empty((len(obs) + len(alone), *obs.shape[1:]), obs.dtype)
        frames[name][position] = obs
        frames[name][extra] = flat_next[name][alone]
    after_frame = position[after]
    after_frame[alone] = extra
    return frames, position.reshape(steps, envs), after_frame.reshape(steps, envs)


def _frame_positions(steps: int, envs: int, alone: RowIndices) -> tuple[RowIndices, RowIndices]:
    """The order of frames: environment by environment, so that curr and next frame are adjacent on disk."""
    rows = np.arange(steps * envs)
    owner = np.concatenate([rows, alone])
    is_extra = np.repeat([0, 1], [len(rows), len(alone)])
    order = np.lexsort((is_extra, owner // envs, owner % envs))
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position[: len(rows)], position[len(rows) :]


def _check_shared(
    name: str, curr_obs: Column, next_obs: Column, after: RowIndices, identity: tuple[RowIndices, RowIndices]
) -> None:
    if curr_obs.dtype != next_obs.dtype or curr_obs.shape != next_obs.shape:
        raise DataError(
            f"next_obs.{name} is {next_obs.dtype} {list(next_obs.shape[1:])} "
            f"and curr_obs.{name} is {curr_obs.dtype} {list(curr_obs.shape[1:])}: they must be the same"
        )
    rows = np.flatnonzero(after != NO_ROW)
    left, right = (a.reshape(len(a), -1).view(np.uint8) for a in (next_obs, curr_obs))
    for row in rows:
        if not np.array_equal(left[row], right[after[row]]):
            episode, t = int(identity[0][row]), int(identity[1][row])
            raise DataError(
                f"next_obs.{name} of episode {episode}, step {t} is not curr_obs.{name} of step {t + 1}",
                "give steps that are not consecutive different episodes, or leave a gap in `t`",
            )


def _flat(name: str, column: Column, shape: tuple[int, int]) -> Column:
    if column.shape[:2] != shape:
        raise DataError(f"{name} has shape {list(column.shape)}; it must start with [{shape[0]}, {shape[1]}]")
    return np.ascontiguousarray(column).reshape(-1, *column.shape[2:])


def _with_weights_id(columns: Mapping[str, Any]) -> dict[str, Any]:
    versions = columns.get("versions")
    return {"model_weights_id": "" if versions is None else weights_id(versions), **columns}
