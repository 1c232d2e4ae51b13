"""Rewards by the classifier: where an episode ends, what is stored of it, and what the simulator says to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config
from nightshift.data.decisions import decision_episode
from nightshift.errors import DataError
from nightshift.project import paths
from nightshift.rewards import classifier
from nightshift.rewards.classifier import SuccessClassifier, Trained
from nightshift.rewards.reward import SIMULATOR, ClassifierReward, check_reward, open_reward, verdict_metrics
from nightshift.types import Array, Observation, RolloutRequest, Trajectory
from tests.conftest import REPOSITORY
from tests.data.examples import PROVENANCE

PARAMS = config.load(REPOSITORY / "params.yaml")
SIZE, CHUNK = 8, 2
REQUEST = RolloutRequest(task="lift_cube", split="train", init_state=17, controller="sample", seed=0)


class Bright(SuccessClassifier):
    """The probability of success is the brightness of the image: a verdict that a test can write down."""

    def __init__(self) -> None:
        super().__init__(inputs={"agentview": (SIZE, SIZE, 3)}, channels=[8], hidden=8, dropout=0.0, max_words=4)

    def probabilities(self, observations: Observation) -> Array:
        found: Array = (observations["agentview"].mean((1, 2, 3)) / 100).astype(np.float32)
        return found


def reward(threshold: float = 0.5, *, is_judged: bool = True) -> ClassifierReward:
    return ClassifierReward(
        Trained(
            network=Bright(), threshold=threshold, ambiguous_steps=3, tasks=["lift_cube"], calibration={}, starts={}
        ),
        is_judged=is_judged,
    )


def played(brightness: list[int], **changes: Any) -> Trajectory:
    """Decisions of two actions; `brightness` of what was seen before each, and at the end."""
    decisions = len(brightness) - 1
    images = np.stack([np.full((SIZE, SIZE, 3), value, np.uint8) for value in brightness])
    steps = np.arange(CHUNK * decisions * 7, dtype=np.float32).reshape(-1, 7)
    made = Trajectory(
        request=REQUEST,
        member=0,
        observations={"agentview": images[:-1], "proprio": np.arange(decisions, dtype=np.float32)[:, None]},
        final={"agentview": images[-1], "proprio": np.array([decisions], np.float32)},
        actions=steps,
        executed=steps,
        log_probs=np.zeros_like(steps),
        chunk=CHUNK,
        success=False,
        beside=("agentview",),
    )
    return replace(made, **changes)


def test_the_episode_ends_with_the_first_decision_after_which_success_is_seen() -> None:
    episode = reward().episode(played([0, 10, 80, 90, 0]), PROVENANCE, discount=0.5)
    assert (episode.success, episode.terminated, episode.truncated) == (True, True, False)
    assert episode.length == 3, "two decisions, and what they led to"
    assert episode.rewards.tolist() == [0, 0.5, 0], "after the second action of the chunk"
    assert episode.observations["proprio"].ravel().tolist() == [0, 1, 2]
    assert episode.metadata["control_steps"] == 4 * CHUNK, "what the simulator has played"
    assert episode.actions[1].tolist() == played([0] * 5).actions[2:4].ravel().tolist()


def test_a_score_just_below_the_threshold_is_no_success_although_float32_rounds_them_together() -> None:
    """The threshold may lie half-way between two neighbours among the float32 numbers."""
    between = (0.5 + float(np.nextafter(np.float32(0.5), np.float32(1)))) / 2
    assert not reward(between).episode(played([0, 50, 0]), PROVENANCE, discount=1.0).success


def test_success_that_is_seen_at_the_end_alone_ends_it_there() -> None:
    episode = reward().episode(played([0, 0, 90]), PROVENANCE, discount=1.0)
    assert (episode.success, episode.length) == (True, 3)
    assert episode.observations["proprio"].ravel().tolist() == [0, 1, 2]


def test_without_a_verdict_the_simulators_success_neither_rewards_nor_terminates() -> None:
    episode = reward().episode(played([0, 0, 10, 0], success=True, success_step=4), PROVENANCE, discount=1.0)
    assert (episode.success, episode.terminated, episode.truncated) == (False, False, True)
    assert not episode.rewards.any()
    assert verdict_metrics([episode])["reward/false_negative"] == 1


def test_what_is_seen_before_the_first_decision_is_no_success() -> None:
    assert not reward().episode(played([99, 0, 0]), PROVENANCE, discount=1.0).success


def test_unstable_physics_terminates_unless_success_was_seen_before() -> None:
    assert reward().episode(played([0, 0, 0], unstable=True), PROVENANCE, discount=1.0).terminated
    solved = reward().episode(played([0, 90, 0], unstable=True), PROVENANCE, discount=1.0)
    assert (solved.success, solved.length) == (True, 2)


def test_images_that_the_policy_does_not_see_are_not_stored() -> None:
    assert list(reward().episode(played([0, 90]), PROVENANCE, 1.0).observations) == ["proprio"]
    seeing = played([0, 90], beside=())
    assert list(reward().episode(seeing, PROVENANCE, 1.0).observations) == ["agentview", "proprio"]


@pytest.mark.parametrize(
    ("brightness", "success_step", "verdict"),
    [
        ([0, 0, 90, 0, 0], 4, "true_positive"),
        ([0, 0, 90, 0, 0], 7, "true_positive"),  # three steps later: an ambiguous frame
        ([0, 0, 90, 0, 0], 8, "false_positive"),
        ([0, 0, 90, 0, 0], None, "false_positive"),
        ([0, 0, 0, 0, 0], 4, "false_negative"),
        ([0, 0, 0, 0, 0], None, "true_negative"),
    ],
)
def test_the_simulator_says_whether_the_verdict_was_right(
    brightness: list[int], success_step: int | None, verdict: str
) -> None:
    trajectory = played(brightness, success=success_step is not None, success_step=success_step)
    counts = verdict_metrics([reward().episode(trajectory, PROVENANCE, 1.0)])
    assert counts.pop(f"reward/{verdict}") == 1
    assert set(counts.values()) == {0}
    assert len(counts) == 3


def test_where_nobody_else_judges_no_reward_is_called_wrong() -> None:
    assert not verdict_metrics([reward(is_judged=False).episode(played([0, 90]), PROVENANCE, 1.0)])


def test_it_asks_for_its_cameras_and_for_episodes_that_go_on_after_success() -> None:
    assert reward().request(REQUEST) == replace(REQUEST, cameras=("agentview",), until_horizon=True)


def test_the_simulators_reward_changes_nothing() -> None:
    trajectory = played([0, 90, 0], success=True, success_step=4)
    assert SIMULATOR.request(REQUEST) is REQUEST
    plain, rewarded = (
        make(trajectory, PROVENANCE, 0.9) for make in (decision_episode, open_reward("simulator", PARAMS.env).episode)
    )
    assert rewarded.metadata == plain.metadata
    assert rewarded.rewards.tolist() == plain.rewards.tolist()
    assert verdict_metrics([rewarded]) == {}


def saved(**changes: Any) -> str:
    """A classifier in the project, and its name."""
    torch.manual_seed(0)
    shapes = {"agentview": (16, 16, 3)}
    network = SuccessClassifier(inputs=shapes, channels=[8], hidden=8, dropout=0.0, max_words=4)
    facts: dict[str, Any] = {"tasks": ["near", "far"], "calibration": {}, "starts": {}, **changes}
    classifier.save(Trained(network=network, threshold=0.5, ambiguous_steps=3, **facts), paths.CLASSIFIER)
    return classifier.name_of(paths.CLASSIFIER)


def seen(env: config.Env, **cameras: Any) -> config.Env:
    return env.model_copy(
        update={"cameras": config.Cameras(**{"names": ("agentview",), "size": 16, "shadows": False, **cameras})}
    )


def test_what_does_not_fit_the_classifier_is_refused_before_anything_is_played(
    project: Path, params: config.Params
) -> None:
    with pytest.raises(DataError, match=r"there is no success classifier in models/classifier"):
        check_reward("classifier-000000000000", seen(params.env))
    name = saved()
    check_reward(name, seen(params.env))
    with pytest.raises(DataError, match=r"sees the camera agentview, and the cameras of env\.cameras .* are: none"):
        check_reward(name, seen(params.env, names=()))
    with pytest.raises(DataError, match=r"has shape \[32, 32, 3\], and the success classifier was trained on \[16"):
        check_reward(name, seen(params.env, size=32))
    other = saved(tasks=["near"])
    with pytest.raises(DataError, match=f"rlpd.reward is {name}, and models/classifier holds {other}"):
        check_reward(name, seen(params.env))
    with pytest.raises(DataError, match="was trained on near, and not on far"):
        check_reward(other, seen(params.env))
    check_reward("simulator", params.env)
