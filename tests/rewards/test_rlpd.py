"""The stage rlpd with rewards of a classifier: the fake suite, real episodes, replay and learner."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nightshift import config
from nightshift.config import merged
from nightshift.data.episode_store import EpisodeStore
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.rewards import classifier
from nightshift.rewards.classifier import SuccessClassifier, Trained
from nightshift.stages import collect, dataset, rlpd, sft
from nightshift.types import INSTRUCTION
from tests.conftest import small_params
from tests.stages.test_rlpd import HISTORY, SMALL

HORIZON = 12
SEEN: dict[str, Any] = {
    "env": {"cameras": {"names": ["agentview"], "size": 16, "shadows": False}},
    "policy": {"head": "tanh_gaussian", "hidden": [64, 64]},
    "collect": {"demos_per_task": 12},
    "sft": {"steps": 2000, "batch_size": 64, "learning_rate": 3.0e-3},
    "rlpd": {**SMALL, "steps": 60},
}


def saved(threshold: float) -> str:
    """A classifier whose verdict is decided by its threshold, and its name."""
    torch.manual_seed(0)
    shapes = {"agentview": (16, 16, 3), INSTRUCTION: ()}
    network = SuccessClassifier(inputs=shapes, channels=[8], hidden=8, dropout=0.0, max_words=4)
    classifier.save(
        Trained(
            network=network,
            threshold=threshold,
            ambiguous_steps=1,
            tasks=["near", "far"],
            calibration={},
            starts={},
        ),
        paths.CLASSIFIER,
    )
    return classifier.name_of(paths.CLASSIFIER)


def learn(make_job: Callable[[str], Job], threshold: float, actors: int = 0) -> list[dict[str, float]]:
    """The metrics of every round."""
    job = make_job("rlpd")
    job = replace(job, machine=job.machine.model_copy(update={"actors": actors}))
    params = config.Params.model_validate(merged(small_params(), SEEN))
    section = params.rlpd.model_copy(update={"reward": saved(threshold)})
    rlpd.run(job, seed=0, env=params.env, states=params.states, rlpd=section)
    rounds: list[dict[str, float]] = json.loads(HISTORY.read_text())["iterations"]
    return rounds


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demos, dataset and clone of the module's first test, for the others to copy."""
    return tmp_path_factory.mktemp("made")


def make_clone(job: Callable[[str], Job], changes: dict[str, Any]) -> None:
    params = config.Params.model_validate(merged(small_params(), merged(SEEN, changes)))
    collect.run(job("collect"), seed=0, env=params.env, states=params.states, collect=params.collect)
    dataset.run(job("dataset"), seed=0, dataset=params.dataset)
    sft.run(job("sft"), seed=0, policy=params.policy, sft=params.sft)


@pytest.fixture
def clone(project: Path, job: Callable[[str], Job]) -> None:
    """One that solves some init states."""
    make_clone(job, {})


@pytest.fixture
def poor_clone(project: Path, made: Path, job: Callable[[str], Job]) -> None:
    if any(made.iterdir()):
        shutil.copytree(made, project, dirs_exist_ok=True)
        return
    make_clone(job, {"collect": {"demos_per_task": 2}, "sft": {"steps": 20}})
    for path in (paths.DEMOS, paths.DATASET, paths.SFT_POLICY):
        shutil.copytree(path, made / path)


@pytest.mark.slow
@pytest.mark.usefixtures("clone")
def test_the_classifier_alone_rewards_and_ends_episodes_and_the_simulator_is_shown_beside(
    job: Callable[[str], Job],
) -> None:
    never = learn(job, threshold=1.0)
    assert all(one["rollout/success"] == 0 for one in never)
    assert all(one["rollout/length"] == HORIZON for one in never), "the simulator's success ends no episode"
    assert sum(one["reward/false_negative"] for one in never) > 0, "the clone solves some"
    for episode in EpisodeStore(job("rlpd").state / "episodes"):
        assert (episode.truncated, episode.terminated, bool(episode.rewards.any())) == (True, False, False)
        assert list(episode.observations) == ["objects", "task"], "the policy does not see the camera"


@pytest.mark.parametrize("actors", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("poor_clone")
def test_a_classifier_that_sees_success_everywhere_ends_every_episode_at_once(
    job: Callable[[str], Job], actors: int
) -> None:
    always = learn(job, threshold=0.0, actors=actors)
    assert all(one["rollout/success"] == 1 and one["rollout/length"] == 1 for one in always)
    wrong, right = (sum(one[f"reward/{verdict}_positive"] for one in always) for verdict in ("false", "true"))
    assert wrong + right == sum(3 for _ in always)
    assert wrong > right, "a goal is rarely reached in two steps"
