"""Simulator suites by name, as params.yaml selects them. `registry` says which there are; `base.Suite` what one is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nightshift import config
from nightshift.envs import protocols, registry
from nightshift.envs.base import ArraySpec, Env, Fleet, States, Suite, installed
from nightshift.errors import ConfigError, SimulatorError, StatesNotDrawn
from nightshift.types import Split, Task

__all__ = [
    "PortableFleets",
    "check_cameras",
    "conditions",
    "draw_on_gpu",
    "horizon",
    "horizons",
    "init_state_count",
    "init_states_digest",
    "installed",
    "lacks_train_states",
    "make",
    "make_fleet",
    "observation_space",
    "portable_fleets",
    "selected",
    "suite",
    "tasks",
    "versions",
]


def suite(name: str) -> Suite:
    return registry.find(name)


def selected(env: config.Env) -> Suite:
    """The suite that params.yaml selects, with its settings."""
    return suite(env.suite).configured(env)


def tasks(env: config.Env) -> list[Task]:
    """The tasks that params.yaml selects, in the order it names them."""
    available = {task.name: task for task in selected(env).tasks()}
    unknown = [name for name in env.tasks if name not in available]
    if unknown:
        raise SimulatorError(
            f"{env.suite} has no task {', '.join(unknown)}; it has {', '.join(available)}",
            "edit env.tasks in params.yaml",
        )
    return [available[name] for name in env.tasks] if env.tasks else list(available.values())


def make(task: Task, env: config.Env) -> Env:
    """A simulator for one task."""
    return suite(task.suite).configured(env).make_env(task, protocols.find(env.protocol), env.cameras)


def make_fleet(task: Task, env: config.Env, train_states: States | None = None) -> Fleet:
    """Simulators for one task that step together. Training states are read from the project unless given."""
    chosen = suite(task.suite).configured(env)
    return chosen.make_fleet(task, protocols.find(env.protocol), env.cameras, train_states)


def observation_space(env: config.Env) -> dict[str, ArraySpec]:
    """Every observation that a policy gets with these settings, by name: of the cameras those in env.cameras."""
    chosen = selected(env)
    return dict(chosen.observation_space(chosen.drawing(protocols.find(env.protocol), env.cameras).sizes))


def check_cameras(env: config.Env) -> None:
    """Refuse cameras that cannot be drawn before any work is done: SimulatorError."""
    chosen = selected(env)
    chosen.drawing(protocols.find(env.protocol), env.cameras)
    if env.cameras.names:
        chosen.check_drawing()


def draw_on_gpu(index: int) -> None:
    """Call it before anything is drawn, in a process that shares a machine with several GPUs.

    mujoco draws on the first GPU whatever CUDA_VISIBLE_DEVICES says. The user's own choice stays.
    """
    os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", str(index))


def horizon(env: config.Env, task: Task) -> int:
    """Control steps until an episode of the task counts as failed."""
    if env.horizon != "auto":
        return env.horizon
    return protocols.max_steps(protocols.find(env.protocol), suite(env.suite).benchmark(task))


def horizons(env: config.Env) -> dict[str, int]:
    """Of the selected tasks, by the published suite that they come from."""
    if env.horizon != "auto":
        return dict.fromkeys(selected(env).benchmarks(), env.horizon)
    return {suite(env.suite).benchmark(task): horizon(env, task) for task in tasks(env)}


def check_whole_decisions(env: config.Env, chunk: int) -> None:
    """ConfigError if a time limit would cut a decision of `chunk` steps short."""
    for limit in horizons(env).values():
        if limit % chunk:
            raise ConfigError(
                f"policy.chunk ({chunk}) does not divide env.horizon ({limit}): "
                "a time limit would cut a decision short",
                "change one of them in params.yaml",
            )


@dataclass(frozen=True)
class PortableFleets:
    """Makes fleets on another machine: it carries the drawn training states, which only the project's folder has."""

    drawn: Mapping[str, States]
    """Training states [N, D] by task."""

    def __call__(self, task: Task, env: config.Env) -> Fleet:
        return make_fleet(task, env, self.drawn.get(task.name))


def portable_fleets(env: config.Env) -> PortableFleets:
    """With the states as they are now. Resetting a task whose states are not drawn yet raises StatesNotDrawn."""
    chosen = selected(env)
    drawn: dict[str, States] = {}
    for task in tasks(env) if chosen.draws_train_states else ():
        with contextlib.suppress(StatesNotDrawn):
            states = chosen.init_states(task, "train").states
            if states is not None:
                drawn[task.name] = states
    return PortableFleets(drawn)


def init_state_count(task: Task, split: Split) -> int:
    """How many frozen init states a task has, without building its simulator."""
    return suite(task.suite).init_states(task, split).count


def init_states_digest(task: Task, split: Split) -> str:
    """Of the init states themselves: other states under the same indices are another experiment."""
    return suite(task.suite).init_states(task, split).digest


def lacks_train_states(task: Task) -> bool:
    """Whether training states have to be drawn."""
    return suite(task.suite).draws_train_states


def conditions(env: config.Env, cameras: Sequence[str]) -> dict[str, Any]:
    """What an episode is played under, with `cameras` as inputs: results compare only if all of it is the same."""
    protocol, chosen = protocols.find(env.protocol), selected(env)
    seen = env.cameras.model_copy(update={"names": tuple(cameras)})
    steps = horizons(env)
    return {
        "protocol": protocol.name,
        "horizon": steps if len(set(steps.values())) > 1 else next(iter(steps.values())),
        "settle_steps": chosen.settle_steps(protocol),
        "settle_action": list(protocol.settle_action),
        "seed": protocol.seed,
        "pictures": chosen.image_conditions(protocol, seen) if cameras else "not used",
        "versions": versions(env.suite),
    }


def versions(suite_name: str) -> dict[str, str]:
    """Versions that a result of this suite depends on, with that of the package that adds it."""
    entry = registry.plug_in(suite_name)
    added = {entry.dist.name: entry.dist.version} if entry and entry.dist else {}
    return suite(suite_name).versions() | added
