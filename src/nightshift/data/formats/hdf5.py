"""Reads HDF5 demos of LIBERO and robomimic.

data/           attributes: env_args; of LIBERO also problem_info, bddl_file_name
  demo_0/       actions, rewards, dones [T, …]; obs/NAME [T, …]; optionally next_obs/NAME; other arrays
mask/NAME       robomimic's filter keys: lists of demos

In robomimic observation t precedes action t. In LIBERO it follows action t, because its script records what `env.step`
returns. `states` always precede the action, so comparing them with the joint positions tells which case a file is: if
the joints match the next state, observations are shifted to the next action, and the first action, which has no
observation, is dropped. `dones` flags termination; robosuite's reward of a solved task is 1, sparse or shaped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np

from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.data.formats import OBSERVATIONS_SHIFTED, REPEATED_FINAL, EpisodeRef, common
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SOURCE = "hdf5"
SUFFIXES = (".hdf5", ".h5")
SUCCESS_REWARD = 1
"""Robosuite's reward for a solved task."""
FILTER_KEYS = "filter_keys"

_STANDARD = ("actions", "rewards")
_FOLDERS = ("obs", "next_obs")
_DESCRIPTIONS = ("env_args", "problem_info", "bddl_file_name")
"""File attributes that go into the metadata; the model XML and the BDDL text are left out because they are large."""
_JOINTS = slice(1, 8)
"""The arm joints in robosuite's flattened states; index 0 is the time."""
_JOINT_STATES = "obs/joint_states"
_MIN_DISTANCE_RATIO = 4
"""Observations are shifted if the joints are this many times closer to the next state than to the current one."""
_READ_ERRORS = (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError, MemoryError, OverflowError)
"""Raised by h5py for a file that is truncated, damaged or has another layout."""


def list_episodes(path: Path, task: str) -> list[EpisodeRef]:
    """The demos of one file, or of all files of a folder such as a LIBERO suite."""
    places = [(file, demo) for file in _files(path) for demo in _demos(file)]
    return [
        EpisodeRef(key=common.episode_key(position, demo), load=partial(load, file, demo, task))
        for position, (file, demo) in enumerate(places)
    ]


def load(path: Path, demo: str, task: str) -> Episode:
    where = f"{path}, {demo}"
    with _opened(path) as file:
        described = _description(file["data"])
        arrays = _arrays(file["data"][demo], where)
        filters = _filters(file, demo)
    _check(arrays, where)
    final = _group(arrays, "next_obs")
    shifted = not final and _observations_follow_actions(arrays)
    if shifted:
        arrays = {name: array if name.startswith("obs/") else array[1:] for name, array in arrays.items()}
    actions, rewards = arrays["actions"], arrays["rewards"]
    steps = len(actions) + 1
    solved = bool(np.all(rewards[-1] >= SUCCESS_REWARD))
    terminated = bool(np.all(arrays["dones"][-1])) if "dones" in arrays else solved
    flags = {OBSERVATIONS_SHIFTED: shifted, REPEATED_FINAL: not shifted and not final}
    return Episode(
        observations={
            name: seen if shifted else with_last(seen, final[name][-1] if final else seen[-1])
            for name, seen in _group(arrays, "obs").items()
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
        extras={name: with_last(a) for name, a in arrays.items() if name not in _STANDARD and "/" not in name},
        metadata={**described, **filters, **{flag: True for flag, holds in flags.items() if holds}},
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not found:
        raise DataError(f"{path} has no {' or '.join(SUFFIXES)} files")
    return found


def _demos(path: Path) -> list[str]:
    with _opened(path) as file:
        return sorted(file["data"], key=common.natural_sort_key)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
            if "data" not in file:
                raise DataError(f"{path} is neither a LIBERO nor a robomimic file: it has no group 'data'")
            yield file
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except _READ_ERRORS as error:
        raise DataError(f"{path} is damaged or has another layout: {error}", "download the file again") from None


def _arrays(demo: h5py.Group, where: str) -> dict[str, Column]:
    """All arrays of a demo: "actions", "obs/agentview_rgb", ..."""
    found: dict[str, Column] = {}
    for name in demo:
        if name in _FOLDERS:
            found |= {f"{name}/{inner}": _array(demo[name], inner, f"{where}, {name}") for inner in demo[name]}
        else:
            found[name] = _array(demo, name, where)
    return found


def _array(group: h5py.Group, name: str, where: str) -> Column:
    """Read an array that is stored in the file; external links are refused, as they could point to any local file."""
    link, array = group.get(name, getlink=True), group[name]
    if not isinstance(link, h5py.HardLink) or not isinstance(array, h5py.Dataset) or array.external or array.is_virtual:
        raise DataError(f"{where}, {name} is not an array in this file")
    if array.shape is None or not array.shape:
        raise DataError(f"{where}, {name} is not an array of steps")
    return common.native_dtype(array[()], f"{where}, {name}")


def _group(arrays: Mapping[str, Column], folder: str) -> dict[str, Column]:
    return {name.removeprefix(f"{folder}/"): a for name, a in arrays.items() if name.startswith(f"{folder}/")}


def _check(arrays: Mapping[str, Column], where: str) -> None:
    obs, next_obs = (sorted(_group(arrays, folder)) for folder in _FOLDERS)
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


def _description(data: h5py.Group) -> dict[str, Any]:
    return {name: _parsed(data.attrs[name]) for name in _DESCRIPTIONS if name in data.attrs}


def _parsed(text: Any) -> Any:
    """Attributes are JSON or plain text."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _filters(file: h5py.File, demo: str) -> dict[str, list[str]]:
    """The filter keys of robomimic (train, valid, better, ...) that contain this demo."""
    masks = file.get("mask", {})
    names = [name for name in sorted(masks) if demo.encode() in {bytes(entry) for entry in masks[name][()]}]
    return {FILTER_KEYS: names} if names else {}


def _task(described: Mapping[str, Any]) -> str:
    """The task is the name of LIBERO's BDDL file, or of robomimic's environment."""
    if "bddl_file_name" in described:
        return PurePosixPath(described["bddl_file_name"]).stem
    arguments = described.get("env_args")
    return str(arguments.get("env_name", "")) if isinstance(arguments, Mapping) else ""


def _suite(described: Mapping[str, Any]) -> str:
    """The suite is the name of the folder of LIBERO's BDDL file."""
    return PurePosixPath(described.get("bddl_file_name", "")).parent.name


def _language(described: Mapping[str, Any]) -> str:
    problem = described.get("problem_info")
    said = problem.get("language_instruction", "") if isinstance(problem, Mapping) else ""
    return (said if isinstance(said, str) else " ".join(said)).strip('"')
