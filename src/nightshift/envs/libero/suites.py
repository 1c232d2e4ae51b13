"""LIBERO's suites: where each task's BDDL file, assets and frozen init states lie."""

from __future__ import annotations

import os
import sys
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nightshift import config
from nightshift.envs.base import (
    ArraySpec,
    Drawing,
    DrawnState,
    Finding,
    Fleet,
    Flip,
    InitStates,
    Predicate,
    States,
    Suite,
    stored_split,
)
from nightshift.envs.libero.problem import ACTIONS, STATE_SIZES, Problem
from nightshift.envs.libero.setup import gl_backend, package_folder, prepare, quiet
from nightshift.envs.protocols import DEFAULT, Protocol
from nightshift.errors import SimulatorError, StatesNotDrawn
from nightshift.project.paths import INIT_STATES
from nightshift.types import Split, Task

if TYPE_CHECKING:  # they load mujoco
    from nightshift.envs.libero.env import LiberoEnv
    from nightshift.envs.libero.fleet import LiberoFleet

ASSETS_VARIABLE = "NIGHTSHIFT_LIBERO_ASSETS"
ASSET_FOLDERS = ("articulated_objects", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects", "scenes")
DRAW = "nightshift stage states"
"""The command that draws training states."""

AS_LIBERO_DRAWS = config.Cameras(names=("agentview", "wrist"), size="auto", shadows=True)


class LiberoSuite(Suite):
    """Tasks that LIBERO's problem classes simulate, whoever wrote their BDDL files."""

    action_space = ACTIONS
    packages = {"mujoco": "mujoco", "robosuite": "robosuite", "libero": "hf-libero"}  # noqa: RUF012
    cameras = ("agentview", "wrist")
    redraws = True
    perturbation_kinds = frozenset({"scene", "action", "gripper", "observation", "instruction"})
    arm_noise = 0.0
    """Standard deviation of the arm's joints in drawn init states, in radians."""

    @abstractmethod
    def instructions(self) -> Mapping[str, str]:
        """The instruction of every task by its name, in the order of the suite."""

    @abstractmethod
    def bddl_file(self, task: str) -> Path:
        """LIBERO's description of a task: objects, where they start, the goal."""

    @abstractmethod
    def load_init_states(self, task: Task, split: Split) -> States:
        """Frozen init states [N, D]."""

    @abstractmethod
    def _problem(self, task: str) -> Problem: ...

    def tasks(self) -> list[Task]:
        instructions = self.instructions()
        return [
            Task(suite=self.name, name=name, language=language, index=index, suite_size=len(instructions))
            for index, (name, language) in enumerate(instructions.items())
        ]

    def problem(self, task: Task) -> Problem:
        """Files of `task`, checked."""
        known = self.instructions()
        if task.name not in known:
            raise SimulatorError(f"suite {self.name} has no task {task.name!r}", f"choose one of: {', '.join(known)}")
        return self._problem(task.name)

    def compile_command(self) -> list[str]:
        return [sys.executable, "-m", "nightshift.envs.libero.compiling"]

    def goal(self, task: Task) -> tuple[Predicate, ...]:
        prepare()
        with quiet():
            from libero.libero.envs.bddl_utils import robosuite_parse_problem

            problem = robosuite_parse_problem(str(self.bddl_file(task.name)))
        return tuple(tuple(predicate) for predicate in problem["goal_state"])

    def state_space(self) -> Mapping[str, ArraySpec]:
        vectors = {name: ArraySpec((size,)) for name, size in STATE_SIZES.items()}
        return {**vectors, "task": ArraySpec((len(self.instructions()),))}

    def init_states(self, task: Task, split: Split) -> InitStates:
        return InitStates.of(self.load_init_states(task, split))

    def make_env(
        self,
        task: Task,
        protocol: Protocol = DEFAULT,
        cameras: config.Cameras = AS_LIBERO_DRAWS,
        *,
        compiled: bool = True,
    ) -> LiberoEnv:
        from nightshift.envs.libero.env import LiberoEnv

        return LiberoEnv(self, task, protocol, self.drawing(protocol, cameras), compiled=compiled)

    def make_fleet(
        self,
        task: Task,
        protocol: Protocol = DEFAULT,
        cameras: config.Cameras = AS_LIBERO_DRAWS,
        train_states: States | None = None,
    ) -> LiberoFleet:
        from nightshift.envs.libero.env import LiberoEnv
        from nightshift.envs.libero.fleet import LiberoFleet

        drawing = self.drawing(protocol, cameras)
        return LiberoFleet(LiberoEnv(self, task, protocol, drawing, train_states=train_states))

    def check_drawing(self) -> None:
        from nightshift.envs.libero import cameras

        cameras.check()

    def image_conditions(self, protocol: Protocol, cameras: config.Cameras) -> dict[str, Any]:
        """GL backends render different pixels, so the one in use is part of the conditions."""
        return {**super().image_conditions(protocol, cameras), "gl": gl_backend()}

    def flip(self, drawing: Drawing) -> Flip:
        """LIBERO's first row is the lowest; turned by 180°, left and right are exchanged instead."""
        return "horizontal" if drawing.rotated else "vertical"

    def sketch(self, fleet: Fleet, *, films_alone: bool) -> None:
        """Without antialiasing and with coarser meshes: a third of the time where a CPU draws."""
        from nightshift.envs.libero.fleet import LiberoFleet

        assert isinstance(fleet, LiberoFleet)
        fleet.sketch(films_alone=films_alone)

    def findings(self) -> Iterator[Finding]:
        from nightshift.envs.libero import checks

        return checks.findings()


class BenchmarkSuite(LiberoSuite):
    """A suite of LIBERO's own benchmark: it ships evaluation states alone, and its assets have to be downloaded."""

    draws_train_states = True
    arm_noise = 0.02  # robosuite's default, which the evaluation states were drawn with

    def __init__(self, name: str) -> None:
        self.name = name

    def instructions(self) -> Mapping[str, str]:
        prepare()
        with quiet():
            from libero.libero.benchmark import get_benchmark

            tasks: list[Any] = get_benchmark(self.name)(0).tasks
        return {task.name: task.language for task in tasks}

    def benchmark(self, task: Task) -> str:
        return self._home(task.name)

    def _home(self, task: str) -> str:
        """LIBERO's suite that has the task."""
        return self.name

    def bddl_file(self, task: str) -> Path:
        return _libero_package() / "bddl_files" / self._home(task) / f"{task}.bddl"

    def _problem(self, task: str) -> Problem:
        return Problem(bddl=self.bddl_file(task), assets=self.assets())

    def load_init_states(self, task: Task, split: Split) -> States:
        if stored_split(split) == "eval":
            return _load_pickle(_libero_package() / "init_files" / self.benchmark(task) / f"{task.name}.pruned_init")
        path = INIT_STATES / self.name / f"{task.name}.npz"
        if not path.exists():
            raise StatesNotDrawn(f"no training states have been drawn for {task.name}: {path} is missing", DRAW)
        return load_npz(path, ("train",), f"rm -r {INIT_STATES}, then {DRAW}")

    def draw_train_states(
        self, task: Task, protocol: Protocol, seed: int, drawn: Sequence[DrawnState]
    ) -> Iterator[DrawnState]:
        from nightshift.envs.libero.drawing import draw

        known = [*self.load_init_states(task, "eval"), *(one.state for one in drawn)]
        yield from draw(self.make_env(task, protocol), seed, known, start=drawn[-1].attempt + 1 if drawn else 0)

    def settle_steps(self, protocol: Protocol) -> int:
        return protocol.settle_steps

    def drawn_resolution(self, protocol: Protocol, size: int) -> int:
        """As published: smaller images are averaged from those."""
        return protocol.resolution

    def assets(self) -> Path:
        """LIBERO's meshes and textures: in the folder the user names, or where LIBERO's own download puts them.

        Nothing is ever downloaded here.
        """
        named = os.environ.get(ASSETS_VARIABLE)
        downloads = [_libero_package() / "assets", Path.home() / ".cache" / "libero" / "assets"]
        candidates = [Path(named)] if named else downloads
        for folder in candidates:
            if all((folder / name).is_dir() for name in ASSET_FOLDERS):
                return folder.resolve()
        raise SimulatorError(
            f"there are no LIBERO simulation assets in {' or '.join(map(str, candidates))}",
            f"set {ASSETS_VARIABLE} to a folder that holds {', '.join(ASSET_FOLDERS)}, or download them: pip install "
            "huggingface_hub && hf download lerobot/libero-assets --repo-type dataset --local-dir "
            "~/.cache/libero/assets; or use the suite libero_mini, which needs none",
        )


class JointSuite(BenchmarkSuite):
    """The tasks of several of LIBERO's suites, for one policy that plays them all."""

    def __init__(self, name: str, parts: Sequence[BenchmarkSuite]) -> None:
        super().__init__(name)
        self._parts = tuple(parts)

    def benchmarks(self) -> tuple[str, ...]:
        return tuple(part.name for part in self._parts)

    def instructions(self) -> Mapping[str, str]:
        return {name: told for part in self._parts for name, told in part.instructions().items()}

    def _home(self, task: str) -> str:
        return self._homes[task]

    @cached_property
    def _homes(self) -> Mapping[str, str]:
        return {name: part.name for part in self._parts for name in part.instructions()}


def load_npz(path: Path, arrays: Sequence[str], remedy: str) -> States:
    """The named arrays of a file, one after the other."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as content:
            return np.concatenate([content[name] for name in arrays])
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise SimulatorError(f"the init states in {path} cannot be read: {error}", remedy) from error


@cache
def _load_pickle(path: Path) -> States:
    import torch

    try:
        # A pickle, but of an installed package, which could run code anyway.
        return np.asarray(torch.load(path, weights_only=False), dtype=np.float64)
    except OSError as error:
        raise SimulatorError(
            f"the init states in {path} cannot be read: {error}", "reinstall hf-libero==0.1.4"
        ) from error


def _libero_package() -> Path:
    return package_folder("libero") / "libero"


LIBERO_SPATIAL, LIBERO_OBJECT, LIBERO_GOAL, LIBERO_10, LIBERO_90 = BENCHMARK_SUITES = tuple(
    BenchmarkSuite(name) for name in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
)
LIBERO_40 = JointSuite("libero_40", (LIBERO_SPATIAL, LIBERO_OBJECT, LIBERO_GOAL, LIBERO_10))
"""The four suites that papers report."""
