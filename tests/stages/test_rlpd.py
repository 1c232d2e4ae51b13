"""The stage rlpd on the fake suite, with real episodes, replay, learner and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config, files, policies
from nightshift.adapters.tracking import JsonlTracker
from nightshift.data import dataset_store
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.errors import ConfigError
from nightshift.learners import checkpoint
from nightshift.pipeline.job import Job
from nightshift.policies.base import Policy
from nightshift.project import paths, ports
from nightshift.stages import _experience, collect, dataset, rlpd, sft
from nightshift.stages._actor import ActorSpec
from nightshift.stream.link import LinkDown
from nightshift.stream.tcp_link import TcpLink
from nightshift.telemetry import experience as metrics
from nightshift.types import RolloutRequest
from tests.conftest import jobs, make_project
from tests.stages.test_collect import FailingPool

CRITICS = {"num_qs": 3, "num_min_qs": 2, "hidden": [32, 32]}
SMALL: dict[str, Any] = {
    "steps": 120,
    "episodes_at_once": 3,
    "training_starts": 60,
    "warmup_steps": 5,
    "utd_ratio": 2,
    "batch_size": 16,
    "critics": CRITICS,
    "validation": {"every": 60},
}
HISTORY = paths.RLPD_POLICY / paths.HISTORY
EXPERIENCE_METRICS = {value for name, value in vars(metrics).items() if name.isupper()}
OF_ACTORS = {metrics.SPOOLED, metrics.RECEIVED, metrics.PUBLISHED_VERSION}


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with demos, dataset and clone, for the tests to copy."""
    root = make_project(tmp_path_factory.mktemp("cloned") / "project", code=False)
    params = config.load(root / paths.PARAMS)
    with contextlib.chdir(root), jobs(root) as job:
        collect.run(job("collect"), seed=params.seed, env=params.env, states=params.states, collect=params.collect)
        dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset)
        section = params.policy.model_copy(update={"head": "tanh_gaussian"})
        sft.run(job("sft"), seed=params.seed, policy=section, sft=params.sft.model_copy(update={"steps": 60}))
    return root


@pytest.fixture
def clone(project: Path, cloned: Path) -> None:
    for path in (paths.DEMOS, paths.DATASET, paths.SFT_POLICY):
        shutil.copytree(cloned / path, project / path)


@dataclass(frozen=True)
class WholeRun:
    """A run that nothing disturbed."""

    root: Path
    tensors: dict[str, torch.Tensor]
    """Of the last checkpoint."""
    history: Any
    played: Sequence[RolloutRequest]

    @property
    def state(self) -> Path:
        return self.root / paths.STATE / "rlpd" / "test"

    def episodes(self) -> EpisodeStore:
        return EpisodeStore(self.state / "episodes")


@pytest.fixture(scope="module")
def whole_run(cloned: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], WholeRun]:
    """By staleness; each is made once."""

    @functools.cache
    def make(staleness: int) -> WholeRun:
        root = tmp_path_factory.mktemp("whole") / "project"
        shutil.copytree(cloned, root, symlinks=True)
        params = config.load(root / paths.PARAMS)
        pool = FailingPool(params.env)
        with contextlib.chdir(root), jobs(root) as job:
            tensors = learn(replace(job("rlpd"), pool=lambda env: pool), params, staleness=staleness)
            return WholeRun(root, tensors, history(), pool.played)

    return make


def learn(job: Job, params: config.Params, **changes: Any) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint."""
    raw = config.merged(params.rlpd.model_dump(), config.merged(SMALL, changes))
    return learn_by(job, params, config.Rlpd.model_validate(raw))


def learn_by(job: Job, params: config.Params, chosen: config.Rlpd) -> dict[str, torch.Tensor]:
    rlpd.run(job, seed=params.seed, env=params.env, states=params.states, rlpd=chosen)
    last = checkpoint.newest(job.state)
    assert last is not None
    return dict(last.tensors)


def history() -> Any:
    return json.loads(HISTORY.read_text())


class Stopping(JsonlTracker):
    """Ctrl-C when the `at`-th metrics are logged."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path)
        self._left = at

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


def every(job: Job, decisions: int) -> Job:
    periods = job.machine.checkpoint_every.model_copy(update={"rlpd_decisions": decisions})
    return replace(job, machine=job.machine.model_copy(update={"checkpoint_every": periods}))


@pytest.mark.slow
@pytest.mark.usefixtures("clone")
def test_from_nothing_but_demos_in_the_replay_it_learns_to_reach_the_goal(
    job: Callable[[str], Job], params: config.Params
) -> None:
    learn(
        job("rlpd"),
        params,
        steps=2400,
        training_starts=100,
        warmup_steps=0,
        utd_ratio=2,
        batch_size=64,
        discount=0.9,
        n_step=1,
        actor={"start": "scratch", "learning_rate": 1e-3, "bc_weight": 0.0, "bc_steps": 0, "ema_decay": 0.9},
        critics={**CRITICS, "learning_rate": 1e-3, "tau": 0.02},
        entropy={"initial_temperature": 0.02, "target": -1.0, "learning_rate": 1e-3},
        validation={"every": 600},
    )
    rates = [one["successes"] / one["episodes"] for one in history()["validation"]]
    assert rates[0] < 0.3
    assert max(rates) > 0.8
    assert history()["kept"] > 0


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize(
    ("stop", "period", "staleness"),
    [
        pytest.param(1, 30, 0, marks=pytest.mark.slow),
        (4, 1, 1),
        pytest.param(5, 30, 0, marks=pytest.mark.slow),
        pytest.param(5, 30, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_ends_with_the_weights_and_history_of_one_that_was_not(
    job: Callable[[str], Job],
    params: config.Params,
    whole_run: Callable[[int], WholeRun],
    stop: int,
    period: int,
    staleness: int,
) -> None:
    """Killed before and after its first checkpoint, right at one, and far behind the last one; and checkpoints of
    another period change nothing."""
    whole = whole_run(staleness)
    killed = every(replace(job("rlpd"), tracker=Stopping(job("rlpd").state / "stopped.jsonl", stop)), period)
    with pytest.raises(KeyboardInterrupt):
        learn(killed, params, staleness=staleness)
    resumed = learn(every(job("rlpd"), period), params, staleness=staleness)
    assert resumed.keys() == whole.tensors.keys()
    assert all(torch.equal(resumed[name], value) for name, value in whole.tensors.items())
    assert history() == whole.history, "evaluation depends on it: no clock may be in it"


def test_updates_follow_decisions_at_the_ratio_and_the_metrics_say_so(whole_run: Callable[[int], WholeRun]) -> None:
    whole = whole_run(0)
    lines = [json.loads(line) for line in (whole.state / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "replay/decisions" in line][-1]
    assert whole.history["iterations"][-1].items() <= last.items()
    played = last["replay/decisions"]
    assert played >= SMALL["steps"]
    assert last["rate_limiter/inserts"] == played
    assert last["rate_limiter/samples"] == SMALL["utd_ratio"] * (played - SMALL["training_starts"])
    assert {"critic/loss", "actor/entropy", "actor/temperature", *EXPERIENCE_METRICS} <= last.keys() | OF_ACTORS
    assert last["replay/utd_ratio"] == last["rate_limiter/samples"] / played
    assert min(last["speed/env_steps_per_second"], last["speed/gradient_steps_per_second"]) > 0
    steps = [line["step"] for line in lines if "validation/success" in line]
    assert steps[0] == 0
    assert steps[-1] == played


def test_demos_experience_and_validation_never_share_an_init_state(whole_run: Callable[[int], WholeRun]) -> None:
    whole = whole_run(0)
    demos = {(d.provenance.task, d.provenance.init_state) for d in EpisodeStore(whole.root / paths.DEMOS)}
    trained, validation = (
        {(r.task, r.init_state) for r in whole.played if r.split == split} for split in ("train", "validation")
    )
    assert {task for task, _ in trained} == {"near", "far"}
    assert not validation & (demos | trained)
    assert {r.controller for r in whole.played if r.split == "validation"} == {"greedy"}


@pytest.mark.usefixtures("clone")
def test_demos_that_another_dataset_rewards_otherwise_are_learned_from_like_ours(
    job: Callable[[str], Job], params: config.Params
) -> None:
    short = {"steps": 12, "training_starts": 6, "validation": {"every": 12}}
    ours = learn(job("rlpd"), params, **short)
    stored = dataset_store.read(paths.DATASET)
    theirs: dict[dataset_store.DatasetSplit, list[Episode]] = {
        part: [replace(demo, rewards=np.ones_like(demo.rewards), terminated=False) for demo in stored.episodes(part)]
        for part in dataset_store.SPLITS
    }
    shutil.rmtree(paths.DATASET)
    dataset_store.write(paths.DATASET, theirs, stored.schema)
    shutil.rmtree(job("rlpd").state)
    learned = learn(job("rlpd"), params, **short)
    assert all(torch.equal(learned[name], value) for name, value in ours.items())


@pytest.mark.usefixtures("clone")
def test_random_actions_come_first_where_they_are_asked_for(job: Callable[[str], Job], params: config.Params) -> None:
    pool = FailingPool(params.env)
    learn(replace(job("rlpd"), pool=lambda env: pool), params, steps=60, random_steps=30)
    controllers = [r.controller for r in pool.played if r.split == "train"]
    first = controllers.index("sample")
    assert set(controllers[:first]) == {"random"}
    assert set(controllers[first:]) == {"sample"}
    episodes = list(EpisodeStore(job("rlpd").state / "episodes"))
    assert sum(episode.length - 1 for episode in episodes[:first]) >= 30
    assert max(abs(episode.actions).max() for episode in episodes[:first]) <= 1


@pytest.mark.usefixtures("clone")
def test_the_actor_that_starts_as_the_clone_first_acts_as_the_clone(
    job: Callable[[str], Job], params: config.Params
) -> None:
    """Also after the warm-up, in which critics and temperature alone are trained."""
    small = config.Rlpd.model_validate(config.merged(params.rlpd.model_dump(), SMALL))
    tensors = learn_by(job("rlpd"), params, small.model_copy(update={"training_starts": 1000}))
    before = policies.load(paths.SFT_POLICY).state_dict()
    assert all(torch.equal(tensors[f"policy.weights.{name}"], value) for name, value in before.items())
    assert history()["kept"] == 0


@pytest.mark.usefixtures("clone")
def test_a_relative_entropy_target_is_added_to_the_entropy_of_the_clone_on_the_demos(
    job: Callable[[str], Job], params: config.Params
) -> None:
    learn(job("rlpd"), params, steps=40, training_starts=20, entropy={"target": 0.25, "relative": True})
    clone = policies.load(paths.SFT_POLICY)
    demos = dataset_store.read(paths.DATASET).episodes("train")
    inputs = [clone.inputs({name: values[:-1].copy() for name, values in e.observations.items()}) for e in demos]
    entropies = [clone.evaluate_actions(one, clone.greedy(one), 1.0)[1].sum((1, 2)) for one in inputs]
    own = torch.cat(entropies).mean().item()
    found = history()["iterations"][0]["actor/target_entropy"]
    assert found == pytest.approx(own + 0.25 * clone.chunk * clone.action_dim)


def test_what_is_handed_on_is_a_policy_that_acts(whole_run: Callable[[int], WholeRun]) -> None:
    root = whole_run(0).root
    handed_on = policies.load(root / paths.RLPD_POLICY)
    assert isinstance(handed_on, Policy)
    assert handed_on.spec == policies.load(root / paths.SFT_POLICY).spec


@pytest.mark.usefixtures("clone")
def test_episodes_that_the_simulator_spoilt_are_left_out(job: Callable[[str], Job], params: config.Params) -> None:
    pool = FailingPool(params.env, breaks=lambda request: request.task == "far" and request.split == "train")
    learn(replace(job("rlpd"), pool=lambda env: pool), params, steps=60)
    episodes = EpisodeStore(job("rlpd").state / "episodes")
    assert {episode.provenance.task for episode in episodes} == {"near"}
    rounds = history()["iterations"]
    assert sum(one["rollout/invalid"] for one in rounds) >= len(rounds), "of three tickets one or two are of that task"


@pytest.mark.usefixtures("clone")
def test_a_chunk_that_does_not_divide_the_horizon_is_refused(job: Callable[[str], Job], params: config.Params) -> None:
    uneven = params.model_copy(update={"env": params.env.model_copy(update={"horizon": 11})})
    clone = policies.load(paths.SFT_POLICY)
    folder = paths.SFT_POLICY
    shutil.rmtree(folder)
    with files.new_folder(folder) as new:
        policies.save(policies.build({**clone.spec, "chunk": 2}), new)
    with pytest.raises(ConfigError, match=r"policy\.chunk \(2\) does not divide env\.horizon \(11\)"):
        learn(job("rlpd"), uneven)


@pytest.mark.usefixtures("clone")
def test_a_clone_with_another_head_is_refused_before_anything_is_played(
    job: Callable[[str], Job], params: config.Params
) -> None:
    clone = policies.load(paths.SFT_POLICY)
    shutil.rmtree(paths.SFT_POLICY)
    with files.new_folder(paths.SFT_POLICY) as new:
        policies.save(policies.build({**clone.spec, "head": "gaussian"}), new)
    with pytest.raises(ConfigError, match="Gaussian through tanh"):
        learn(job("rlpd"), params)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_round_is_played_by_the_policy_before_the_updates_that_it_may_overlap(
    whole_run: Callable[[int], WholeRun], staleness: int
) -> None:
    whole = whole_run(staleness)
    rounds = len(whole.history["iterations"])
    played = [episode.policy_versions[0] for episode in whole.episodes()]
    expected = [max(0, number - staleness) for number in range(rounds) for _ in range(SMALL["episodes_at_once"])]
    assert played == expected


class NoProcesses(_experience.Actors):
    """Keeps what actors would be started with."""

    specs: Sequence[ActorSpec] = ()

    def __init__(self, specs: Sequence[ActorSpec], **_: Any) -> None:
        super().__init__([], most_in_play=1, arrived=lambda: 0)
        type(self).specs = specs


@contextlib.contextmanager
def _listening(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ActorSpec]:
    """The stage waits for one actor, which is not started; yields what it would be started with."""
    monkeypatch.setattr(_experience, "Actors", NoProcesses)
    one = replace(job("rlpd"), machine=params.machine.model_copy(update={"actors": 1}))
    with _experience.open_experience(
        one, one.pool(params.env), seed=0, env=params.env, states=params.states, rlpd=params.rlpd
    ):
        (spec,) = NoProcesses.specs
        yield spec


@pytest.mark.usefixtures("project")
def test_without_a_token_of_the_user_the_stage_makes_one_that_keeps_other_users_of_the_machine_out(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _listening(job, params, monkeypatch) as spec:
        with pytest.raises(LinkDown, match="asks for a token"):
            TcpLink(*spec.learner).weights(-1)
        with closing(TcpLink(*spec.learner, token=spec.token)) as link:
            assert link.weights(-1) is None


@pytest.mark.usefixtures("project")
def test_while_the_stage_listens_other_commands_know_that_the_port_is_the_projects_own(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _listening(job, params, monkeypatch) as spec:
        _, port = spec.learner
        assert ports.holder(port) == str(os.getpid())
    assert not ports.holder(port)


@pytest.mark.slow
@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("staleness", [0, 1])
def test_actors_in_processes_of_their_own_give_the_same_weights_as_one_process(
    job: Callable[[str], Job], params: config.Params, whole_run: Callable[[int], WholeRun], staleness: int
) -> None:
    """Also if an actor is killed meanwhile, and if the learner is."""
    expected = whole_run(staleness).tensors
    others = multiprocessing.active_children()
    machine = job("rlpd").machine.model_copy(update={"actors": 2})
    streamed = replace(job("rlpd"), machine=machine)
    with pytest.raises(KeyboardInterrupt):
        killed = replace(streamed, tracker=KillingAnActor(job("rlpd").state / "stopped.jsonl", 4))
        learn(killed, params, staleness=staleness)
    assert multiprocessing.active_children() == others
    resumed = learn(streamed, params, staleness=staleness)
    assert multiprocessing.active_children() == others
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    lines = (job("rlpd").state / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if metrics.DECISIONS in line][-1]
    assert last["inbox/stored"] >= last["replay/episodes"]
    assert last.keys() >= EXPERIENCE_METRICS
    assert last["queue/ordered"] + last["queue/received"] == staleness * SMALL["episodes_at_once"]
    assert last["rollout/weight_age"] == staleness
    assert last["stream/inserted"] > 0


class KillingAnActor(Stopping):
    """Kills an actor at the second metrics, and the learner later."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path, at)
        self._already = set(multiprocessing.active_children())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._left == 3:
            (set(multiprocessing.active_children()) - self._already).pop().kill()
        super().log(metrics, step)


SEEING: dict[str, Any] = {
    "family": "cnn",
    "inputs": ["agentview", "proprio", "instruction"],
    "channels": [4, 4],
    "hidden": [16],
    "max_words": 4,
    "chunk": 2,
    "head": "tanh_gaussian",
    "augmentation": {"crop": 1, "jitter": 0.0},
}


def test_a_policy_that_sees_learns_in_chunks_and_resumes(
    project: Path, job: Callable[[str], Job], params: config.Params
) -> None:
    cameras = params.env.cameras.model_copy(update={"names": ("agentview",), "size": 16})
    seeing = params.model_copy(update={"env": params.env.model_copy(update={"cameras": cameras})})
    collect.run(job("collect"), seed=0, env=seeing.env, states=seeing.states, collect=seeing.collect)
    dataset.run(job("dataset"), seed=0, dataset=seeing.dataset)
    section = config.Cnn.model_validate(SEEING)
    sft.run(job("sft"), seed=0, policy=section, sft=seeing.sft.model_copy(update={"steps": 5}))
    few = {"steps": 40, "batch_size": 8, "n_step": 2, "warmup_steps": 2, "training_starts": 10}
    whole = learn(every(replace(job("rlpd"), state=job("rlpd").state / "whole"), 10), seeing, **few)
    with pytest.raises(KeyboardInterrupt):
        learn(every(replace(job("rlpd"), tracker=Stopping(job("rlpd").state / "stopped.jsonl", 3)), 10), seeing, **few)
    resumed = learn(every(job("rlpd"), 10), seeing, **few)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    encoder = [name for name in whole if name.startswith("policy.weights.encoder.")]
    clone = policies.load(paths.SFT_POLICY).state_dict()
    assert encoder and all(torch.equal(whole[name], clone[name.removeprefix("policy.weights.")]) for name in encoder)
    first = next(iter(EpisodeStore(job("rlpd").state / "episodes")))
    assert first.actions.shape[1] == 2 * 7
    assert first.observations["agentview"].shape[1:] == (16, 16, 3)
