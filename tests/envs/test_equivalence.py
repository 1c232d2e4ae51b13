"""Compiled stepping against LIBERO's own `env.step`: the same state and actions lead to the same thing."""

from __future__ import annotations

import gc
from typing import NamedTuple, Self

import numpy as np
import pytest

from nightshift.envs.libero.env import LiberoEnv
from nightshift.envs.libero.problem import STATE_SIZES
from nightshift.envs.libero.suites import LiberoSuite
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.policies.expert import Expert
from nightshift.types import Task
from tests.envs.test_suites import each_suite, needs_assets

STEPS = 50
POSITION = 1e-4  # metres, radians: the last bits differ and grow in contact
VELOCITY = 1e-2


class Pair(NamedTuple):
    """The same task twice."""

    fast: LiberoEnv
    reference: LiberoEnv

    @classmethod
    def of(cls, suite: LiberoSuite, task: Task) -> Self:
        return cls(suite.make_env(task), suite.make_env(task, compiled=False))


@pytest.fixture(scope="module", params=LIBERO_MINI.tasks(), ids=lambda task: task.name)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair.of(LIBERO_MINI, request.param)


def assert_steps_agree(fast: LiberoEnv, reference: LiberoEnv) -> None:
    fast.reset("eval", 7)
    reference.reset("eval", 7)
    positions = 1 + fast._model.nq
    random = np.random.default_rng(0)
    for step in range(STEPS):
        action = (0.4 * random.standard_normal(LIBERO_MINI.action_space.size)).astype(np.float32)
        success = fast.step(action).success
        assert success == reference.step(action).success, f"step {step}"
        ours, theirs = fast.full_state(), reference.full_state()
        np.testing.assert_allclose(ours[:positions], theirs[:positions], atol=POSITION, err_msg=f"qpos, step {step}")
        np.testing.assert_allclose(ours[positions:], theirs[positions:], atol=VELOCITY, err_msg=f"qvel, step {step}")


def test_positions_velocities_and_success_agree_on_libero_mini(pair: Pair) -> None:
    assert_steps_agree(*pair)


def test_observations_and_success_agree_on_the_experts_actions(pair: Pair) -> None:
    """They make contact: the last bit differs there and grows, but not to a millimetre."""
    fast, reference, expert = *pair, Expert()
    fast.reset("train", 7)
    reference.reset("train", 7)
    for _ in range(STEPS):
        action = expert.act(fast.scene())
        observation, success = fast.step(action)
        expected, expected_success = reference.step(action)
        for name in STATE_SIZES:
            np.testing.assert_allclose(observation[name], expected[name], atol=1e-3, err_msg=name)
        assert success == expected_success
        if success:
            break


@needs_assets
@each_suite
def test_positions_velocities_and_success_agree_on_liberos_suites(suite: LiberoSuite) -> None:
    assert_steps_agree(*Pair.of(suite, suite.tasks()[0]))
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("task", LIBERO_MINI.tasks(), ids=lambda task: task.name)
def test_the_expert_solves_the_same_init_states_either_way(task: Task) -> None:
    outcomes = [solved(LIBERO_MINI.make_env(task, compiled=compiled)) for compiled in (True, False)]
    assert outcomes[0] == outcomes[1]


def solved(env: LiberoEnv) -> list[bool]:
    return [solves(env, state) for state in range(50)]


def solves(env: LiberoEnv, state: int) -> bool:
    env.reset("eval", state)
    expert = Expert()
    return any(env.step(expert.act(env.scene())).success for _ in range(100))
