import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config, policies
from nightshift.adapters.tracking import JsonlTracker
from nightshift.data.episode_store import EpisodeStore
from nightshift.learners import checkpoint, shards
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.project import paths
from nightshift.stages import collect, dataset, rloo, sft
from nightshift.types import RolloutRequest, Trajectory
from tests.stages.test_collect import FailingPool


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demos, dataset and clone of the module's first test, for the others to copy."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def policy(project: Path, made: Path, job: Callable[[str], Job], params: config.Params) -> None:
    if any(made.iterdir()):
        shutil.copytree(made, project, dirs_exist_ok=True)
        return
    collect.run(job("collect"), seed=params.seed, env=params.env, states=params.states, collect=params.collect)
    dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset)
    few = params.sft.model_copy(update={"steps": 500})
    sft.run(job("sft"), seed=params.seed, policy=params.policy, sft=few)
    for path in (paths.DEMOS, paths.DATASET, paths.SFT_POLICY):
        shutil.copytree(path, made / path)


@pytest.mark.usefixtures("policy")
def test_success_rises_and_every_update_stays_in_the_trust_region(
    job: Callable[[str], Job], params: config.Params
) -> None:
    settings = params.rloo.model_copy(
        update={
            "iterations": 14,
            "groups": 4,
            "group_size": 16,
            "target_kl": 0.1,
            "validation": params.rloo.validation.model_copy(update={"every": 14}),
            "optimizer": params.rloo.optimizer.model_copy(update={"learning_rate": 2e-2}),
        }
    )
    rloo.run(job("rloo"), seed=params.seed, env=params.env, states=params.states, rloo=settings)
    history = json.loads(paths.RLOO_HISTORY.read_text())["iterations"]
    first, last = (np.mean([h["rollout/success"] for h in part]) for part in (history[:5], history[-5:]))
    assert last > first + 0.1
    assert all(h["update/kl"] < 3 * 0.1 for h in history)


@pytest.mark.usefixtures("policy")
def test_one_metrics_line_per_iteration(job: Callable[[str], Job], params: config.Params) -> None:
    settings = params.rloo.model_copy(update={"iterations": 3})
    rloo.run(job("rloo"), seed=params.seed, env=params.env, states=params.states, rloo=settings)
    lines = [json.loads(line) for line in Path(job("rloo").state / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "update/kl" in line]
    assert [line["step"] for line in updates] == [1, 2, 3]
    assert {"rollout/success", "rollout/success/near", "update/kl", "update/clip_fraction"} <= updates[0].keys()
    assert [line["step"] for line in lines if "validation/success" in line] == [0, 2, 3]


class Stopping(JsonlTracker):
    """Ctrl-C at some step."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path)
        self._at = at

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        if step == self._at:
            raise KeyboardInterrupt


def stopping(job: Job, *, at: int) -> Job:
    return replace(job, tracker=Stopping(job.state / "stopped.jsonl", at))


def on_machine(job: Job, **machine: Any) -> Job:
    return replace(job, machine=job.machine.model_copy(update=machine))


def weights_of(job: Job, params: config.Params, **sampling: Any) -> dict[str, torch.Tensor]:
    chosen = params.rloo.model_copy(
        update={"iterations": 4, "sampling": params.rloo.sampling.model_copy(update=sampling)}
    )
    rloo.run(job, seed=params.seed, env=params.env, states=params.states, rloo=chosen)
    last = checkpoint.newest(job.state)
    assert last is not None
    return {**last.tensors, **(shards.read(last.shards) if last.shards else {})}


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(
    ("staleness", "ranks", "at", "whole_policies"),
    [
        (0, 1, 2, set()),
        (0, 1, 4, {"best"}),
        pytest.param(1, 1, 2, set(), id="1-the start acts"),
        pytest.param(1, 1, 3, {"acting"}, id="1-the best is the start"),
        pytest.param(1, 1, 4, {"best"}, id="1-the best acts"),
        pytest.param(1, 2, 3, {"acting"}, marks=pytest.mark.slow, id="1-on two ranks"),
    ],
)
def test_an_interrupted_run_ends_with_the_weights_of_one_that_was_not(
    job: Callable[[str], Job], params: config.Params, staleness: int, ranks: int, at: int, whole_policies: set[str]
) -> None:
    """A checkpoint has no policy twice, and not the clone."""
    sampling = {"staleness": staleness, "skip_solved": 2, "curriculum_floor": 0.3, "waves": 2, "min_success_rate": 0.1}
    interrupted = on_machine(job("rloo"), ranks=ranks)
    expected = weights_of(replace(interrupted, state=interrupted.state / "whole"), params, **sampling)
    with pytest.raises(KeyboardInterrupt):
        weights_of(stopping(interrupted, at=at), params, **sampling)
    last = checkpoint.newest(interrupted.state)
    assert last is not None
    assert last.step == at - 1
    assert {name.partition(".")[0] for name in last.tensors} & {"acting", "best"} == whole_policies
    resumed = weights_of(interrupted, params, **sampling)
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(
    "change",
    [
        {"microbatch_size": 3},
        pytest.param({"ranks": 2}, marks=pytest.mark.slow, id="on two ranks"),
        pytest.param({"ranks": 2, "strategy": "fsdp"}, marks=pytest.mark.slow, id="on two sharded ranks"),
    ],
)
def test_a_run_resumes_from_its_checkpoint_after_machine_was_changed(
    job: Callable[[str], Job], params: config.Params, change: dict[str, Any]
) -> None:
    expected = weights_of(replace(job("rloo"), state=job("rloo").state / "whole"), params)
    every = config.CheckpointEvery(sft_steps=1, rloo_iterations=2, rlpd_decisions=1)
    with pytest.raises(KeyboardInterrupt):
        weights_of(stopping(on_machine(job("rloo"), checkpoint_every=every), at=4), params)
    assert checkpoints(job("rloo")) == ["step-00000002"]
    tracker = JsonlTracker(job("rloo").state / "resumed.jsonl")
    resumed = weights_of(on_machine(replace(job("rloo"), tracker=tracker), **change), params)
    lines = (job("rloo").state / "resumed.jsonl").read_text().splitlines()
    assert [step["step"] for step in map(json.loads, lines) if "update/kl" in step] == [3, 4]
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("policy")
def test_a_checkpoint_is_made_every_period_and_after_the_last_iteration(
    job: Callable[[str], Job], params: config.Params
) -> None:
    every = config.CheckpointEvery(sft_steps=1, rloo_iterations=3, rlpd_decisions=1)
    weights_of(on_machine(job("rloo"), checkpoint_every=every), params)
    assert checkpoints(job("rloo")) == ["step-00000003", "step-00000004"]


def checkpoints(job: Job) -> list[str]:
    return sorted(path.name for path in job.state.glob("step-*"))


@pytest.mark.usefixtures("policy")
def test_rollouts_that_overlap_the_update_come_from_the_policy_before_it(
    job: Callable[[str], Job], params: config.Params
) -> None:
    def versions(staleness: int) -> list[set[int]]:
        pool = FailingPool(params.env)
        chosen = replace(job("rloo"), pool=lambda env: pool, state=job("rloo").state / str(staleness))
        weights_of(chosen, params, staleness=staleness)
        trained = [v for v, r in zip(pool.versions, pool.played, strict=True) if r.split == "train"]
        return [set(trained[i : i + params.rloo.groups]) for i in range(0, len(trained), params.rloo.groups)]

    assert versions(0) == [{0}, {1}, {2}, {3}]
    assert versions(1) == [{0}, {0}, {1}, {2}]


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(("when_short", "learns"), [("train", True), ("skip", False)])
def test_too_few_groups_are_learned_from_or_end_the_iteration_as_told(
    job: Callable[[str], Job], params: config.Params, when_short: str, learns: bool
) -> None:
    before = policies.load(paths.SFT_POLICY).state_dict()
    pool = FailingPool(params.env, breaks=lambda request: request.task == "far")
    after = weights_of(replace(job("rloo"), pool=lambda env: pool), params, when_short=when_short)
    assert all(torch.equal(after[f"policy.weights.{name}"], value) for name, value in before.items()) is not learns


GROUPS = 16


def history_of(job: Job, params: config.Params, pool: FailingPool) -> Any:
    settings = params.rloo.model_copy(update={"iterations": 2, "groups": GROUPS})
    rloo.run(replace(job, pool=lambda env: pool), seed=params.seed, env=params.env, states=params.states, rloo=settings)
    return json.loads(paths.RLOO_HISTORY.read_text())["iterations"]


@pytest.mark.usefixtures("policy")
def test_a_group_that_the_simulator_spoilt_teaches_nothing_and_is_counted(
    job: Callable[[str], Job], params: config.Params
) -> None:
    history = history_of(job("rloo"), params, FailingPool(params.env, breaks=lambda request: request.task == "far"))
    for metrics in history:
        assert metrics["rollout/invalid"] == GROUPS / 2 * params.rloo.group_size
        assert metrics["rollout/success"] == metrics["rollout/success/near"]
        assert "rollout/success/far" not in metrics
        assert 0 < metrics["rollout/clipped_actions"] < 1
    assert any(metrics["update/gradients"] for metrics in history)


@pytest.mark.usefixtures("policy")
def test_an_iteration_without_one_valid_group_leaves_the_policy_alone(
    job: Callable[[str], Job], params: config.Params
) -> None:
    history = history_of(job("rloo"), params, FailingPool(params.env, breaks=lambda request: request.split == "train"))
    assert [metrics["update/gradients"] for metrics in history] == [0, 0]
    assert all(math.isnan(metrics["rollout/success"]) for metrics in history)
    before, after = (policies.load(path).state_dict() for path in (paths.SFT_POLICY, paths.RLOO_POLICY))
    assert all(torch.equal(before[name], after[name]) for name in before)


class WorseWithTraining(FailingPool):
    """Greedy plays fail more often the longer the policy has trained, whatever it does."""

    def __init__(self, env: config.Env) -> None:
        super().__init__(env, fails=lambda request: False)

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        for index, played in super().run(requests, policy):
            version = policy.version if policy else 0
            solved = requests[index].init_state % 4 >= version
            yield index, [replace(t, success=solved) if requests[index].split == "validation" else t for t in played]


@pytest.mark.usefixtures("policy")
def test_a_policy_that_training_made_worse_is_not_handed_on(job: Callable[[str], Job], params: config.Params) -> None:
    pool = WorseWithTraining(params.env)
    chosen = params.rloo.model_copy(update={"iterations": 3, "validation": config.Validation(every=1, level=0.1)})
    rloo.run(
        replace(job("rloo"), pool=lambda env: pool), seed=params.seed, env=params.env, states=params.states, rloo=chosen
    )
    history = json.loads(paths.RLOO_HISTORY.read_text())
    assert history["kept"] == 0
    assert [(v["iteration"], v["successes"], v["episodes"]) for v in history["validation"]] == [
        (0, 8, 8),
        (1, 6, 8),
        (2, 4, 8),
        (3, 2, 8),
    ]
    before, after = (policies.load(path).state_dict() for path in (paths.SFT_POLICY, paths.RLOO_POLICY))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("policy")
def test_a_better_policy_is_handed_on_and_a_resumed_run_hands_on_the_same(
    job: Callable[[str], Job], params: config.Params
) -> None:
    settings = params.rloo.model_copy(
        update={
            "iterations": 6,
            "groups": 8,
            "group_size": 8,
            "validation": config.Validation(every=2, level=0.1),
            "optimizer": params.rloo.optimizer.model_copy(update={"learning_rate": 2e-2}),
        }
    )

    states = params.states.model_copy(update={"validation_share": 0.06})

    def handed_on(job: Job) -> tuple[Any, bytes]:
        rloo.run(job, seed=params.seed, env=params.env, states=states, rloo=settings)
        return json.loads(paths.RLOO_HISTORY.read_text()), (paths.RLOO_POLICY / policies.WEIGHTS).read_bytes()

    history, weights = handed_on(replace(job("rloo"), state=job("rloo").state / "whole"))
    assert history["kept"] > 0
    stopped = replace(job("rloo"), tracker=Stopping(job("rloo").state / "stopped.jsonl", at=5))
    with pytest.raises(KeyboardInterrupt):
        handed_on(stopped)
    assert handed_on(job("rloo")) == (history, weights)


@pytest.mark.usefixtures("policy")
def test_demos_groups_and_validation_never_share_an_init_state(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = FailingPool(params.env)
    chosen = params.rloo.model_copy(update={"iterations": 2, "groups": 60, "group_size": 2})
    rloo.run(
        replace(job("rloo"), pool=lambda env: pool), seed=params.seed, env=params.env, states=params.states, rloo=chosen
    )
    demos = {(d.provenance.task, d.provenance.init_state) for d in EpisodeStore(paths.DEMOS)}
    groups, validation = (
        {(r.task, r.init_state) for r in pool.played if r.split == split} for split in ("train", "validation")
    )
    assert len(validation) == 2 * 4
    assert not validation & (demos | groups)
    assert {r.split for r in pool.played} == {"train", "validation"}
    assert {r.controller for r in pool.played if r.split == "validation"} == {"greedy"}
