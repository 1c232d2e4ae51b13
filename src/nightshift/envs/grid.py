"""The grid of an evaluation: which init states are played, under which conditions, and the digest of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nightshift import config, envs
from nightshift.envs.splits import evaluation_states


def cells(env: config.Env, init_states: config.CountOrAuto) -> list[tuple[str, int]]:
    """Every task with its first held-out states."""
    return [(task.name, state) for task in envs.tasks(env) for state in evaluation_states(task, env, init_states)]


def conditions(env: config.Env, evaluate: config.Evaluate, cameras: Sequence[str]) -> dict[str, Any]:
    """What every episode is played under; `cameras` are inputs of the policies."""
    return {**envs.conditions(env, cameras), "temperature": evaluate.temperature}


def digest(env: config.Env, evaluate: config.Evaluate, cameras: Sequence[str]) -> str:
    """Two evaluations may be compared exactly when they played the same states under the same conditions."""
    states = {task.name: envs.init_states_digest(task, "eval") for task in envs.tasks(env)}
    content = [env.suite, cells(env, evaluate.init_states), states, conditions(env, evaluate, cameras)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def cameras_in(env: config.Env, observations: Collection[str]) -> list[str]:
    """The suite's cameras among the observations of policies."""
    return [camera for camera in envs.selected(env).cameras if camera in observations]


def misfit(env: config.Env, shapes: Mapping[str, Sequence[int]]) -> str:
    """Why a policy with inputs of these shapes cannot play here, in words; empty if it can."""
    space = envs.observation_space(env)
    for name, shape in shapes.items():
        if name not in space:
            return f"it reads {name}, which {env.suite} does not have with these cameras"
        if tuple(space[name].shape) != tuple(shape):
            return f"it reads {name} of shape {list(shape)}, and here it is {list(space[name].shape)}"
    return ""
