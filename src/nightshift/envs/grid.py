"""The grid of an evaluation: which init states are played, under which conditions, and the digest of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import nightshift
from nightshift import config, envs, files
from nightshift.envs import registry
from nightshift.envs.splits import evaluation_states
from nightshift.errors import ConfigError
from nightshift.project import packages
from nightshift.types import INSTRUCTION

if TYPE_CHECKING:
    from nightshift.policies.base import Policy

_PLAYING = ("envs", "rollouts")
"""Folders of this package whose code plays episodes."""


def cells(
    env: config.Env, init_states: config.CountOrAuto, parameter: str = "evaluate.init_states"
) -> list[tuple[str, int]]:
    """Every task with its first held-out states; `parameter` of params.yaml says how many."""
    return [
        (task.name, state) for task in envs.tasks(env) for state in evaluation_states(task, env, init_states, parameter)
    ]


def conditions(env: config.Env, evaluate: config.Evaluate, cameras: Sequence[str]) -> dict[str, Any]:
    """What every episode is played under; `cameras` are inputs of the policies."""
    return {**envs.conditions(env, cameras), "temperature": evaluate.temperature}


def digest(env: config.Env, evaluate: config.Evaluate, cameras: Sequence[str]) -> str:
    """Two evaluations may be compared exactly when they played the same states under the same conditions."""
    states = {task.name: envs.init_states_digest(task, "eval") for task in envs.tasks(env)}
    content = [env.suite, cells(env, evaluate.init_states), states, conditions(env, evaluate, cameras)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def played_by(env: config.Env) -> str:
    """Digest of the code that plays an episode here: simulators and rollouts, and the package that adds the suite.

    It is not in the grid's digest: nights before and after an edit stand in one trend, but two policies are compared
    state by state only if the same code played both. How a policy acts is its own, so its code is not in it.
    """
    package = Path(nightshift.__file__).parent
    added = registry.plug_in(env.suite)
    content = [*(files.identity(package / folder) for folder in _PLAYING), packages.plug_in(added) if added else ""]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def cameras_in(env: config.Env, observations: Collection[str]) -> list[str]:
    """The suite's cameras among the observations of policies."""
    return [camera for camera in envs.selected(env).cameras if camera in observations]


def misfit(env: config.Env, policy: Policy) -> str:
    """Why a policy cannot play here, in words; empty if it can."""
    space = envs.observation_space(env)
    for name, shape in policy.shapes.items():
        if name not in space:
            return f"it reads {name}, which {env.suite} does not have with these cameras"
        if tuple(space[name].shape) != tuple(shape):
            return f"it reads {name} of shape {list(shape)}, and here it is {list(space[name].shape)}"
    try:
        check_inputs(policy, env, [task.language for task in envs.tasks(env)])
    except ConfigError as error:
        return error.what
    return ""


def check_inputs(policy: Policy, env: config.Env, instructions: Sequence[str]) -> None:
    """ConfigError if the policy cannot read what the environment shows it, with these instructions."""
    space = envs.observation_space(env)
    seen = {name: np.zeros((len(instructions), *space[name].shape), space[name].dtype) for name in policy.observations}
    policy.inputs(seen | ({INSTRUCTION: np.array(instructions)} if INSTRUCTION in seen else {}))
