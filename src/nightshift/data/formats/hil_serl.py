"""Reads HIL-SERL's pickled transitions with an unpickler that allows only arrays and plain containers.

A file is a list of transitions; the files of a buffer (transitions_1000.pkl, transitions_2000.pkl, ...) are one list,
split at arbitrary places. Two transitions belong to one episode only if the first is not done and its next observation
equals the observation of the second byte for byte: a buffer of interventions has gaps that are not marked otherwise.
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
from nightshift.data.formats import ENDS_MID_EPISODE, STARTS_MID_EPISODE, EpisodeRef, common
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SOURCE = "hil-serl"
OBS_HORIZON = "obs_horizon"
"""Metadata: 1 if every observation had a frame-stack axis of length 1, which is dropped here."""
INFOS_LEFT_OUT = "infos_left_out"

_KEYS = ("observations", "actions", "next_observations", "rewards", "masks", "dones")
_PENALTY = "grasp_penalty"
_INTERVENTION = "intervene_action"
_OBS, _NEXT = "observations", "next_observations"

Transition = Mapping[str, Any]
_ReadFile = Callable[[Path], Sequence[Transition]]


@dataclass(frozen=True, kw_only=True)
class TransitionSegment:
    """Consecutive transitions: their positions in files, and whether they start in the middle of an episode."""

    places: Sequence[tuple[Path, int]]
    starts_mid_episode: bool


def list_episodes(path: Path, task: str) -> list[EpisodeRef]:
    """The episodes of one file, or of all files of a folder in numerical order."""
    common.resolve_task("", task, str(path))
    read = lru_cache(maxsize=1)(_read)
    return [
        EpisodeRef(
            key=common.episode_key(position, f"{segment.places[0][0].stem}-{segment.places[0][1]}"),
            load=partial(_load, segment, read, task),
        )
        for position, segment in enumerate(_segments(_files(path), read))
    ]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.pkl"), key=lambda file: common.natural_sort_key(file.name))
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
        raise DataError(f"{where} is not a transition but a {type(transition).__name__}")
    if missing := [key for key in _KEYS if key not in transition]:
        raise DataError(f"{where} has no {', '.join(missing)}")
    for key in (_OBS, _NEXT):
        seen = transition[key]
        if not isinstance(seen, Mapping) or not all(isinstance(array, np.ndarray) for array in seen.values()):
            raise DataError(f"{where}: {key} is not a dict of arrays")
        if seen.keys() != transition[_OBS].keys():
            raise DataError(f"{where}: {_NEXT} has {sorted(seen)} and {_OBS} has {sorted(transition[_OBS])}")
    _check_numbers(transition, where)


def _check_numbers(transition: Transition, where: str) -> None:
    if not isinstance(transition["actions"], np.ndarray):
        raise DataError(f"{where}: actions is not an array")
    for key in ("rewards", "masks", "dones"):
        if _number(transition[key], f"{where}: {key}").ndim:
            raise DataError(f"{where}: {key} is an array, not a number")
    if transition["masks"] not in (0, 1) or transition["dones"] not in (0, 1):
        raise DataError(f"{where}: masks is {transition['masks']} and dones is {transition['dones']}, not 0 or 1")
    if not transition["masks"] and not transition["dones"]:
        raise DataError(f"{where}: masks is 0, which ends the episode, but dones is 0")


def _segments(files: Sequence[Path], read: _ReadFile) -> Iterator[TransitionSegment]:
    """An invalid transition becomes its own segment, which fails to load without affecting the others."""
    places: list[tuple[Path, int]] = []
    last: Transition | None = None
    starts_mid_episode = False
    for file in files:
        for index, transition in enumerate(read(file)):
            valid = _is_valid(transition)
            if places and not (last and valid and _continues(last, transition)):
                yield TransitionSegment(places=places, starts_mid_episode=starts_mid_episode)
                places, starts_mid_episode = [], not (last and last["dones"])
            places.append((file, index))
            last = transition if valid else None
    yield TransitionSegment(places=places, starts_mid_episode=starts_mid_episode)


def _is_valid(transition: Any) -> bool:
    try:
        _check(transition, "")
    except DataError:
        return False
    return True


def _continues(last: Transition, transition: Transition) -> bool:
    return not last["dones"] and _same(last[_NEXT], transition[_OBS])


def _same(left: Mapping[str, Column], right: Mapping[str, Column]) -> bool:
    """Whether the observations are equal byte for byte; equal floats with other bits are not copies."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].tobytes() == right[name].tobytes()
        for name in left
    )


def _load(segment: TransitionSegment, read: _ReadFile, task: str) -> Episode:
    transitions = [read(file)[index] for file, index in segment.places]
    for (file, index), transition in zip(segment.places, transitions, strict=True):
        _check(transition, f"{file}, transition {index}")
    file, index = segment.places[0]
    where = f"{file}, transitions from {index} on"
    last = transitions[-1]
    observations, horizon = _observations(transitions, where)
    actions = _stacked(transitions, "actions", where)
    rewards = _stacked(transitions, "rewards", where)
    intervened = [_INTERVENTION in _infos(transition) for transition in transitions]
    terminated = not last["masks"]
    flags = {STARTS_MID_EPISODE: segment.starts_mid_episode, ENDS_MID_EPISODE: not last["dones"]}
    return Episode(
        observations=observations,
        actions=with_last(actions),
        rewards=with_last(rewards),
        discounts=np.ones(len(transitions) + 1, np.float32),
        interventions=np.array([*intervened, False]),
        policy_actions=with_last(actions),
        policy_versions=np.full(len(transitions) + 1, NO_POLICY, np.int64),
        terminated=terminated,
        truncated=not terminated,
        success=bool(rewards[-1] > 0),
        provenance=common.provenance(source=SOURCE, path=file, location=str(index), task=task),
        extras=_penalties(transitions, where),
        metadata={**{name: True for name, holds in flags.items() if holds}, **horizon, **_left_out(transitions)},
    )


def _observations(transitions: Sequence[Transition], where: str) -> tuple[dict[str, Column], dict[str, int]]:
    """The observations of all steps, including the final one, without a frame-stack axis of length 1."""
    names = list(transitions[0][_OBS])
    frames = [*(transition[_OBS] for transition in transitions), transitions[-1][_NEXT]]
    columns = {name: _stack([frame[name] for frame in frames], f"{where}: observations.{name}") for name in names}
    if not all(column.ndim > 2 and column.shape[1] == 1 for column in columns.values()):  # noqa: PLR2004
        return columns, {}
    return {name: column[:, 0] for name, column in columns.items()}, {OBS_HORIZON: 1}


def _stacked(transitions: Sequence[Transition], key: str, where: str) -> Column:
    return _stack([_number(transition[key], f"{where}: {key}") for transition in transitions], f"{where}: {key}")


def _stack(arrays: Sequence[Column], where: str) -> Column:
    """np.stack that raises DataError for steps of different dtype or shape instead of casting."""
    first = common.native_dtype(arrays[0], where)
    for step, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype or array.shape != first.shape:
            was = f"{array.dtype} {list(array.shape)}, not {first.dtype} {list(first.shape)}"
            raise DataError(f"{where} is {was} (step {step})")
    return np.stack([common.native_dtype(array, where) for array in arrays])


def _number(value: Any, where: str) -> Column:
    """Python numbers become float64, which holds them exactly."""
    if isinstance(value, bool | int | float):
        return np.asarray(value, np.float64)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    raise DataError(f"{where} is not a number but a {type(value).__name__}")


def _infos(transition: Transition) -> Mapping[str, Any]:
    infos = transition.get("infos", {})
    return infos if isinstance(infos, Mapping) else {}


def _penalties(transitions: Sequence[Transition], where: str) -> dict[str, Column]:
    """The grasp penalty: demos have it in `infos`, buffers beside the reward."""
    found = [transition.get(_PENALTY, _infos(transition).get(_PENALTY)) for transition in transitions]
    if all(penalty is None for penalty in found):
        return {}
    if None in found:
        raise DataError(f"{where}: {_PENALTY} is missing (step {found.index(None)})")
    numbers = [_number(penalty, f"{where}: {_PENALTY}") for penalty in found]
    return {_PENALTY: with_last(_stack(numbers, f"{where}: {_PENALTY}"))}


def _left_out(transitions: Sequence[Transition]) -> dict[str, list[str]]:
    """Metadata with the names of the `infos`; their values differ in type between steps and are dropped."""
    names = {str(name) for transition in transitions for name in _infos(transition)} - {_PENALTY, _INTERVENTION}
    return {INFOS_LEFT_OUT: sorted(names)} if names else {}
