"""Whether the parts of params.yaml fit each other, before the first stage works for hours.

Each stage refuses what it cannot use, but a policy is built only after the demos are collected.
"""

from __future__ import annotations

import numpy as np
import torch

from nightshift import config, envs, policies
from nightshift.policies import device
from nightshift.types import INSTRUCTION


def check(params: config.Params) -> None:
    """ConfigError, DeviceError or SimulatorError: a camera, an image size, an input, an instruction, the device."""
    device.resolve(params.machine.device)
    envs.check_cameras(params.env)
    space = envs.observation_space(params.env)
    shapes = {name: spec.shape for name, spec in space.items()}
    with torch.device("meta"):
        policy = policies.fresh(params.policy, shapes, envs.suite(params.env.suite).action_space.size)
    instructions = np.array([task.language for task in envs.tasks(params.env)])
    seen = {name: np.zeros((len(instructions), *shapes[name]), space[name].dtype) for name in policy.observations}
    policy.inputs(seen | ({INSTRUCTION: instructions} if INSTRUCTION in seen else {}))
