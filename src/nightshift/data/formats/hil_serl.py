"""HIL-SERL's pickles of transitions: read, by an unpickler that admits arrays and plain containers only.

A file is a list of transitions; those of a run's buffer (transitions_1000.pkl, transitions_2000.pkl, ...) are one
list in pieces, cut anywhere. Two transitions belong to one episode only if the first is not done and its next
observation is the second's observation, byte by byte: a buffer of interventions has gaps that nothing else shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.data import unpickling
from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.data.formats import ENDS_MID_EPISODE, STARTS_MID_EPISODE, Entry, common
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SOURCE = "hil-serl"
OBS_HORIZON = "obs_horizon"
"""1 where every observation had an axis of one frame, which is left out here."""
INFOS_LEFT_OUT = "infos_left_out"

_KEYS = ("observations", "actions", "next_observations", "rewards", "masks", "dones")
_PENALTY = "grasp_penalty"
_OVERRULED = "intervene_action"
_SEEN, _NEXT = "observations", "next_observations"

Transition = Mapping[str, Any]
Read = Callable[[Path], Sequence[Transition]]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Transitions that follow each other: places in files, and whether the start was."""

    places: Sequence[tuple[Path, int]]
    starts_mid_episode: bool


def entries(path: Path, task: str) -> list[Entry]:
    """Of one file, or of all files of a folder in the order of their numbers."""
    common.chosen_task("", task, str(path))
    read = lru_cache(maxsize=1)(_read)
    return [
        Entry(
            key=common.key(position, f"{segment.places[0][0].stem}-{segment.places[0][1]}"),
            load=partial(_load, segment, read, task),
        )
        for position, segment in enumerate(_segments(_files(path), read))
    ]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.pkl"), key=lambda file: common.natural(file.name))
    if not found:
        raise DataError(f"{path} has no .pkl files")
    return found


def _read(path: Path) -> Sequence[Transition]:
    try:
        content = unpickling.load(path)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    if not isinstance(content, list) or not content:
        raise DataError(f"{path} is not a list of transitions")
    return content


def _check(transition: Any, where: str) -> None:
    if not isinstance(transition, Mapping):
        raise DataError(f"{where} is no transition: {type(transition).__name__}")
    if missing := [key for key in _KEYS if key not in transition]:
        raise DataError(f"{where} has no {', '.join(missing)}")
    for key in (_SEEN, _NEXT):
        seen = transition[key]
        if not isinstance(seen, Mapping) or not all(isinstance(array, np.ndarray) for array in seen.values()):
            raise DataError(f"{where}: {key} are no arrays by name")
        if seen.keys() != transition[_SEEN].keys():
            raise DataError(f"{where}: {_NEXT} has {sorted(seen)} and {_SEEN} has {sorted(transition[_SEEN])}")
    _check_numbers(transition, where)


def _check_numbers(transition: Transition, where: str) -> None:
    if not isinstance(transition["actions"], np.ndarray):
        raise DataError(f"{where}: actions is no array")
    for key in ("rewards", "masks", "dones"):
        if _number(transition[key], f"{where}: {key}").ndim:
            raise DataError(f"{where}: {key} is an array")
    if transition["masks"] not in (0, 1) or transition["dones"] not in (0, 1):
        raise DataError(f"{where}: masks is {transition['masks']} and dones is {transition['dones']}, not 0 or 1")
    if not transition["masks"] and not transition["dones"]:
        raise DataError(f"{where}: masks is 0 in an episode that goes on")


def _segments(files: Sequence[Path], read: Read) -> Iterator[Segment]:
    """A broken transition is a segment of its own, which cannot be loaded: the others are not to suffer from it."""
    places: list[tuple[Path, int]] = []
    last: Transition | None = None
    after_gap = False
    for file in files:
        for index, transition in enumerate(read(file)):
            sound = _is_sound(transition)
            if places and not (last and sound and _continues(last, transition)):
                yield Segment(places=places, starts_mid_episode=after_gap)
                places, after_gap = [], not (last and last["dones"])
            places.append((file, index))
            last = transition if sound else None
    yield Segment(places=places, starts_mid_episode=after_gap)


def _is_sound(transition: Any) -> bool:
    try:
        _check(transition, "")
    except DataError:
        return False
    return True


def _continues(last: Transition, transition: Transition) -> bool:
    return not last["dones"] and _same(last[_NEXT], transition[_SEEN])


def _same(left: Mapping[str, Column], right: Mapping[str, Column]) -> bool:
    """Byte by byte: equal floats that differ in their bits were not copied."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].tobytes() == right[name].tobytes()
        for name in left
    )


def _load(segment: Segment, read: Read, task: str) -> Episode:
    transitions = [read(file)[index] for file, index in segment.places]
    for (file, index), transition in zip(segment.places, transitions, strict=True):
        _check(transition, f"{file}, transition {index}")
    file, index = segment.places[0]
    where = f"{file}, transitions from {index} on"
    last = transitions[-1]
    observations, horizon = _observations(transitions, where)
    actions = _stacked(transitions, "actions", where)
    rewards = _stacked(transitions, "rewards", where)
    overruled = [_OVERRULED in _infos(transition) for transition in transitions]
    terminated = not last["masks"]
    marks = {STARTS_MID_EPISODE: segment.starts_mid_episode, ENDS_MID_EPISODE: not last["dones"]}
    return Episode(
        observations=observations,
        actions=with_last(actions),
        rewards=with_last(rewards),
        discounts=np.ones(len(transitions) + 1, np.float32),
        interventions=np.array([*overruled, False]),
        policy_actions=with_last(actions),
        policy_versions=np.full(len(transitions) + 1, NO_POLICY, np.int64),
        terminated=terminated,
        truncated=not terminated,
        success=bool(rewards[-1] > 0),
        provenance=common.provenance(source=SOURCE, path=file, place=str(index), task=task),
        extras=_penalties(transitions, where),
        metadata={**{name: True for name, holds in marks.items() if holds}, **horizon, **_left_out(transitions)},
    )


def _observations(transitions: Sequence[Transition], where: str) -> tuple[dict[str, Column], dict[str, int]]:
    """Every step's, the final one included; without the axis of the frame stack where that holds one frame."""
    names = list(transitions[0][_SEEN])
    looks = [*(transition[_SEEN] for transition in transitions), transitions[-1][_NEXT]]
    columns = {name: _stack([look[name] for look in looks], f"{where}: observations.{name}") for name in names}
    if not all(column.ndim > 2 and column.shape[1] == 1 for column in columns.values()):  # noqa: PLR2004
        return columns, {}
    return {name: column[:, 0] for name, column in columns.items()}, {OBS_HORIZON: 1}


def _stacked(transitions: Sequence[Transition], key: str, where: str) -> Column:
    return _stack([_number(transition[key], f"{where}: {key}") for transition in transitions], f"{where}: {key}")


def _stack(arrays: Sequence[Column], where: str) -> Column:
    """np.stack, but steps of different dtype or shape are refused and named instead of cast."""
    first = common.checked(arrays[0], where)
    for step, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype or array.shape != first.shape:
            was = f"{array.dtype} {list(array.shape)}, not {first.dtype} {list(first.shape)}"
            raise DataError(f"{where} is {was} (step {step})")
    return np.stack([common.checked(array, where) for array in arrays])


def _number(value: Any, where: str) -> Column:
    """Python's numbers have no dtype; float64 holds them exactly."""
    if isinstance(value, bool | int | float):
        return np.asarray(value, np.float64)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    raise DataError(f"{where} is no number: {type(value).__name__}")


def _infos(transition: Transition) -> Mapping[str, Any]:
    infos = transition.get("infos", {})
    return infos if isinstance(infos, Mapping) else {}


def _penalties(transitions: Sequence[Transition], where: str) -> dict[str, Column]:
    """Demos carry it in `infos`, buffers beside the reward."""
    found = [transition.get(_PENALTY, _infos(transition).get(_PENALTY)) for transition in transitions]
    if all(penalty is None for penalty in found):
        return {}
    if None in found:
        raise DataError(f"{where}: {_PENALTY} is missing (step {found.index(None)})")
    numbers = [_number(penalty, f"{where}: {_PENALTY}") for penalty in found]
    return {_PENALTY: with_last(_stack(numbers, f"{where}: {_PENALTY}"))}


def _left_out(transitions: Sequence[Transition]) -> dict[str, list[str]]:
    """`infos` are free, and few are the same at every step: their names are kept, not their values."""
    names = {str(name) for transition in transitions for name in _infos(transition)} - {_PENALTY, _OVERRULED}
    return {INFOS_LEFT_OUT: sorted(names)} if names else {}
