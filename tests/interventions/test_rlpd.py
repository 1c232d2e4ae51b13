"""The stage rlpd with a scripted expert that takes over, on the fake suite."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config, files, policies
from nightshift.data.episode_store import EpisodeStore
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.telemetry import interventions as names
from tests.conftest import jobs
from tests.stages.test_collect import FailingPool
from tests.stages.test_rlpd import (
    KillingAnActor,
    Stopping,
    WholeRun,
    clone,  # noqa: F401 - a fixture
    cloned,  # noqa: F401 - a fixture
    every,
    history,
    learn,
)

SCRIPTED: dict[str, Any] = {
    "interventions": {
        "source": "scripted",
        "stall_steps": 3,
        "stall_distance": 0.002,
        "stray_steps": 2,
        "stray_distance": 0.8,
        "hold_steps": 3,
    }
}
METRICS = {value for name, value in vars(names).items() if name.isupper()}


def use_chunks(size: int) -> None:
    """A clone of these chunks, with random weights, in the place of the one there is."""
    spec = {**policies.load(paths.SFT_POLICY).spec, "chunk": size}
    shutil.rmtree(paths.SFT_POLICY)
    with torch.random.fork_rng(devices=[]), files.new_folder(paths.SFT_POLICY) as folder:
        torch.manual_seed(0)
        policies.save(policies.build(spec), folder)


@pytest.fixture(scope="module")
def whole(cloned: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:  # noqa: F811 - the fixture
    """A run that nothing disturbed."""
    root = tmp_path_factory.mktemp("whole") / "project"
    shutil.copytree(cloned, root, symlinks=True)
    with contextlib.chdir(root), jobs(root) as job:
        tensors = learn(every(job("rlpd"), 30), config.load(root / paths.PARAMS), **SCRIPTED)
        return WholeRun(root, tensors, history(), ())


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("chunk", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_ends_with_the_weights_and_history_of_one_that_was_not(
    job: Callable[[str], Job], params: config.Params, chunk: int, whole: WholeRun
) -> None:
    tensors, expected = whole.tensors, whole.history
    if chunk > 1:
        use_chunks(chunk)
        tensors = learn(every(replace(job("rlpd"), state=job("rlpd").state / "whole"), 30), params, **SCRIPTED)
        expected = history()
    killed = every(replace(job("rlpd"), tracker=Stopping(job("rlpd").state / "stopped.jsonl", 5)), 30)
    with pytest.raises(KeyboardInterrupt):
        learn(killed, params, **SCRIPTED)
    resumed = learn(every(job("rlpd"), 30), params, **SCRIPTED)
    assert all(torch.equal(resumed[name], value) for name, value in tensors.items())
    assert history() == expected
    played = list(EpisodeStore(job("rlpd").state / "episodes"))
    assert any(episode.interventions.any() for episode in played)
    assert history()["iterations"][-1]["replay/decisions"] == sum(-(-(one.length - 1) // chunk) for one in played)


def test_interventions_are_recorded_beside_the_policys_own_actions_and_counted(whole: WholeRun) -> None:
    episodes = list(whole.episodes())
    flags = [episode.interventions[:-1] for episode in episodes]
    assert any(one.any() for one in flags)
    assert not all(one.all() for one in flags)
    for episode, flagged in zip(episodes, flags, strict=True):
        changed = (episode.actions[:-1] != episode.policy_actions[:-1].clip(-1, 1)).any(axis=1)
        assert np.array_equal(changed, flagged), "another action was executed exactly where somebody took over"
        assert not episode.interventions[-1]
    rounds = whole.history["iterations"]
    assert rounds[-1].keys() >= METRICS
    steps = sum(len(one) for one in flags)
    assert rounds[-1]["replay/decisions"] == steps, "an intervened step counts once"
    shares = [one[names.SHARE] * one["rollout/length"] for one in rounds]
    assert sum(shares) * 3 == pytest.approx(sum(one.sum() for one in flags))
    alone = sum(episode.success and not flagged.any() for episode, flagged in zip(episodes, flags, strict=True))
    assert sum(one[names.SUCCESS_ALONE] for one in rounds) * 3 == pytest.approx(alone)


@pytest.mark.slow
@pytest.mark.usefixtures("clone")
def test_nobody_takes_over_in_validation_nor_where_the_source_is_none(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = FailingPool(params.env)
    learn(replace(job("rlpd"), pool=lambda env: pool), params, **SCRIPTED)
    played = {(request.split, request.interventions is None) for request in pool.played}
    assert played == {("train", False), ("validation", True)}
    quiet = FailingPool(params.env)
    learn(replace(job("rlpd"), state=job("rlpd").state / "quiet", pool=lambda env: quiet), params)
    assert all(request.interventions is None for request in quiet.played)
    assert not METRICS & history()["iterations"][-1].keys()


@pytest.mark.slow
@pytest.mark.usefixtures("clone")
def test_actors_in_processes_of_their_own_give_the_same_weights_as_one_process(
    job: Callable[[str], Job], params: config.Params
) -> None:
    """Also if an actor is killed meanwhile, and if the learner is."""
    others = multiprocessing.active_children()
    expected = learn(replace(job("rlpd"), state=job("rlpd").state / "whole"), params, **SCRIPTED)
    streamed = replace(job("rlpd"), machine=job("rlpd").machine.model_copy(update={"actors": 2}))
    with pytest.raises(KeyboardInterrupt):
        learn(replace(streamed, tracker=KillingAnActor(job("rlpd").state / "stopped.jsonl", 4)), params, **SCRIPTED)
    resumed = learn(streamed, params, **SCRIPTED)
    assert multiprocessing.active_children() == others
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.usefixtures("clone")
def test_where_nobody_ever_takes_over_the_weights_are_those_without_interventions(
    job: Callable[[str], Job], params: config.Params
) -> None:
    never = {"interventions": {"source": "scripted", "stall_distance": 0.0, "stray_distance": 1e9}}
    plain = learn(replace(job("rlpd"), state=job("rlpd").state / "plain"), params)
    watched = learn(job("rlpd"), params, **never)
    assert history()["iterations"][-1][names.SHARE] == 0.0
    assert all(torch.equal(watched[name], value) for name, value in plain.items())
