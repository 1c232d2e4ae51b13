import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import config, paths, policies
from nightshift.distributed.schedule import Schedule
from nightshift.envs import tasks
from nightshift.job import Job
from nightshift.stages import collect, dataset, rloo, sft
from tests.stages.test_collect import FailingPool


@pytest.fixture
def policy(job: Callable[[str], Job], params: config.Params) -> None:
    collect.run(job("collect"), seed=params.seed, env=params.env, collect=params.collect)
    dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset)
    few = params.sft.model_copy(update={"steps": 500})
    sft.run(job("sft"), seed=params.seed, policy=params.policy, sft=few)


@pytest.mark.usefixtures("policy")
def test_success_rises_and_every_update_stays_in_the_trust_region(
    job: Callable[[str], Job], params: config.Params
) -> None:
    settings = params.rloo.model_copy(
        update={
            "iterations": 25,
            "groups": 8,
            "group_size": 8,
            "kl_limit": 0.1,
            "optimizer": params.rloo.optimizer.model_copy(update={"learning_rate": 1e-2}),
        }
    )
    rloo.run(job("rloo"), seed=params.seed, env=params.env, rloo=settings)
    history = json.loads(paths.RLOO_HISTORY.read_text())
    first, last = (np.mean([h["rollout/success"] for h in part]) for part in (history[:5], history[-5:]))
    assert last > first + 0.1
    assert all(h["update/kl"] < 3 * settings.kl_limit for h in history)


@pytest.mark.usefixtures("policy")
def test_one_metrics_line_per_iteration(job: Callable[[str], Job], params: config.Params) -> None:
    settings = params.rloo.model_copy(update={"iterations": 3})
    rloo.run(job("rloo"), seed=params.seed, env=params.env, rloo=settings)
    lines = [json.loads(line) for line in Path(job("rloo").state / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"rollout/success", "rollout/success/near", "update/kl", "update/clipped"} <= lines[0].keys()


def history_of(job: Job, params: config.Params, pool: FailingPool) -> Any:
    settings = params.rloo.model_copy(update={"iterations": 2})
    rloo.run(replace(job, pool=lambda env: pool), seed=params.seed, env=params.env, rloo=settings)
    return json.loads(paths.RLOO_HISTORY.read_text())


@pytest.mark.usefixtures("policy")
def test_a_group_that_the_simulator_spoilt_teaches_nothing_and_is_counted(
    job: Callable[[str], Job], params: config.Params
) -> None:
    history = history_of(job("rloo"), params, FailingPool(params.env, breaks=lambda request: request.task == "far"))
    for metrics in history:
        assert metrics["rollout/invalid"] == params.rloo.groups / 2 * params.rloo.group_size
        assert metrics["rollout/success"] == metrics["rollout/success/near"]
        assert "rollout/success/far" not in metrics
        assert 0 < metrics["rollout/clipped_actions"] < 1
    assert any(metrics["update/gradients"] for metrics in history)


@pytest.mark.usefixtures("policy")
def test_an_iteration_without_one_valid_group_leaves_the_policy_alone(
    job: Callable[[str], Job], params: config.Params
) -> None:
    history = history_of(job("rloo"), params, FailingPool(params.env, breaks=lambda request: True))
    assert [metrics["update/gradients"] for metrics in history] == [0, 0]
    assert all(math.isnan(metrics["rollout/success"]) for metrics in history)
    before, after = (policies.load(path).state_dict() for path in (paths.SFT_POLICY, paths.RLOO_POLICY))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_groups_take_tasks_in_turn_and_walk_through_the_training_states(params: config.Params) -> None:
    schedule = Schedule(tasks(params.env), seed=0, group_size=4, temperature=1.0)
    requests = [request for iteration in range(120) for request in schedule.requests(iteration, 4)]
    assert [request.task for request in requests[:4]] == ["near", "far", "near", "far"]
    near = [request.init_state for request in requests if request.task == "near"]
    assert sorted(near[:200]) == list(range(200))
    assert near[200:] == near[: len(near) - 200]
    assert len({request.seed for request in requests}) == len(requests)


def test_training_never_asks_for_an_evaluation_state(params: config.Params) -> None:
    schedule = Schedule(tasks(params.env), seed=3, group_size=2, temperature=1.0)
    assert {request.split for i in range(50) for request in schedule.requests(i, 8)} == {"train"}
