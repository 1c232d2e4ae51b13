"""Environments by name. A new one is one new module and one line in `make`."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

from nightshift import config
from nightshift.envs.base import Env, Fleet
from nightshift.errors import SimulatorError
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


def make(task: Task) -> Env:
    """A simulator for one task. The heavy imports happen here, in the process that simulates."""
    if task.suite == FAKE:
        from nightshift.envs.fake import FakeEnv

        return FakeEnv(task)
    from nightshift.envs.libero import LiberoEnv

    return LiberoEnv(task)


def make_fleet(task: Task) -> Fleet:
    """Simulators for one task that step together."""
    if task.suite == FAKE:
        from nightshift.envs.turn_by_turn import TurnByTurn

        return TurnByTurn(task, make)
    from nightshift.envs.fleet import LiberoFleet

    return LiberoFleet(task)


def init_state_count(task: Task, split: Split) -> int:
    """How many frozen init states a task has, without building its simulator."""
    if task.suite == FAKE:
        from nightshift.envs.fake import STATES

        return STATES[split]
    from nightshift.envs.suites import init_state_count as count

    return count(task, split)


def init_states_digest(task: Task, split: Split) -> str:
    """Of the init states themselves: other states under the same numbers are another experiment."""
    if task.suite == FAKE:
        return FAKE
    from nightshift.envs.suites import load_init_states

    states = load_init_states(task).get(split)
    return "sampled" if states is None else hashlib.sha256(states.tobytes()).hexdigest()


def versions(suite: str) -> dict[str, str]:
    """Versions that a result of this suite depends on."""
    packages = {} if suite == FAKE else {"mujoco": "mujoco", "robosuite": "robosuite", "libero": "hf-libero"}
    return {name: version(package) for name, package in {**packages, "nightshift": "nightshift"}.items()}


def _suite(name: str) -> list[Task]:
    if name == FAKE:
        from nightshift.envs.fake import TASKS

        return TASKS
    from nightshift.envs.suites import suite_tasks

    return suite_tasks(name)
