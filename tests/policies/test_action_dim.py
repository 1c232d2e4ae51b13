"""The size of an action comes from the simulator and the policy's spec: nothing in between assumes seven numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config, envs, policies
from nightshift.algorithms.batch import collate
from nightshift.envs.base import ActionSpace
from nightshift.envs.sequential_fleet import SequentialFleet
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.local import LocalPool
from nightshift.types import Controller, RolloutRequest, Task, Trajectory
from tests.rollouts.parts import NO_CAMERAS

SIZE = 4
CHUNK = 2


def small(task: Task, env: config.Env) -> Any:
    made: Any = envs.make(task, env)
    made.action_space = ActionSpace(size=SIZE)
    return made


@pytest.fixture
def policy() -> GaussianMlp:
    torch.manual_seed(0)
    return GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[4], chunk=CHUNK, action_dim=SIZE)


def episodes(policy: GaussianMlp, controller: Controller) -> list[Trajectory]:
    request = RolloutRequest(
        task="near", split="train", init_state=0, controller=controller, seed=0, count=3, disturbance=0.1
    )
    env = config.Env(suite="fake", tasks=("near",), protocol="openvla-oft", horizon=5, cameras=NO_CAMERAS)
    pool = LocalPool(env, make_fleet=lambda task, env: SequentialFleet(lambda: small(task, env)))
    ((_, group),) = pool.run([request], snapshot(policy))
    return group


@pytest.mark.parametrize("controller", ["greedy", "sample"])
def test_episodes_have_actions_of_the_simulators_size(policy: GaussianMlp, controller: Controller) -> None:
    for episode in episodes(policy, controller):
        assert episode.actions.shape == episode.executed.shape == episode.log_probs.shape == (episode.length, SIZE)
        assert np.abs(episode.executed).max() <= 1


def test_a_batch_has_the_same_action_size_with_and_without_episodes(policy: GaussianMlp) -> None:
    batch, empty = collate(policy, episodes(policy, "sample")), collate(policy, [])
    assert batch.actions.shape[1:] == empty.actions.shape[1:] == (CHUNK, SIZE)
    assert batch.log_probs.shape[1:] == empty.log_probs.shape[1:] == (CHUNK, SIZE)


def test_a_spec_builds_a_policy_of_the_same_action_size(policy: GaussianMlp) -> None:
    again = policies.build(policy.spec)
    assert again.action_dim == SIZE
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == {
        name: tensor.shape for name, tensor in policy.state_dict().items()
    }
