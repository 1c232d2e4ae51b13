"""Environments by name. A new one is one new module and one line in `make`."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift import config
from nightshift.envs import protocols
from nightshift.envs.base import Camera, Env, Fleet
from nightshift.errors import SimulatorError, StatesNotDrawn
from nightshift.types import Split, Task

FAKE = "fake"


def tasks(env: config.Env) -> list[Task]:
    """The tasks that params.yaml selects, in the order it names them."""
    available = {task.name: task for task in _suite(env.suite)}
    unknown = [name for name in env.tasks if name not in available]
    if unknown:
        raise SimulatorError(
            f"{env.suite} has no task {', '.join(unknown)}; it has {', '.join(available)}",
            "edit env.tasks in params.yaml",
        )
    return [available[name] for name in env.tasks] if env.tasks else list(available.values())


def make(task: Task, protocol: str) -> Env:
    """A simulator for one task. The heavy imports happen here, in the process that simulates."""
    if task.suite == FAKE:
        from nightshift.envs.fake import FakeEnv

        return FakeEnv(task)
    from nightshift.envs.libero import LiberoEnv

    return LiberoEnv(task, protocols.find(protocol))


def horizon(env: config.Env) -> int:
    """Control steps until an episode counts as failed."""
    return protocols.max_steps(protocols.find(env.protocol), env.suite) if env.horizon == "auto" else env.horizon


def make_fleet(task: Task, protocol: str, train_states: NDArray[np.float64] | None = None) -> Fleet:
    """Simulators for one task that step together. Training states are read from where they lie unless given."""
    if task.suite == FAKE:
        from nightshift.envs.turn_by_turn import TurnByTurn

        return TurnByTurn(lambda: make(task, protocol))
    from nightshift.envs.fleet import LiberoFleet

    return LiberoFleet(task, protocols.find(protocol), train_states=train_states)


@dataclass(frozen=True)
class PortableFleets:
    """Makes fleets on any machine that has the packages: it brings along what else lies in the project alone."""

    drawn: Mapping[str, NDArray[np.float64]]
    """Training states [N, D] by task, where they were drawn."""

    def __call__(self, task: Task, protocol: str) -> Fleet:
        return make_fleet(task, protocol, self.drawn.get(task.name))


def portable_fleets(env: config.Env) -> PortableFleets:
    """With the states as they are now. None may be drawn yet; then who asks for one is told so."""
    drawn = {}
    for task in tasks(env):
        if lacks_train_states(task):
            from nightshift.envs.suites import load_init_states

            with contextlib.suppress(StatesNotDrawn):
                drawn[task.name] = load_init_states(task, "train")
    return PortableFleets(drawn)


def init_state_count(task: Task, split: Split) -> int:
    """How many frozen init states a task has, without building its simulator."""
    if task.suite == FAKE:
        from nightshift.envs.fake import STATES

        return STATES[split]
    from nightshift.envs.suites import load_init_states

    return len(load_init_states(task, split))


def lacks_train_states(task: Task) -> bool:
    """Whether training states have to be drawn: LIBERO's own suites ship theirs for evaluation alone."""
    if task.suite == FAKE:
        return False
    from nightshift.envs.suites import REAL_SUITES

    return task.suite in REAL_SUITES


def init_states_digest(task: Task, split: Split) -> str:
    """Of the init states themselves: other states under the same numbers are another experiment."""
    if task.suite == FAKE:
        return FAKE
    from nightshift.envs.suites import load_init_states

    return hashlib.sha256(load_init_states(task, split).tobytes()).hexdigest()


def conditions(env: config.Env, cameras: Sequence[Camera]) -> dict[str, Any]:
    """What an episode is played under, seen through `cameras`: two results compare only if all of it is the same."""
    protocol = protocols.find(env.protocol)
    return {
        "protocol": protocol.name,
        "horizon": horizon(env),
        "settle_steps": 0 if env.suite == FAKE else _settle_steps(env.suite, protocol),
        "settle_action": list(protocol.settle_action),
        "seed": protocol.seed,
        "pictures": _pictures(protocol, cameras),
        "versions": versions(env.suite),
    }


def compile_command(suite: str) -> list[str] | None:
    """The command that compiles what this suite's simulators need, ahead of them; None if that is nothing."""
    return None if suite == FAKE else [sys.executable, "-m", "nightshift.envs.compiling"]


def versions(suite: str) -> dict[str, str]:
    """Versions that a result of this suite depends on."""
    packages = {} if suite == FAKE else {"mujoco": "mujoco", "robosuite": "robosuite", "libero": "hf-libero"}
    return {name: installed(package) for name, package in {**packages, "nightshift": "nightshift"}.items()}


def installed(package: str) -> str:
    """Its version here, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _pictures(protocol: protocols.Protocol, cameras: Sequence[Camera]) -> dict[str, Any] | str:
    """Backends draw differently, so a result that pictures went into names the one in use."""
    if not cameras:
        return "not used"
    from nightshift.envs.libero_setup import gl_backend

    return {
        "cameras": sorted(cameras),
        "resolution": protocol.resolution,
        "rotated": protocol.rotated,
        "gl": gl_backend(),
    }


def _settle_steps(suite: str, protocol: protocols.Protocol) -> int:
    from nightshift.envs.suites import settle_steps

    return settle_steps(suite, protocol)


def _suite(name: str) -> list[Task]:
    if name == FAKE:
        from nightshift.envs.fake import TASKS

        return TASKS
    from nightshift.envs.suites import suite_tasks

    return suite_tasks(name)
