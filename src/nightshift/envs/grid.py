"""The grid of an evaluation: which init states are played, under which conditions, and the digest of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nightshift import config, envs
from nightshift.envs import protocols
from nightshift.errors import SimulatorError


def cells(env: config.Env, init_states: config.CountOrAuto) -> list[tuple[str, int]]:
    """Every task with its first held-out states."""
    if init_states == "auto":
        init_states = protocols.find(env.protocol).trials
    found = []
    for task in envs.tasks(env):
        available = envs.init_state_count(task, "eval")
        if init_states > available:
            raise SimulatorError(
                f"{task.name} has {available} evaluation init states, {init_states} are asked for",
                "lower evaluate.init_states in params.yaml",
            )
        found += [(task.name, state) for state in range(init_states)]
    return found


def conditions(env: config.Env, evaluate: config.Evaluate, cameras: Sequence[str]) -> dict[str, Any]:
    """What every episode is played under; `cameras` are inputs of the policies."""
    return {**envs.conditions(env, cameras), "temperature": evaluate.temperature}


def digest(env: config.Env, evaluate: config.Evaluate, cameras: Sequence[str]) -> str:
    """Two evaluations may be compared exactly when they played the same states under the same conditions."""
    states = {task.name: envs.init_states_digest(task, "eval") for task in envs.tasks(env)}
    content = [env.suite, cells(env, evaluate.init_states), states, conditions(env, evaluate, cameras)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def cameras_in(suite: str, observations: Sequence[str]) -> list[str]:
    """The suite's cameras among the observations of a policy."""
    return [camera for camera in envs.suite(suite).cameras if camera in observations]


def misfit(env: config.Env, shapes: Mapping[str, Sequence[int]]) -> str:
    """Why a policy with inputs of these shapes cannot play here, in words; empty if it can."""
    space = envs.observation_space(env)
    for name, shape in shapes.items():
        if name not in space:
            return f"it reads {name}, which {env.suite} does not have with these cameras"
        if tuple(space[name].shape) != tuple(shape):
            return f"it reads {name} of shape {list(shape)}, and here it is {list(space[name].shape)}"
    return ""
