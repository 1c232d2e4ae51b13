"""Transitions from decision to decision, of experience and of demos."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nightshift.data import episode as episodes
from nightshift.data.decisions import decision_episode, demo_transitions, experience_transitions, solved_at_end
from nightshift.data.episode import Episode
from nightshift.data.replay import TrajectoryReplay
from nightshift.errors import DataError
from nightshift.policies.gaussian_mlp import STATE, GaussianMlp
from nightshift.types import INSTRUCTION, Provenance, RolloutRequest, Trajectory
from tests.policies import examples

ACTION_DIM, DISCOUNT = 2, 0.9
PROVENANCE = Provenance(
    source="policy", suite="fake", task="near", language="", split="train", init_state=0, seed=0, versions={}, commit=""
)


def policy(chunk: int) -> GaussianMlp:
    return GaussianMlp(inputs={"x": 1}, hidden=[4], chunk=chunk, action_dim=ACTION_DIM, head="tanh_gaussian")


def trajectory(length: int, chunk: int, *, success: bool, unstable: bool = False) -> Trajectory:
    """The observation at step t is t; the action is t and -t."""
    decided = np.arange(0, length, chunk, dtype=np.float32)[:, None]
    steps = np.arange(length, dtype=np.float32)[:, None]
    actions = np.concatenate([steps, -steps], axis=1)
    return Trajectory(
        request=RolloutRequest(task="near", split="train", init_state=0, controller="sample", seed=0),
        member=0,
        observations={"x": decided},
        final={"x": np.array([length], np.float32)},
        actions=actions + np.float32(0.5),
        executed=actions,
        log_probs=np.zeros_like(actions),
        chunk=chunk,
        success=success,
        unstable=unstable,
        version=7,
    )


def test_with_one_action_per_decision_it_is_the_episode_of_control_steps() -> None:
    played = trajectory(5, 1, success=True)
    ours, theirs = decision_episode(played, PROVENANCE, DISCOUNT), episodes.from_trajectory(played, PROVENANCE, 7)
    for name, column in episodes.columns(theirs).items():
        assert np.array_equal(episodes.columns(ours)[name], column), name
    assert (ours.terminated, ours.truncated, ours.success) == (theirs.terminated, theirs.truncated, theirs.success)


@pytest.mark.parametrize(("length", "reward"), [(6, DISCOUNT**2), (4, 1.0)])
def test_a_decisions_reward_is_discounted_within_its_chunk(length: int, reward: float) -> None:
    episode = decision_episode(trajectory(length, 3, success=True), PROVENANCE, DISCOUNT)
    assert episode.length == 3
    np.testing.assert_allclose(episode.rewards, [0, reward, 0], rtol=1e-6)
    assert episode.observations["x"][:, 0].tolist() == [0, 3, length]


@pytest.mark.parametrize(
    ("success", "unstable", "terminated"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_success_and_unstable_physics_terminate_and_the_horizon_truncates(
    success: bool, unstable: bool, terminated: bool
) -> None:
    episode = decision_episode(trajectory(4, 2, success=success, unstable=unstable), PROVENANCE, DISCOUNT)
    assert (episode.terminated, episode.truncated) == (terminated, not terminated)


def sampled(episode: Episode, chunk: int, n_step: int = 1, *, demo: bool = False) -> dict[float, dict[str, np.ndarray]]:
    """Transitions by the observation that they begin with."""
    actor = policy(chunk)
    replay = TrajectoryReplay(seed=0)
    make = demo_transitions if demo else experience_transitions
    replay.add_trajectories([make(episode, 0, actor)])
    steps, discount = (n_step * chunk, DISCOUNT) if demo else (n_step, DISCOUNT**chunk)
    batch = replay.sample(200, n_step=steps, discount=discount)
    return {
        float(batch["curr_obs"][STATE][row, 0]): {
            "next": batch["next_obs"][STATE][row],
            "actions": batch["actions"][row],
            "reward": batch["rewards"][row],
            "discount": batch["discounts"][row] * batch["mask"][row],
            "bc_mask": batch["forward_inputs"]["bc_mask"][row],
        }
        for row in range(200)
    }


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("n_step", [1, 2])
def test_demos_and_experience_of_the_same_episode_agree_where_decisions_begin(chunk: int, n_step: int) -> None:
    by_steps = trajectory(8, 1, success=True)
    demo = sampled(episodes.from_trajectory(by_steps, PROVENANCE), chunk, n_step, demo=True)
    decisions = sampled(decision_episode(trajectory(8, chunk, success=True), PROVENANCE, DISCOUNT), chunk, n_step)
    assert sorted(demo) == list(range(8))
    assert sorted(decisions) == list(range(0, 8, chunk))
    for start, mine in decisions.items():
        for name in ("next", "actions", "reward", "discount"):
            np.testing.assert_allclose(mine[name], demo[start][name], rtol=1e-5, err_msg=f"{name} at {start}")


def test_a_time_limit_bootstraps_and_success_does_not() -> None:
    for success, discount in ((True, 0.0), (False, DISCOUNT)):
        episode = decision_episode(trajectory(3, 1, success=success), PROVENANCE, DISCOUNT)
        last = sampled(episode, 1)[2.0]
        assert last["discount"] == pytest.approx(discount)
        assert last["reward"] == float(success)
        assert last["next"] == 3


def test_cloning_may_imitate_the_actions_of_demos_before_their_end_alone() -> None:
    demo = sampled(episodes.from_trajectory(trajectory(3, 1, success=True), PROVENANCE), 2, demo=True)
    assert demo[1.0]["bc_mask"].tolist() == [True, True]
    assert demo[2.0]["bc_mask"].tolist() == [True, False]
    experience = sampled(decision_episode(trajectory(4, 2, success=True), PROVENANCE, DISCOUNT), 2)
    assert not any(row["bc_mask"].any() for row in experience.values())


def test_a_demo_has_the_reward_and_the_end_of_an_episode_that_is_played() -> None:
    ours = episodes.from_trajectory(trajectory(5, 1, success=True), PROVENANCE)
    rewarded = np.array([0, 0, 1, 1, 1, 0], np.float32)
    theirs = replace(ours, rewards=rewarded, terminated=False, truncated=True)
    for demo in (ours, theirs):
        changed = solved_at_end(demo)
        assert changed.rewards.tolist() == [0, 0, 0, 0, 1, 0]
        assert (changed.terminated, changed.truncated) == (True, False)


def test_an_episode_of_another_policy_is_refused() -> None:
    episode = decision_episode(trajectory(4, 2, success=True), PROVENANCE, DISCOUNT)
    with pytest.raises(DataError, match="decides on 3 × 2"):
        experience_transitions(episode, 0, policy(3))


def test_images_stay_the_episodes_own_arrays_and_the_instruction_becomes_words() -> None:
    seeing = examples.make("cnn tanh_gaussian")
    steps = 4
    seen = {name: values for name, values in examples.observe(steps).items() if name != INSTRUCTION}
    plain = episodes.from_trajectory(trajectory(steps - 1, 1, success=True), replace(PROVENANCE, language="lift"))
    actions = np.zeros((steps, examples.ACTION_DIM), np.float32)
    episode = replace(plain, observations=seen, actions=actions, policy_actions=actions)
    found = demo_transitions(episode, 0, seeing)
    assert np.shares_memory(found.frames["agentview"], seen["agentview"])
    assert set(found.frames) == {"agentview", "wrist", "proprio", INSTRUCTION}
    assert found.frames[INSTRUCTION].shape == (steps, examples.WORDS)
