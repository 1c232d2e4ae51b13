"""Demos of LIBERO and robomimic in HDF5: read.

data/           attributes: env_args; of LIBERO also problem_info, bddl_file_name
  demo_0/       actions, rewards, dones [T, …]; obs/NAME [T, …]; next_obs/NAME if robomimic was asked for it; any more
mask/NAME       robomimic's filter keys: lists of demos

robomimic's observation t is what was seen before action t; LIBERO's is what action t led to, since its script records
what `env.step` returns. The states tell which, for they are always those before the action: where the robot's joints
are those of the next state, observations are moved to the action that follows them, and the first action, before which
nothing was seen, is left out. `dones` is the file's word on termination; robosuite pays 1, plain or shaped, where the
task is solved.
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
from nightshift.data.formats import MOVED, REPEATED_FINAL, Entry, common
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SOURCE = "hdf5"
SUFFIXES = (".hdf5", ".h5")
SOLVED = 1
"""The reward of robosuite for a solved task."""
FILTER_KEYS = "filter_keys"

_STANDARD = ("actions", "rewards")
_FOLDERS = ("obs", "next_obs")
_DESCRIPTIONS = ("env_args", "problem_info", "bddl_file_name")
"""Attributes of a file that its episodes keep; the model's XML and the BDDL text are as long as a demo and stay out."""
_JOINTS = slice(1, 8)
"""Of the arm in robosuite's flattened states: after the time, the robot comes first."""
_JOINT_STATES = "obs/joint_states"
_CLEARLY = 4
"""How many times nearer the joints must be to the next state than to their own."""
_DAMAGE = (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError, MemoryError, OverflowError)
"""What HDF5 says of a file that is cut, changed, or laid out in another way."""


def entries(path: Path, task: str) -> list[Entry]:
    """Of one file, or of all files of a folder, as LIBERO's suites are."""
    places = [(file, demo) for file in _files(path) for demo in _demos(file)]
    return [
        Entry(key=common.key(position, demo), load=partial(load, file, demo, task))
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
    moved = not final and _show_what_followed(arrays)
    if moved:
        arrays = {name: array if name.startswith("obs/") else array[1:] for name, array in arrays.items()}
    actions, rewards = arrays["actions"], arrays["rewards"]
    steps = len(actions) + 1
    solved = bool(np.all(rewards[-1] >= SOLVED))
    terminated = bool(np.all(arrays["dones"][-1])) if "dones" in arrays else solved
    marks = {MOVED: moved, REPEATED_FINAL: not moved and not final}
    return Episode(
        observations={
            name: seen if moved else with_last(seen, final[name][-1] if final else seen[-1])
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
            place=demo,
            task=common.chosen_task(_task(described), task, str(path)),
            suite=_suite(described),
            language=_language(described),
        ),
        extras={name: with_last(a) for name, a in arrays.items() if name not in _STANDARD and "/" not in name},
        metadata={**described, **filters, **{mark: True for mark, holds in marks.items() if holds}},
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
        return sorted(file["data"], key=common.natural)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
            if "data" not in file:
                raise DataError(f"{path} is neither a LIBERO nor a robomimic file: it has no group 'data'")
            yield file
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except _DAMAGE as error:
        raise DataError(f"{path} is damaged or laid out in another way: {error}", "fetch the file again") from None


def _arrays(demo: h5py.Group, where: str) -> dict[str, Column]:
    """Everything a demo holds: "actions", "obs/agentview_rgb", ..."""
    found: dict[str, Column] = {}
    for name in demo:
        if name in _FOLDERS:
            found |= {f"{name}/{inner}": _array(demo[name], inner, f"{where}, {name}") for inner in demo[name]}
        else:
            found[name] = _array(demo, name, where)
    return found


def _array(group: h5py.Group, name: str, where: str) -> Column:
    """One array that lies in the file itself: what points out of it could be any file of this machine."""
    link, array = group.get(name, getlink=True), group[name]
    if not isinstance(link, h5py.HardLink) or not isinstance(array, h5py.Dataset) or array.external or array.is_virtual:
        raise DataError(f"{where}, {name} is not an array in this file")
    if array.shape is None or not array.shape:
        raise DataError(f"{where}, {name} is not an array of steps")
    return common.checked(array[()], f"{where}, {name}")


def _group(arrays: Mapping[str, Column], folder: str) -> dict[str, Column]:
    return {name.removeprefix(f"{folder}/"): a for name, a in arrays.items() if name.startswith(f"{folder}/")}


def _check(arrays: Mapping[str, Column], where: str) -> None:
    seen, after = (sorted(_group(arrays, folder)) for folder in _FOLDERS)
    missing = [name for name in _STANDARD if name not in arrays] + ([] if seen else ["observations"])
    if missing:
        raise DataError(f"{where} has no {missing[0]}", "complete it with robomimic's dataset_states_to_obs first")
    steps = len(arrays["actions"])
    if not steps:
        raise DataError(f"{where} has no steps")
    for name, array in arrays.items():
        if len(array) != steps:
            raise DataError(f"{where}: {name} has {len(array)} steps and actions has {steps}")
    if after and after != seen:
        raise DataError(f"{where}: next_obs has {', '.join(after)} and obs has {', '.join(seen)}")


def _show_what_followed(arrays: Mapping[str, Column]) -> bool:
    """Whether observation t is what action t led to; only where the states leave no doubt."""
    joints, states = arrays.get(_JOINT_STATES), arrays.get("states")
    if joints is None or states is None or states.ndim != 2 or len(states) < 2:  # noqa: PLR2004
        return False
    arm = states[:, _JOINTS]
    if arm.shape != joints.shape:
        return False
    with np.errstate(all="ignore"):  # what is not finite is refused by the schema, with field and step
        to_own, to_next = (np.abs(joints[:-1] - other).mean() for other in (arm[:-1], arm[1:]))
    return bool(_CLEARLY * to_next < to_own)


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
    """The lists of robomimic's (train, valid, better, ...) that name this demo."""
    masks = file.get("mask", {})
    names = [name for name in sorted(masks) if demo.encode() in {bytes(entry) for entry in masks[name][()]}]
    return {FILTER_KEYS: names} if names else {}


def _task(described: Mapping[str, Any]) -> str:
    """LIBERO's tasks are called as their BDDL files, robomimic's as their environments."""
    if "bddl_file_name" in described:
        return PurePosixPath(described["bddl_file_name"]).stem
    arguments = described.get("env_args")
    return str(arguments.get("env_name", "")) if isinstance(arguments, Mapping) else ""


def _suite(described: Mapping[str, Any]) -> str:
    """LIBERO keeps the BDDL files of a suite in a folder of its name."""
    return PurePosixPath(described.get("bddl_file_name", "")).parent.name


def _language(described: Mapping[str, Any]) -> str:
    problem = described.get("problem_info")
    said = problem.get("language_instruction", "") if isinstance(problem, Mapping) else ""
    return (said if isinstance(said, str) else " ".join(said)).strip('"')
