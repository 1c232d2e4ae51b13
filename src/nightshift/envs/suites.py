"""Which suites there are, and where each task's BDDL file, assets and frozen init states lie."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.envs import mini
from nightshift.envs.libero_setup import package_folder, prepare, quiet
from nightshift.errors import SimulatorError
from nightshift.types import Split, Task

MINI = "libero_mini"
REAL_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
SUITES = (MINI, *REAL_SUITES)

ASSETS_VARIABLE = "NIGHTSHIFT_LIBERO_ASSETS"
ASSET_FOLDERS = ("articulated_objects", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects", "scenes")
SETTLE_STEPS = 10
"""Control steps LIBERO's evaluations let the objects of a real suite come to rest for."""
SAMPLED_TRAIN_STATES = 200
"""Real suites ship no init states beyond the 50 for evaluation; training draws this many from LIBERO's samplers."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What it takes to build the simulation of one task."""

    bddl: Path
    assets: Path
    scene: Path | None  # None: the scene LIBERO names itself
    settle_steps: int


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
        return Problem(bddl=mini.bddl_file(task.name), assets=mini.ASSETS, scene=mini.SCENE, settle_steps=0)
    return _real_problem(task)


def load_init_states(task: Task) -> dict[Split, NDArray[np.float64]]:
    """Frozen init states by split, each [N, D]. A split that is not in it is drawn from LIBERO's samplers."""
    if task.suite == MINI:
        return _load_npz(mini.init_states_file(task.name))
    return {"eval": _load_pickle(_libero_package() / "init_files" / task.suite / f"{task.name}.pruned_init")}


def init_state_count(task: Task, split: Split) -> int:
    """How many init states `task` has, without building its simulation."""
    states = load_init_states(task).get(split)
    return SAMPLED_TRAIN_STATES if states is None else len(states)


def _real_tasks(suite: str) -> dict[str, str]:
    if suite not in REAL_SUITES:
        raise SimulatorError(f"there is no suite {suite!r}", f"choose one of: {', '.join(SUITES)}")
    prepare()
    with quiet():
        from libero.libero.benchmark import get_benchmark

        tasks: list[Any] = get_benchmark(suite)(0).tasks
    return {task.name: task.language for task in tasks}


def _real_problem(task: Task) -> Problem:
    bddl = _libero_package() / "bddl_files" / task.suite / f"{task.name}.bddl"
    return Problem(bddl=bddl, assets=_real_assets(), scene=None, settle_steps=SETTLE_STEPS)


def _libero_package() -> Path:
    return package_folder("libero") / "libero"


def _real_assets() -> Path:
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


def _load_npz(path: Path) -> dict[Split, NDArray[np.float64]]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {"train": arrays["train"], "eval": np.concatenate([arrays["eval"], arrays["more_eval"]])}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        fix = "restore it with git checkout, or make it again with scripts/make_init_states.py"
        raise SimulatorError(f"the init states in {path} cannot be read: {error}", fix) from error


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
