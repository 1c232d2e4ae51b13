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

from nightshift.data import limits as unpacking
from nightshift.data import symlinks, unpickling
from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.data.formats import ENDS_MID_EPISODE, STARTS_MID_EPISODE, EpisodeRef, common, reading
from nightshift.data.limits import Limits
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SOURCE = "hil-serl"
SUFFIXES = (".pkl",)
OBS_HORIZON = "obs_horizon"
"""Metadata: 1 if every observation had a frame-stack axis of length 1, which is dropped here."""
INFOS_LEFT_OUT = "infos_left_out"

_KEYS = ("observations", "actions", "next_observations", "rewards", "masks", "dones")
_PENALTY = "grasp_penalty"
_INTERVENTION = "intervene_action"
_OBS, _NEXT = "observations", "next_observations"

_FIX = "fix the transition where it was recorded, or leave it out"

Transition = Mapping[str, Any]
_ReadFile = Callable[[Path], Sequence[Transition]]


@dataclass(frozen=True, kw_only=True)
class TransitionSegment:
    """Consecutive transitions: their positions in files, and whether they start in the middle of an episode."""

    places: Sequence[tuple[Path, int]]
    starts_mid_episode: bool
    error: DataError | None = None  # why the file at the first place cannot be read


def list_episodes(path: Path, task: str, limits: Limits = unpacking.DEFAULT) -> list[EpisodeRef]:
    """The episodes of one file, or of all files of a folder in numerical order."""
    common.resolve_task("", task, str(path))
    with reading(str(path)):
        read = lru_cache(maxsize=1)(partial(_read, root=path, limits=limits))
        segments = enumerate(_segments(common.files_of(path, SUFFIXES), read, path))
        return [_ref(position, segment, partial(_load, segment, read, task, limits)) for position, segment in segments]


def _ref(position: int, segment: TransitionSegment, load: Callable[[], Episode]) -> EpisodeRef:
    file, index = segment.places[0]
    key = common.episode_key(position, f"{file.stem}-{index}")
    if segment.error:
        return EpisodeRef.broken(key, segment.error)
    return EpisodeRef(key=key, where=f"{file}, transitions from {index} on", read=load)


def _read(path: Path, root: Path, limits: Limits) -> Sequence[Transition]:
    if not symlinks.check(path, root).is_file():
        raise DataError(f"there is no file {path}", "give a file of transitions or a folder of them")
    with reading(str(path)):
        content = unpickling.load(path)
    if not isinstance(content, list) or not content:
        raise DataError(f"{path} is not a list of transitions", "give a file of transitions")
    limits.check_source(sum(map(_nbytes, content)), path.stat().st_size, str(path))
    return content


def _nbytes(transition: Any) -> int:
    """The bytes of the observations. A file can repeat one array any number of times in a few bytes."""
    if not isinstance(transition, Mapping):
        return 0
    seen = [transition.get(key) for key in (_OBS, _NEXT)]
    return sum(getattr(a, "nbytes", 0) for values in seen if isinstance(values, Mapping) for a in values.values())


def _check(transition: Any, where: str) -> None:
    if not isinstance(transition, Mapping):
        raise DataError(f"{where} is not a transition but a {type(transition).__name__}", _FIX)
    if missing := [key for key in _KEYS if key not in transition]:
        raise DataError(f"{where} has no {', '.join(missing)}", _FIX)
    for key in (_OBS, _NEXT):
        seen = transition[key]
        if not isinstance(seen, Mapping) or not all(
            isinstance(name, str) and isinstance(array, np.ndarray) for name, array in seen.items()
        ):
            raise DataError(f"{where}: {key} is not a dict of arrays", _FIX)
        if seen.keys() != transition[_OBS].keys():
            raise DataError(f"{where}: {_NEXT} has {sorted(seen)} and {_OBS} has {sorted(transition[_OBS])}", _FIX)
    _check_numbers(transition, where)


def _check_numbers(transition: Transition, where: str) -> None:
    if not isinstance(transition["actions"], np.ndarray):
        raise DataError(f"{where}: actions is not an array", _FIX)
    for key in ("rewards", "masks", "dones"):
        if _number(transition[key], f"{where}: {key}").ndim:
            raise DataError(f"{where}: {key} is an array, not a number", _FIX)
    if transition["masks"] not in (0, 1) or transition["dones"] not in (0, 1):
        found = f"masks is {transition['masks']} and dones is {transition['dones']}"
        raise DataError(f"{where}: {found}, not 0 or 1", _FIX)
    if not transition["masks"] and not transition["dones"]:
        raise DataError(f"{where}: masks is 0, which ends the episode, but dones is 0", _FIX)


def _segments(files: Sequence[Path], read: _ReadFile, root: Path) -> Iterator[TransitionSegment]:
    """An invalid transition becomes its own segment, which fails to load without affecting the others; so does a file
    of a folder that cannot be read."""
    places: list[tuple[Path, int]] = []
    last: Transition | None = None
    starts_mid_episode = False
    for file in files:
        try:
            transitions = read(file)
        except DataError as error:
            if file == root:
                raise
            if places:
                yield TransitionSegment(places=places, starts_mid_episode=starts_mid_episode)
            yield TransitionSegment(places=[(file, 0)], starts_mid_episode=True, error=error)
            places, last, starts_mid_episode = [], None, True
            continue
        for index, transition in enumerate(transitions):
            valid = _is_valid(transition)
            if places and not (last and valid and _continues(last, transition)):
                yield TransitionSegment(places=places, starts_mid_episode=starts_mid_episode)
                places, starts_mid_episode = [], not (last and last["dones"])
            places.append((file, index))
            last = transition if valid else None
    if places:
        yield TransitionSegment(places=places, starts_mid_episode=starts_mid_episode)


def _is_valid(transition: Any) -> bool:
    try:
        with reading("transition"):
            _check(transition, "")
    except DataError:
        return False
    return True


def _continues(last: Transition, transition: Transition) -> bool:
    return not last["dones"] and _same(last[_NEXT], transition[_OBS])


def _same(left: Mapping[str, Column], right: Mapping[str, Column]) -> bool:
    """Whether the observations are equal byte for byte; equal floats with other bits are not copies."""
    return left.keys() == right.keys() and all(
        left[name] is right[name]
        or (
            left[name].dtype == right[name].dtype
            and left[name].shape == right[name].shape
            and left[name].tobytes() == right[name].tobytes()
        )
        for name in left
    )


def _load(segment: TransitionSegment, read: _ReadFile, task: str, limits: Limits) -> Episode:
    transitions = [read(file)[index] for file, index in segment.places]
    stored = sum(file.stat().st_size for file in {file for file, _ in segment.places})
    limits.check_episode(sum(map(_nbytes, transitions)), stored, f"{segment.places[0][0]}, one episode of it")
    for (file, index), transition in zip(segment.places, transitions, strict=True):
        _check(transition, f"{file}, transition {index}")
    file, index = segment.places[0]
    where = f"{file}, transitions from {index} on"
    last = transitions[-1]
    observations, horizon = _observations(transitions, where)
    actions = _stack([transition["actions"] for transition in transitions], f"{where}: actions")
    actions = common.action_matrix(actions, f"{where}: actions")
    rewards = np.stack([_number(transition["rewards"], f"{where}: rewards") for transition in transitions])
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


def _stack(arrays: Sequence[Column], where: str) -> Column:
    """np.stack that raises DataError for steps of different dtype or shape instead of casting."""
    first = common.native_dtype(arrays[0], where)
    for step, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype or array.shape != first.shape:
            was = f"{array.dtype} {list(array.shape)}, not {first.dtype} {list(first.shape)}"
            raise DataError(f"{where} is {was} (step {step})", _FIX)
    return np.stack([common.native_dtype(array, where) for array in arrays])


def _number(value: Any, where: str) -> Column:
    """As float64, since one run mixes Python's numbers, numpy's and bools; DataError unless it holds them exactly."""
    if not isinstance(value, bool | int | float | np.ndarray | np.generic):
        raise DataError(f"{where} is not a number but a {type(value).__name__}", _FIX)
    found = common.native_dtype(np.asarray(value), where)
    number = found.astype(np.float64)
    if found.dtype.kind in "iu" and not np.array_equal(number.astype(object), found.astype(object)):
        raise DataError(f"{where} is {value}, which float64 does not hold exactly", _FIX)
    return number


def _infos(transition: Transition) -> Mapping[str, Any]:
    infos = transition.get("infos", {})
    return infos if isinstance(infos, Mapping) else {}


def _penalties(transitions: Sequence[Transition], where: str) -> dict[str, Column]:
    """The grasp penalty: demos have it in `infos`, buffers beside the reward."""
    found = [transition.get(_PENALTY, _infos(transition).get(_PENALTY)) for transition in transitions]
    if all(penalty is None for penalty in found):
        return {}
    if missing := [step for step, penalty in enumerate(found) if penalty is None]:
        raise DataError(f"{where}: {_PENALTY} is missing (step {missing[0]})", _FIX)
    numbers = [_number(penalty, f"{where}: {_PENALTY}") for penalty in found]
    return {_PENALTY: with_last(_stack(numbers, f"{where}: {_PENALTY}"))}


def _left_out(transitions: Sequence[Transition]) -> dict[str, list[str]]:
    """Metadata with the names of the `infos`; their values differ in type between steps and are dropped."""
    names = {str(name) for transition in transitions for name in _infos(transition)} - {_PENALTY, _INTERVENTION}
    return {INFOS_LEFT_OUT: sorted(names)} if names else {}
