"""A trajectory [T, B, …]: T steps of B lanes, each lane holding one or several episodes.

Every row says which step of which episode it is, so what follows what is known and never guessed from how rows lie
beside each other. Observations are frames that rows point to, so a frame is there once: what a step led to is what the
next step saw, wherever the next step is in the trajectory.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.tensors import Column
from nightshift.errors import DataError

NONE = -1
"""In place of a row: there is none."""

Rows = NDArray[np.int64]

_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class TrajectoryBatch:
    """T × B transitions. Row t·B + b is step t of lane b."""

    episode: Rows  # [T, B] which episode the step belongs to
    t: Rows  # [T, B] which step of it; from t to t + 1 the world moved on once
    actions: Column  # [T, B, …]
    rewards: Column  # [T, B, …]
    terminations: Column  # [T, B, …] bool: the task ended, nothing comes after
    truncations: Column  # [T, B, …] bool: something else ended the episode
    frames: Mapping[str, Column]  # each [F, …]: every observation once
    curr: Rows  # [T, B] the frame that was seen
    next: Rows | None  # [T, B] the frame it led to; None if that was not recorded
    dones: Column | None = None  # [T, B, …] bool
    intervene_flags: Column | None = None  # [T, B, …] bool: a person acted
    versions: Column | None = None  # [T, B, …] of the policy that acted
    prev_logprobs: Column | None = None  # [T, B, …] of the actions when they were chosen
    prev_values: Column | None = None  # [T, B, …]
    forward_inputs: Mapping[str, Column] = field(default_factory=dict)  # each [T, B, …]: free
    max_episode_length: int = 0
    model_weights_id: str = ""

    @classmethod
    def of_observations(
        cls,
        curr_obs: Mapping[str, Column],
        next_obs: Mapping[str, Column],
        episode: Rows,
        t: Rows,
        columns: Mapping[str, Any],
    ) -> TrajectoryBatch:
        """From observations before and after each step, each [T, B, …]; `columns` are the other fields by name.

        What a step led to and what the next step saw must be the same, byte for byte.
        """
        frames, curr, after = pack(curr_obs, next_obs, episode, t)
        return cls(frames=frames, curr=curr, next=after, episode=episode, t=t, **_with_weights_id(columns))

    @classmethod
    def of_steps(
        cls,
        observations: Mapping[str, Column],
        columns: Mapping[str, Any],
        *,
        episode: int,
        terminated: bool,
        truncated: bool,
    ) -> TrajectoryBatch:
        """One lane with one episode: N observations each [N, …], and N - 1 transitions in `columns`, each [N - 1, …].

        Nothing is copied, so views of a file stay views of it.
        """
        steps = len(columns["rewards"])
        last = np.arange(steps)[:, None] == steps - 1
        lane = {
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
            **_with_weights_id(lane),
        )

    @property
    def shape(self) -> tuple[int, int]:
        steps, lanes = self.episode.shape
        return steps, lanes

    @property
    def num_samples(self) -> int:
        return self.episode.size

    @property
    def curr_obs(self) -> dict[str, Column]:
        """What was seen before each step, each [T, B, …]."""
        return {name: frames[self.curr] for name, frames in self.frames.items()}

    @property
    def next_obs(self) -> dict[str, Column]:
        """What each step led to, each [T, B, …]."""
        return {} if self.next is None else {name: frames[self.next] for name, frames in self.frames.items()}

    def columns(self) -> dict[str, Column]:
        """Every array with a row per step, by name; "forward_inputs.x" for free ones."""
        plain = {name: getattr(self, name) for name in COLUMNS}
        free = {f"{FORWARD_INPUTS}{name}": column for name, column in self.forward_inputs.items()}
        return {name: column for name, column in (plain | free).items() if column is not None}


FORWARD_INPUTS = "forward_inputs."
_NOT_COLUMNS = ("frames", "forward_inputs", "max_episode_length", "model_weights_id")
COLUMNS = tuple(entry.name for entry in fields(TrajectoryBatch) if entry.name not in _NOT_COLUMNS)
FLAGS = ("terminations", "truncations", "dones", "intervene_flags")


def own(trajectory: TrajectoryBatch, *, copy: bool = False) -> TrajectoryBatch:
    """The same in arrays that nobody can change any more: those that could be are copied, or all if `copy` is set.

    Copies lie in one block of memory, since what is sampled together is then read from one place.
    """
    values: dict[str, Any] = {entry.name: getattr(trajectory, entry.name) for entry in fields(trajectory)}
    arrays = [
        array
        for value in values.values()
        for array in (value.values() if isinstance(value, Mapping) else [value])
        if isinstance(array, np.ndarray) and (copy or _can_change(array) or not array.flags.c_contiguous)
    ]
    copies = dict(zip(map(id, arrays), _copied(arrays), strict=True))
    for name, value in values.items():
        if isinstance(value, Mapping):
            values[name] = {key: copies.get(id(array), array) for key, array in value.items()}
        else:
            values[name] = copies.get(id(value), value)
    return TrajectoryBatch(**values)


def _can_change(array: Column) -> bool:
    """Whether the memory can be written through the array or anything that it is a view of."""
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
    try:
        return memoryview(memory).readonly
    except (TypeError, ValueError):
        return False


def _copied(arrays: Sequence[Column]) -> list[Column]:
    """Read-only copies in one block."""
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
    """The name RLinf gives to the weights that acted."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, versions.tobytes().hex()))


def neighbours(episode: Rows, t: Rows) -> tuple[Rows, Rows]:
    """For each row, the row of the step before and of the step after, in the order of `episode.ravel()`."""
    episode, t = episode.ravel(), t.ravel()
    order = np.lexsort((t, episode))
    follows = (np.diff(episode[order]) == 0) & (np.diff(t[order]) == 1)
    earlier, later = order[:-1][follows], order[1:][follows]
    before, after = np.full(len(order), NONE), np.full(len(order), NONE)
    before[later] = earlier
    after[earlier] = later
    return before, after


def pack(
    curr_obs: Mapping[str, Column], next_obs: Mapping[str, Column], episode: Rows, t: Rows
) -> tuple[dict[str, Column], Rows, Rows | None]:
    """The frames of a trajectory each once, and which of them every step saw and led to."""
    steps, lanes = episode.shape
    flat = {name: _flat(f"curr_obs.{name}", seen, (steps, lanes)) for name, seen in curr_obs.items()}
    if not next_obs:
        return flat, np.arange(steps * lanes).reshape(steps, lanes), None
    if set(next_obs) != set(curr_obs):
        raise DataError(f"next_obs has {sorted(next_obs)} and curr_obs has {sorted(curr_obs)}: they must be the same")
    led_to = {name: _flat(f"next_obs.{name}", seen, (steps, lanes)) for name, seen in next_obs.items()}
    _, after = neighbours(episode, t)
    for name, seen in flat.items():
        _check_shared(name, seen, led_to[name], after, (episode.ravel(), t.ravel()))
    alone = np.flatnonzero(after == NONE)  # what these steps led to, no step of the trajectory saw
    position, extra = _side_by_side(steps, lanes, alone)
    frames = {}
    for name, seen in flat.items():
        frames[name] = np.empty((len(seen) + len(alone), *seen.shape[1:]), seen.dtype)
        frames[name][position] = seen
        frames[name][extra] = led_to[name][alone]
    after_frame = position[after]
    after_frame[alone] = extra
    return frames, position.reshape(steps, lanes), after_frame.reshape(steps, lanes)


def _side_by_side(steps: int, lanes: int, alone: Rows) -> tuple[Rows, Rows]:
    """Where frames go: lane after lane, so that what a step saw and what it led to are read from disk in one go."""
    rows = np.arange(steps * lanes)
    owner = np.concatenate([rows, alone])
    is_extra = np.repeat([0, 1], [len(rows), len(alone)])
    order = np.lexsort((is_extra, owner // lanes, owner % lanes))
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position[: len(rows)], position[len(rows) :]


def _check_shared(name: str, seen: Column, led_to: Column, after: Rows, identity: tuple[Rows, Rows]) -> None:
    if seen.dtype != led_to.dtype or seen.shape != led_to.shape:
        raise DataError(
            f"next_obs.{name} is {led_to.dtype} {list(led_to.shape[1:])} "
            f"and curr_obs.{name} is {seen.dtype} {list(seen.shape[1:])}: they must be the same"
        )
    rows = np.flatnonzero(after != NONE)
    left, right = (a.reshape(len(a), -1).view(np.uint8) for a in (led_to, seen))
    for row in rows:
        if not np.array_equal(left[row], right[after[row]]):
            episode, t = int(identity[0][row]), int(identity[1][row])
            raise DataError(
                f"next_obs.{name} of episode {episode}, step {t} is not what step {t + 1} saw",
                "give steps that do not follow each other other episodes, or leave a gap in `t`",
            )


def _flat(name: str, column: Column, shape: tuple[int, int]) -> Column:
    if column.shape[:2] != shape:
        raise DataError(f"{name} has shape {list(column.shape)}; it must begin with [{shape[0]}, {shape[1]}]")
    return np.ascontiguousarray(column).reshape(-1, *column.shape[2:])


def _with_weights_id(columns: Mapping[str, Any]) -> dict[str, Any]:
    versions = columns.get("versions")
    return {"model_weights_id": "" if versions is None else weights_id(versions), **columns}
