"""Through the HTTP server the stages make the same policies and the same evaluation as in process, bit for bit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nightshift import config, files
from nightshift.config import merged
from nightshift.learners import checkpoint
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.rewards import classifier
from nightshift.rewards.classifier import SuccessClassifier, Trained
from nightshift.rollouts.validation import without_best
from nightshift.stages import collect, dataset, evaluate, rlpd, sft
from nightshift.telemetry import interventions
from nightshift.types import INSTRUCTION
from tests.conftest import edit, jobs, leave_skipped, make_project, small_params
from tests.interventions.test_rlpd import SCRIPTED
from tests.robots.parts import FAKE, served
from tests.robots.test_same_episodes import MINI, compiled  # noqa: F401 - a fixture
from tests.robots.test_serving import served_by_command
from tests.stages.test_rlpd import (
    SMALL,
    clone,  # noqa: F401 - a fixture
    cloned,  # noqa: F401 - a fixture
    history,
    learn,
)

FEW: dict[str, Any] = {
    "collect": {"demos_per_task": 6},
    "policy": {"head": "tanh_gaussian", "hidden": [32]},
    "sft": {"batch_size": 64, "learning_rate": 3.0e-3},
    "rlpd": {**SMALL, "steps": 60, "training_starts": 20, "validation": {"every": 30}},
    "evaluate": {"init_states": 4},
}
THRESHOLD = 0.479


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run leaves that depends on the episodes that it played."""

    policies: dict[str, bytes]
    """Files of the clone and of the policy that rlpd hands on, by path."""
    learned: dict[str, torch.Tensor]
    """Everything that rlpd has learned at its end, critics included."""
    rounds: list[dict[str, float]]
    """The metrics of rlpd."""
    outcomes: str
    """Of every episode of the evaluation."""
    candidates: Any
    """Of the report of the evaluation."""


def run(root: Path, env: config.Env, sections: dict[str, Any], *, actors: int = 0) -> Run:
    """The stages from demos to evaluation in a new project; `actors` processes play for rlpd."""
    params = config.Params.model_validate(merged(small_params(), merged(FEW, sections)))
    with contextlib.chdir(make_project(root, code=False)), jobs(root) as make:

        def job(stage: str) -> Job:
            return replace(make(stage), machine=params.machine.model_copy(update={"actors": actors}))

        collect.run(job("collect"), seed=0, env=env, states=params.states, collect=params.collect)
        dataset.run(job("dataset"), seed=0, dataset=params.dataset)
        sft.run(job("sft"), seed=0, policy=params.policy, sft=params.sft)
        rlpd.run(job("rlpd"), seed=0, env=env, states=params.states, rlpd=params.rlpd)
        leave_skipped("rloo")
        evaluate.run(job("evaluate"), env=env, evaluate=params.evaluate)
        return Run(
            policies={str(path): path.read_bytes() for path in policy_files()},
            learned=learned(job("rlpd")),
            rounds=history()["iterations"],
            outcomes=paths.EVALUATION_OUTCOMES.read_text(),
            candidates=json.loads(paths.EVALUATION_REPORT.read_text())["candidates"],
        )


def learned(job: Job) -> dict[str, torch.Tensor]:
    last = checkpoint.newest(job.state)
    assert last is not None
    return dict(last.tensors)


def policy_files() -> list[Path]:
    """But for the history, which has times, and the manifest, which has its checksum."""
    folders = (paths.SFT_POLICY, paths.RLPD_POLICY)
    found = [path for folder in folders for path in sorted(folder.iterdir())]
    return [path for path in found if path.name not in (paths.HISTORY, files.MANIFEST)]


def assert_same_run(one: Run, other: Run) -> None:
    assert one.policies == other.policies
    assert one.learned.keys() == other.learned.keys()
    assert all(torch.equal(other.learned[name], tensor) for name, tensor in one.learned.items())
    assert one.outcomes == other.outcomes
    assert one.candidates == other.candidates


@pytest.mark.usefixtures("forked_processes")
def test_a_run_through_http_with_an_actor_in_lock_step_leaves_what_one_in_process_leaves(tmp_path: Path) -> None:
    """The learner validates on the same robot between the rounds of its actor."""
    with served(FAKE) as env:
        through_http = run(tmp_path / "http", env, {}, actors=1)
    in_process = run(tmp_path / "process", FAKE, {})
    assert_same_run(in_process, through_http)
    assert any(one["rollout/success"] for one in in_process.rounds), "rewards are learned from"


@pytest.mark.slow
def test_scripted_interventions_are_the_same_bits_through_http(tmp_path: Path) -> None:
    sections = {"rlpd": SCRIPTED}
    with served(FAKE) as env:
        through_http = run(tmp_path / "http", env, sections)
    in_process = run(tmp_path / "process", FAKE, sections)
    assert_same_run(in_process, through_http)
    assert sum(one[interventions.SHARE] for one in in_process.rounds) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("compiled", "forked_processes")
def test_a_run_on_libero_behind_the_command_leaves_what_one_in_process_leaves(tmp_path: Path) -> None:
    """With a scripted expert that takes over, and one actor."""
    sections = {"policy": {"inputs": ["egocentric", "task"]}, "rlpd": {**SCRIPTED, "steps": 300, "training_starts": 60}}
    served_project = make_project(tmp_path / "served")
    edit(served_project, "env", **MINI.model_dump(mode="json", exclude={"robot", "randomisation"}))
    with served_by_command(served_project, "--suite", "libero_mini", "--task", "lift_cube") as (_, env):
        through_http = run(tmp_path / "http", env, sections, actors=1)
    in_process = run(tmp_path / "process", MINI, sections)
    assert_same_run(in_process, through_http)
    assert sum(one[interventions.SHARE] for one in in_process.rounds) > 0


@pytest.mark.usefixtures("clone")
def test_where_nobody_says_it_a_classifier_rewards_and_validates_by_the_images_that_came_through_http(
    job: Callable[[str], Job], params: config.Params
) -> None:
    """In process its rewards are the same bits; there the simulator validates, since it knows."""
    rewarded = {"reward": save_classifier(), "steps": 60, "validation": {"every": 30}}
    with served(FAKE, success="none") as env:
        http = replace(job("rlpd"), state=job("rlpd").state / "http")
        through_http = learn(http, params.model_copy(update={"env": env}), **rewarded)
        verdicts = history()
    in_process = learn(job("rlpd"), params.model_copy(update={"env": FAKE}), **rewarded)
    assert without_best(in_process).keys() == without_best(through_http).keys()
    assert all(torch.equal(through_http[name], tensor) for name, tensor in without_best(in_process).items())
    successes = [one["rollout/success"] for one in verdicts["iterations"]]
    assert successes == [one["rollout/success"] for one in history()["iterations"]]
    assert 0 < sum(successes) < len(successes), "it sees success in some images and not in others"
    assert sum(one["successes"] for one in verdicts["validation"]) > 0
    assert history()["validation"] != verdicts["validation"]


def save_classifier() -> str:
    """One with random weights, whose threshold lies amid what it says of the images of the fake suite; its name."""
    torch.manual_seed(0)
    shapes = {"agentview": (32, 32, 3), INSTRUCTION: ()}
    network = SuccessClassifier(inputs=shapes, channels=[8], hidden=8, dropout=0.0, max_words=4)
    trained = Trained(
        network=network, threshold=THRESHOLD, ambiguous_steps=1, tasks=["near", "far"], calibration={}, starts={}
    )
    classifier.save(trained, paths.CLASSIFIER)
    return classifier.name_of(paths.CLASSIFIER)
