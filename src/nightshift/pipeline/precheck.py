"""Whether params.yaml and this machine fit the stages that will run, before the first of them works for hours.

Each stage refuses what it cannot use, but a policy is built only after the demos are collected. A stage is asked for
what it uses and no more: cloning draws no image, and registering needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from nightshift import config, envs, policies
from nightshift.policies import device
from nightshift.project import paths
from nightshift.project.graph import Definition
from nightshift.rewards.reward import check_reward
from nightshift.types import INSTRUCTION


def check(params: config.Params, stages: Iterable[Definition]) -> None:
    """ConfigError, DeviceError, SimulatorError or DataError: a camera, an image size, an input, an instruction, the
    device, the success classifier."""
    chosen = list(stages)
    if any(map(_comes_before_policies, chosen)):
        check_policy(params)
    if any(map(_simulates, chosen)):
        envs.check_cameras(params.env)
    if any(_makes_policies(stage) or (_simulates(stage) and _reads_policies(stage)) for stage in chosen):
        device.resolve(params.machine.device)
    if any(stage.name == "rlpd" for stage in chosen):
        check_reward(params.rlpd.reward, params.env)


def check_policy(params: config.Params) -> None:
    """Build the policy without memory for its weights, and give it inputs as the environment would."""
    space = envs.observation_space(params.env)
    shapes = {name: spec.shape for name, spec in space.items()}
    with torch.device("meta"):
        policy = policies.fresh(params.policy, shapes, envs.suite(params.env.suite).action_space.size)
    instructions = np.array([task.language for task in envs.tasks(params.env)])
    seen = {name: np.zeros((len(instructions), *shapes[name]), space[name].dtype) for name in policy.observations}
    policy.inputs(seen | ({INSTRUCTION: instructions} if INSTRUCTION in seen else {}))


def _comes_before_policies(stage: Definition) -> bool:
    """Then the policy in params.yaml has to be one that can be built; choosing algorithms concerns no policy."""
    return not _reads_policies(stage) and "algorithms" not in stage.params


def _simulates(stage: Definition) -> bool:
    return "env" in stage.params


def _reads_policies(stage: Definition) -> bool:
    """Then the policy exists, and policy in params.yaml no longer matters."""
    return any(path.is_relative_to(paths.MODELS) for path in stage.deps)


def _makes_policies(stage: Definition) -> bool:
    return any(path.is_relative_to(paths.MODELS) for path in stage.outs)
