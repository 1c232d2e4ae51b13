"""Episodes that go on after success, and cameras that are recorded beside what the policy sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nightshift import config
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.local import LocalPool
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import small_params
from tests.rollouts.parts import policy

HORIZON = 12
ENV = config.Env.model_validate(
    {**small_params()["env"], "tasks": ["near"], "cameras": {"names": ["agentview"], "size": 16, "shadows": False}}
)


def request(**changes: Any) -> RolloutRequest:
    made = RolloutRequest(task="near", split="train", init_state=3, controller="expert", seed=0)
    return replace(made, **changes)


def play(chosen: RolloutRequest, chunk: int = 1) -> Trajectory:
    pool = LocalPool(ENV)
    ((_, (trajectory,)),) = pool.run([chosen], snapshot(policy(chunk)))
    pool.close()
    return trajectory


def test_an_episode_that_plays_on_begins_as_the_one_that_ends_with_success() -> None:
    ends, goes_on = play(request()), play(request(until_horizon=True))
    assert ends.success
    assert ends.length < HORIZON
    assert (ends.success_step, goes_on.success_step) == (ends.length, ends.length)
    assert (goes_on.success, goes_on.length) == (True, HORIZON)
    np.testing.assert_array_equal(goes_on.actions[: ends.length], ends.actions)
    np.testing.assert_array_equal(goes_on.observations["objects"][: ends.length], ends.observations["objects"])


@pytest.mark.parametrize("chunk", [1, 3])
def test_without_success_playing_on_changes_nothing(chunk: int) -> None:
    sampled = request(controller="sample")
    ends, goes_on = play(sampled, chunk), play(replace(sampled, until_horizon=True), chunk)
    assert (ends.success, ends.success_step, ends.length) == (False, None, HORIZON)
    np.testing.assert_array_equal(goes_on.executed, ends.executed)
    np.testing.assert_array_equal(goes_on.observations["objects"], ends.observations["objects"])


def test_a_camera_beside_is_recorded_and_changes_no_action() -> None:
    sampled = request(controller="sample")
    plain, watched = play(sampled), play(replace(sampled, cameras=("agentview",)))
    assert "agentview" not in plain.observations
    assert (plain.beside, watched.beside) == ((), ("agentview",))
    assert watched.observations["agentview"].shape == (HORIZON, 16, 16, 3)
    assert watched.final["agentview"].any()
    np.testing.assert_array_equal(watched.actions, plain.actions)
