"""Which suites there are, and where each task's BDDL file, assets and frozen init states lie."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.envs import mini
from nightshift.envs.libero_setup import package_folder, prepare, quiet
from nightshift.envs.protocols import Protocol
from nightshift.errors import SimulatorError, StatesNotDrawn
from nightshift.project.paths import INIT_STATES
from nightshift.types import Split, Task

MINI = "libero_mini"
REAL_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
SUITES = (MINI, *REAL_SUITES)

ASSETS_VARIABLE = "NIGHTSHIFT_LIBERO_ASSETS"
ASSET_FOLDERS = ("articulated_objects", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects", "scenes")
DRAW = "nightshift stage states"
"""The command that draws the training states of a real suite."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What it takes to build the simulation of one task."""

    bddl: Path
    assets: Path
    scene: Path | None  # None: the scene LIBERO names itself


def suite_tasks(suite: str) -> list[Task]:
    """The tasks of a suite in LIBERO's own order."""
    names = mini.TASKS if suite == MINI else _real_tasks(suite)
    return [
        Task(suite=suite, name=name, language=language, index=index, suite_size=len(names))
        for index, (name, language) in enumerate(names.items())
    ]


def load_problem(task: Task) -> Problem:
    """Files of `task`, checked."""
    known = [other.name for other in suite_tasks(task.suite)]
    if task.name not in known:
        raise SimulatorError(f"suite {task.suite} has no task {task.name!r}", f"choose one of: {', '.join(known)}")
    if task.suite == MINI:
        return Problem(bddl=bddl_file(task), assets=mini.ASSETS, scene=mini.SCENE)
    return Problem(bddl=bddl_file(task), assets=real_assets(), scene=None)


def bddl_file(task: Task) -> Path:
    """LIBERO's description of the task: objects, where they start, the goal."""
    if task.suite == MINI:
        return mini.bddl_file(task.name)
    return _libero_package() / "bddl_files" / task.suite / f"{task.name}.bddl"


def load_goal(task: Task) -> tuple[tuple[str, ...], ...]:
    """The predicates that must hold at once, e.g. (("on", "cube_1", "plate_1"),)."""
    prepare()
    with quiet():
        from libero.libero.envs.bddl_utils import robosuite_parse_problem

        problem = robosuite_parse_problem(str(bddl_file(task)))
    return tuple(tuple(predicate) for predicate in problem["goal_state"])


def init_states_file(task: Task, split: Split) -> Path:
    """Where the frozen init states of a split lie; only a real suite's training states are made here."""
    if task.suite == MINI:
        return mini.init_states_file(task.name)
    if split == "train":
        return INIT_STATES / task.suite / f"{task.name}.npz"
    return _libero_package() / "init_files" / task.suite / f"{task.name}.pruned_init"


def load_init_states(task: Task, split: Split) -> NDArray[np.float64]:
    """Frozen init states [N, D]."""
    path = init_states_file(task, split)
    if task.suite == MINI:
        remedy = "restore it with git checkout, or make it again with scripts/make_init_states.py"
        return _load_npz(path, ("train",) if split == "train" else ("eval", "more_eval"), remedy)
    if split == "eval":
        return _load_pickle(path)
    if not path.exists():
        raise StatesNotDrawn(f"no training states have been drawn for {task.name}: {path} is missing", DRAW)
    return _load_npz(path, ("train",), f"rm -r {INIT_STATES}, then {DRAW}")


def settle_steps(suite: str, protocol: Protocol) -> int:
    """Control steps before the policy's first; the frozen states of libero_mini are at rest and take none."""
    return 0 if suite == MINI else protocol.settle_steps


def _real_tasks(suite: str) -> dict[str, str]:
    if suite not in REAL_SUITES:
        raise SimulatorError(f"there is no suite {suite!r}", f"choose one of: {', '.join(SUITES)}")
    prepare()
    with quiet():
        from libero.libero.benchmark import get_benchmark

        tasks: list[Any] = get_benchmark(suite)(0).tasks
    return {task.name: task.language for task in tasks}


def _libero_package() -> Path:
    return package_folder("libero") / "libero"


def real_assets() -> Path:
    """LIBERO's meshes and textures: where the user says, or where LIBERO's own download puts them. Never a download."""
    named = os.environ.get(ASSETS_VARIABLE)
    beside = _libero_package() / "assets"
    downloaded = Path.home() / ".cache" / "libero" / "assets"
    candidates = [Path(named)] if named else [beside, downloaded]
    for folder in candidates:
        if all((folder / name).is_dir() for name in ASSET_FOLDERS):
            return folder.resolve()
    places = " or ".join(str(folder) for folder in candidates)
    raise SimulatorError(
        f"there are no LIBERO simulation assets in {places}",
        f"set {ASSETS_VARIABLE} to a folder that holds {', '.join(ASSET_FOLDERS)}, or download them: pip install "
        "huggingface_hub && hf download lerobot/libero-assets --repo-type dataset --local-dir ~/.cache/libero/assets; "
        f"or use the suite {MINI}, which needs none",
    )


def _load_npz(path: Path, names: Sequence[str], remedy: str) -> NDArray[np.float64]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return np.concatenate([arrays[name] for name in names])
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise SimulatorError(f"the init states in {path} cannot be read: {error}", remedy) from error


@cache
def _load_pickle(path: Path) -> NDArray[np.float64]:
    import torch

    try:
        # A pickle, but of an installed package, which could run code anyway.
        return np.asarray(torch.load(path, weights_only=False), dtype=np.float64)
    except OSError as error:
        raise SimulatorError(
            f"the init states in {path} cannot be read: {error}", "reinstall hf-libero==0.1.4"
        ) from error
