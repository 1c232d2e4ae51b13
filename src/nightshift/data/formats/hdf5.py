"""Reads HDF5 demos of LIBERO and robomimic.

data/           attributes: env_args; of LIBERO also problem_info, bddl_file_name
  demo_0/       actions, rewards, dones [T, …]; obs/NAME [T, …]; optionally next_obs/NAME; other arrays
mask/NAME       robomimic's filter keys: lists of demos

In robomimic observation t precedes action t. In LIBERO it follows action t, because its script records what `env.step`
returns. `states` always precede the action, so comparing them with the joint positions tells which case a file is: if
the joints match the next state, observations are shifted to the next action, and the first action, which has no
observation, is dropped. LIBERO's `robot_states` are a part of the observation and are shifted with it. `dones` flags
termination; robosuite's reward of a solved task is 1, sparse or shaped.

Only what is stored in the file itself is read: HDF5 can link groups, arrays and parts of arrays to any other file.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np

from nightshift.data import limits as unpacking
from nightshift.data import symlinks
from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.data.formats import OBSERVATIONS_SHIFTED, REPEATED_FINAL, EpisodeRef, common, reading
from nightshift.data.limits import Limits
from nightshift.data.rate import FPS, is_rate
from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError

SOURCE = "hdf5"
SUFFIXES = (".hdf5", ".h5")
SUCCESS_REWARD = 1
"""Robosuite's reward for a solved task."""
FILTER_KEYS = "filter_keys"

_STANDARD = ("actions", "rewards")
_FOLDERS = ("obs", "next_obs")
_OBSERVED = ("obs/", "robot_states")
"""Names, or their beginnings, of what the script takes from the observation."""
_DESCRIPTIONS = ("env_args", "problem_info", "bddl_file_name")
"""File attributes that go into the metadata; the model XML and the BDDL text are left out because they are large."""
_JOINTS = slice(1, 8)
"""The arm joints in robosuite's flattened states; index 0 is the time."""
_JOINT_STATES = "obs/joint_states"
_MIN_DISTANCE_RATIO = 4
"""Observations are shifted if the joints are this many times closer to the next state than to the current one."""
_COPY = "copy it into the file: h5py's Group.copy with expand_soft and expand_external"


def list_episodes(path: Path, task: str, limits: Limits = unpacking.DEFAULT) -> list[EpisodeRef]:
    """The demos of one file, or of all files of a folder such as a LIBERO suite."""
    found: list[EpisodeRef] = []
    with reading(str(path)):
        for file in common.files_of(path, SUFFIXES):
            try:
                symlinks.check(file, path)
                demos = _demos(file)
            except DataError as error:
                if file == path:
                    raise
                found.append(EpisodeRef.broken(common.episode_key(len(found), file.stem), error))
                continue
            for demo in demos:
                key = common.episode_key(len(found), demo)
                read = partial(load, file, demo, task, limits)
                found.append(EpisodeRef(key=key, where=f"{file}, {demo}", read=read))
    return found


def load(path: Path, demo: str, task: str, limits: Limits = unpacking.DEFAULT) -> Episode:
    where = f"{path}, {demo}"
    with _opened(path) as data:
        described = _description(data, where)
        datasets = _datasets(_group(data, demo, where), where)
        stored = min(sum(array.id.get_storage_size() for array in datasets.values()), path.stat().st_size)
        limits.check_episode(sum(map(_nbytes, datasets.values())), stored, where)
        arrays = {name: common.native_dtype(array[()], f"{where}, {name}") for name, array in datasets.items()}
        filters = _filters(data.parent, demo, limits, str(path))
    return _episode(path, demo, task, arrays, {**described, **filters})


def _episode(path: Path, demo: str, task: str, arrays: dict[str, Column], described: Mapping[str, Any]) -> Episode:
    where = f"{path}, {demo}"
    _check(arrays, where)
    final = _folder(arrays, "next_obs")
    shifted = not final and _observations_follow_actions(arrays)
    if shifted:
        arrays = {name: array if name.startswith(_OBSERVED) else array[1:] for name, array in arrays.items()}
    actions, rewards = common.action_matrix(arrays["actions"], f"{where}, actions"), arrays["rewards"]
    steps = len(actions) + 1
    solved = bool(np.all(rewards[-1] >= SUCCESS_REWARD))
    terminated = bool(np.all(arrays["dones"][-1])) if "dones" in arrays else solved
    flags = {OBSERVATIONS_SHIFTED: shifted, REPEATED_FINAL: not shifted and not final}
    return Episode(
        observations={
            name: seen if shifted else with_last(seen, final[name][-1] if final else seen[-1])
            for name, seen in _folder(arrays, "obs").items()
        },
        actions=with_last(actions),
        rewards=with_last(rewards),
        discounts=np.ones(steps, np.float32),
        interventions=np.zeros(steps, np.bool_),
        policy_actions=with_last(actions),
        policy_versions=np.full(steps, NO_POLICY, np.int64),
        terminated=terminated,
        truncated=not terminated,
        success=solved,
        provenance=common.provenance(
            source=SOURCE,
            path=path,
            location=demo,
            task=common.resolve_task(_task(described), task, str(path)),
            suite=_suite(described),
            language=_language(described),
        ),
        extras={
            name: a if len(a) == steps else with_last(a)
            for name, a in arrays.items()
            if name not in _STANDARD and "/" not in name
        },
        metadata={**described, **_rate(described), **{flag: True for flag, holds in flags.items() if holds}},
    )


def _demos(path: Path) -> list[str]:
    with _opened(path) as data:
        return sorted(data, key=common.natural_sort_key)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.Group]:
    """The group "data" of a file."""
    with reading(str(path)), h5py.File(path, "r") as file:
        if "data" not in list(file):
            raise DataError(
                f"{path} is neither a LIBERO nor a robomimic file: it has no group 'data'", "give a file of demos"
            )
        yield _group(file, "data", str(path))


def _member(group: h5py.Group, name: str, where: str) -> Any:
    """The object with this name in a group, if it is in this file; the kind of the link is checked before it is
    followed."""
    if "/" in name:
        raise DataError(f"{where}, {name} is refused: its name would be followed as a path", "rename it")
    kind = group.id.links.get_info(name.encode("utf-8", "surrogateescape")).type
    if kind != h5py.h5l.TYPE_HARD:
        named = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "a link to another file"}
        raise DataError(f"{where}, {name} is {named.get(kind, 'a link')}, which is not followed", _COPY)
    return group[name]


def _group(parent: h5py.Group, name: str, where: str) -> h5py.Group:
    group = _member(parent, name, where)
    if not isinstance(group, h5py.Group):
        raise DataError(f"{where}, {name} is not a group", "give a file of demos as LIBERO or robomimic write it")
    return group


def _datasets(demo: h5py.Group, where: str) -> dict[str, h5py.Dataset]:
    """All arrays of a demo, not yet read: "actions", "obs/agentview_rgb", ..."""
    found: dict[str, h5py.Dataset] = {}
    for name in demo:
        if name in _FOLDERS:
            folder = _group(demo, name, where)
            found |= {f"{name}/{inner}": _dataset(folder, inner, f"{where}, {name}") for inner in folder}
        else:
            found[name] = _dataset(demo, name, where)
    return found


def _dataset(group: h5py.Group, name: str, where: str) -> h5py.Dataset:
    array = _member(group, name, where)
    if not isinstance(array, h5py.Dataset):
        raise DataError(f"{where}, {name} is not an array", "remove it from the demo")
    if array.external or array.is_virtual:
        raise DataError(f"{where}, {name} is stored in other files, which are not read", _COPY)
    if not array.shape:
        raise DataError(f"{where}, {name} is not an array of steps", "remove it from the demo")
    if array.dtype.name not in DTYPES:
        raise DataError(f"{where}, {name} is of dtype {array.dtype}; episodes hold {', '.join(DTYPES)}", "convert it")
    return array


def _nbytes(array: h5py.Dataset) -> int:
    """The memory that reading the array takes: all of it, or one chunk if that is larger."""
    return int(max(math.prod(array.shape), math.prod(array.chunks or ())) * array.dtype.itemsize)


def _folder(arrays: Mapping[str, Column], folder: str) -> dict[str, Column]:
    return {name.removeprefix(f"{folder}/"): a for name, a in arrays.items() if name.startswith(f"{folder}/")}


def _check(arrays: Mapping[str, Column], where: str) -> None:
    obs, next_obs = (sorted(_folder(arrays, folder)) for folder in _FOLDERS)
    missing = [name for name in _STANDARD if name not in arrays] + ([] if obs else ["observations"])
    if missing:
        raise DataError(f"{where} has no {missing[0]}", "add observations with robomimic's dataset_states_to_obs first")
    steps = len(arrays["actions"])
    if not steps:
        raise DataError(f"{where} has no steps")
    for name, array in arrays.items():
        if len(array) != steps:
            raise DataError(f"{where}: {name} has {len(array)} steps and actions has {steps}")
    if next_obs and next_obs != obs:
        raise DataError(f"{where}: next_obs has {', '.join(next_obs)} and obs has {', '.join(obs)}")


def _observations_follow_actions(arrays: Mapping[str, Column]) -> bool:
    """Whether observation t follows action t; False unless the states show it clearly."""
    joints, states = arrays.get(_JOINT_STATES), arrays.get("states")
    if joints is None or states is None or states.ndim != 2 or len(states) < 2:  # noqa: PLR2004
        return False
    arm = states[:, _JOINTS]
    if arm.shape != joints.shape:
        return False
    with np.errstate(all="ignore"):  # the schema check reports values that are not finite, with field and step
        to_own, to_next = (np.abs(joints[:-1] - other).mean() for other in (arm[:-1], arm[1:]))
    return bool(_MIN_DISTANCE_RATIO * to_next < to_own)


def _description(data: h5py.Group, where: str) -> dict[str, Any]:
    return {name: _parsed(_text(data, name, where)) for name in _DESCRIPTIONS if name in data.attrs}


def _text(data: h5py.Group, name: str, where: str) -> str:
    """A text attribute. An array of texts is refused: all its entries can be one long text in the file."""
    if data.attrs.get_id(name).shape != ():
        raise DataError(f"{where}: the attribute {name} is not a text", "write it as robomimic does")
    text = data.attrs[name]
    return text.decode() if isinstance(text, bytes) else str(text)


def _parsed(text: str) -> Any:
    """Attributes are JSON or plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _filters(file: h5py.Group, demo: str, limits: Limits, where: str) -> dict[str, list[str]]:
    """The filter keys of robomimic (train, valid, better, ...) that contain this demo."""
    if "mask" not in list(file):
        return {}
    masks, most = _group(file, "mask", where), len(file["data"])
    names = [n for n in sorted(masks) if demo in _members(_member(masks, n, f"{where}, mask"), most, limits, where)]
    return {FILTER_KEYS: names} if names else {}


def _members(mask: Any, most: int, limits: Limits, where: str) -> set[str]:
    """The demos that a filter key lists."""
    if not isinstance(mask, h5py.Dataset) or mask.external or mask.is_virtual or mask.dtype.kind not in "SO":
        raise DataError(f"{where}: {mask.name} is not a list of demos", "delete it from the file")
    if mask.ndim != 1 or len(mask) > most:
        raise DataError(f"{where}: {mask.name} has shape {list(mask.shape)}; the file has {most} demos", "correct it")
    if mask.dtype.kind == "S":
        limits.check_episode(_nbytes(mask), mask.id.get_storage_size(), f"{where}, {mask.name}")
        return {bytes(entry).decode() for entry in mask[()]}
    # Texts of variable length are read one by one, because all can be the same long text in the file.
    return {bytes(mask[index]).decode() for index in range(len(mask))}


def _task(described: Mapping[str, Any]) -> str:
    """The task is the name of LIBERO's BDDL file, or of robomimic's environment."""
    if "bddl_file_name" in described:
        return PurePosixPath(str(described["bddl_file_name"])).stem
    arguments = described.get("env_args")
    return str(arguments.get("env_name", "")) if isinstance(arguments, Mapping) else ""


def _rate(described: Mapping[str, Any]) -> dict[str, float]:
    """Metadata with the steps per second that robosuite was set to."""
    arguments = described.get("env_args")
    settings = arguments.get("env_kwargs") if isinstance(arguments, Mapping) else None
    rate = settings.get("control_freq") if isinstance(settings, Mapping) else None
    return {FPS: rate} if is_rate(rate) else {}


def _suite(described: Mapping[str, Any]) -> str:
    """The suite is the name of the folder of LIBERO's BDDL file."""
    return PurePosixPath(str(described.get("bddl_file_name", ""))).parent.name


def _language(described: Mapping[str, Any]) -> str:
    problem = described.get("problem_info")
    said = problem.get("language_instruction", "") if isinstance(problem, Mapping) else ""
    words = said if isinstance(said, list) else [said]
    return " ".join(map(str, words)).strip('"')
