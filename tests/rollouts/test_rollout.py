"""An episode that the controller drives into unstable physics is a failure, and ends there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config, envs
from nightshift.algorithms.batch import collate
from nightshift.algorithms.critic import ValueNetwork, with_gae
from nightshift.data import episode
from nightshift.envs.base import Fleet
from nightshift.envs.sequential_fleet import step_by_step
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.engine import ONE_AT_A_TIME
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.sampling import Sampler
from nightshift.rollouts.worker import Worker
from nightshift.types import Controller, Provenance, RolloutRequest, Task, Trajectory
from tests.rollouts.faulty import AT_STEP, Unstable
from tests.rollouts.parts import NO_CAMERAS
from tests.rollouts.test_sampling import settings

ENV = config.Env(suite="fake", tasks=("near",), protocol="openvla-oft", horizon=12, cameras=NO_CAMERAS)
POLICY = GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[8], chunk=1, action_dim=7)
MINI = config.Env(suite="libero_mini", tasks=("lift_cube",), protocol="openvla-oft", horizon=6, cameras=NO_CAMERAS)


def request(state: int, controller: Controller = "sample", task: str = "near") -> RolloutRequest:
    return RolloutRequest(task=task, split="train", init_state=state, controller=controller, seed=3, count=3)


def played(state: int) -> list[Trajectory]:
    ((_, group),) = LocalPool(ENV, make_fleet=Unstable(frozenset({1}))).run([request(state)], snapshot(POLICY))
    return group


def test_an_unstable_episode_ends_there_as_a_valid_failure_and_the_others_go_on_as_ever() -> None:
    unstable, *others = played(1)
    assert (unstable.unstable, unstable.success, unstable.valid) == (True, False, True)
    assert unstable.length == AT_STEP
    (_, undisturbed), *_ = LocalPool(ENV).run([request(1)], snapshot(POLICY))
    for one, other in zip(others, undisturbed[1:], strict=True):
        assert not one.unstable
        np.testing.assert_array_equal(one.actions, other.actions)


def test_it_is_played_once() -> None:
    worker = Worker(ENV, ONE_AT_A_TIME, Unstable(frozenset({1})))
    ((_, group, _),), _ = worker.run([request(1)], snapshot(POLICY))
    assert group is not None
    assert worker.heartbeats() == 1 + max(one.length for one in group)


def arrays(trajectory: Trajectory) -> Iterator[Any]:
    yield from trajectory.observations.values()
    yield from trajectory.final.values()
    yield from (trajectory.actions, trajectory.executed, trajectory.log_probs)


def test_nothing_of_it_is_not_finite_whatever_the_simulator_showed() -> None:
    unstable, *_ = played(1)
    assert all(np.isfinite(values).all() for values in arrays(unstable))
    for name, last in unstable.final.items():
        np.testing.assert_array_equal(last, unstable.observations[name][-1])


def test_an_iteration_keeps_its_group() -> None:
    search = Sampler({task: range(50) for task in envs.tasks(ENV)}, settings(groups=1), seed=0).begin()
    (wanted, *_) = search.wave()
    pool = LocalPool(ENV, make_fleet=Unstable(frozenset({wanted.init_state})))
    ((_, group),) = pool.run([wanted], snapshot(POLICY))
    assert [one.unstable for one in group] == [True, False, False, False]
    search.take([group])
    assert search.accepted == [group]


def test_gae_does_not_bootstrap_from_where_it_ended() -> None:
    group = played(1)
    batch = collate(POLICY, group)
    batch = batch.with_critic_features(POLICY.critic_features(batch.inputs))
    critic = ValueNetwork(POLICY.critic_size, [4])
    seen = {name: np.stack([one.final[name] for one in group]) for name in group[0].final}
    finals = POLICY.critic_features(POLICY.inputs(seen))
    returns = with_gae(batch, group, finals, critic, gamma=1.0, gae_lambda=1.0).returns
    ahead = critic(finals).detach()
    ahead[[one.unstable or one.success for one in group]] = 0
    expected = ahead + torch.tensor([float(one.success) for one in group])
    torch.testing.assert_close(returns, expected[batch.episode], atol=1e-5, rtol=0)
    assert ahead[1:].any(), "every episode ended before the horizon"


def test_its_episode_is_terminated_and_not_truncated() -> None:
    provenance = Provenance(
        source="policy",
        suite="fake",
        task="near",
        language="",
        split="train",
        init_state=1,
        seed=3,
        versions={},
        commit="abc",
    )
    unstable, *_ = played(1)
    recorded = episode.from_trajectory(unstable, provenance)
    assert (recorded.terminated, recorded.truncated, recorded.success) == (True, False, False)
    assert not recorded.rewards.any()


class Thrown:
    """The real simulators of a task; the first one gets an impossible speed at the second step, so that MuJoCo itself
    finds its physics unstable."""

    def __init__(self, task: Task, env: config.Env) -> None:
        self._fleet: Any = envs.make_fleet(task, env)
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def step(self, actions: Any, active: Any) -> Any:
        self._steps += 1
        if self._steps == AT_STEP:
            self._fleet._lanes[0]._data.qvel[:] = 1e12
        return self._fleet.step(actions, active)

    def advance(self, actions: Any, active: Any) -> Any:
        return step_by_step(self, actions, active)


def thrown(task: Task, env: config.Env) -> Fleet:
    made: Fleet = Thrown(task, env)
    return made


def test_mujocos_own_verdict_ends_an_episode_as_a_failure() -> None:
    ((_, group),) = LocalPool(MINI, make_fleet=thrown).run([request(0, "expert", "lift_cube")])
    assert [(one.unstable, one.valid, one.success, one.length) for one in group] == [
        (True, True, False, AT_STEP),
        (False, True, False, 6),
        (False, True, False, 6),
    ]
    assert all(np.isfinite(values).all() for one in group for values in arrays(one))


@pytest.mark.parametrize("controller", ["greedy", "expert"])
def test_every_controller_may_end_unstable(controller: Controller) -> None:
    pool = LocalPool(ENV, make_fleet=Unstable(frozenset({1})))
    ((_, group),) = pool.run([request(1, controller)], snapshot(POLICY))
    assert [one.unstable for one in group] == [True, False, False]
