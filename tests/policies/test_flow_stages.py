"""A small flow policy goes through the stages as any other does."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from nightshift import config, policies
from nightshift.algorithms.batch import collate
from nightshift.pipeline import precheck
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import snapshot
from nightshift.project import paths
from nightshift.rollouts.local import LocalPool
from nightshift.stages import collect, dataset, evaluate, rloo, sft
from nightshift.types import RolloutRequest
from tests.conftest import leave_skipped, small_params
from tests.policies.examples import FLOW
from tests.policies.openvla_oft.test_stages import HalfSolved

CHANGES: dict[str, Any] = {
    "policy": {
        "family": "flow",
        "inputs": ["objects", "task", "instruction"],
        "patch_size": 8,
        "width": 16,
        "depth": 1,
        "heads": 2,
        "max_words": 4,
        "chunk": 5,
        "denoising_steps": 3,
        "augmentation": {"crop": 0, "jitter": 0.0},
    },
    "sft": {"steps": 60, "batch_size": 32, "learning_rate": 5.0e-3},
    "rloo": {
        "iterations": 2,
        "groups": 2,
        "group_size": 4,
        "epochs": 1,
        "target_kl": None,
        "bc_weight": 0.1,
        "kl": {"coef": 0.1},
        "validation": {"every": 2},
    },
    "evaluate": {"init_states": 2, "films": 0},
}


def with_policy(kind: str, **changes: Any) -> config.Params:
    merged = config.merged(config.merged(small_params(), CHANGES), {"policy": FLOW[kind], **changes})
    return config.Params.model_validate(merged)


def cloned(job: Callable[[str], Job], params: config.Params) -> list[float]:
    """The losses of cloning."""
    precheck.check_policy(params)
    collect.run(job("collect"), seed=0, env=params.env, states=params.states, collect=params.collect)
    dataset.run(job("dataset"), seed=0, dataset=params.dataset)
    sft.run(job("sft"), seed=0, policy=params.policy, sft=params.sft)
    lines = [json.loads(line) for line in (job("sft").state / "metrics.jsonl").read_text().splitlines()]
    return [line["sft/validation_loss"] for line in lines if "sft/validation_loss" in line]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("kind", ["sde", "noise"])
def test_it_is_cloned_reinforced_and_evaluated(job: Callable[[str], Job], kind: str) -> None:
    params = with_policy(kind)
    losses = cloned(job, params)
    assert losses[-1] < losses[0]
    with closing(HalfSolved(params.env)) as pool:
        playing = replace(job("rloo"), pool=lambda env: pool)
        rloo.run(playing, seed=0, env=params.env, states=params.states, rloo=params.rloo)
    history = json.loads(paths.RLOO_HISTORY.read_text())["iterations"]
    assert [iteration["update/gradients"] for iteration in history] == [1, 1]
    assert all(abs(iteration["update/ppo_kl"]) < 1e-5 for iteration in history), "update and rollout agree on log-probs"
    assert all(iteration["update/kl"] > 0 for iteration in history), "nothing was learned"
    leave_skipped("rlpd")
    evaluate.run(job("evaluate"), env=params.env, evaluate=params.evaluate)
    report = json.loads(paths.EVALUATION_REPORT.read_text())
    assert [(one["name"], one["overall"]["episodes"]) for one in report["candidates"]] == [("sft", 4), ("rloo", 4)]
    assert type(policies.load(paths.RLOO_POLICY)) is type(policies.load(paths.SFT_POLICY))


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("kind", ["sde", "noise"])
def test_log_probs_that_are_recorded_in_a_rollout_are_the_updates_own(job: Callable[[str], Job], kind: str) -> None:
    params = with_policy(kind, sft={"steps": 20})
    cloned(job, params)
    policy = policies.load(paths.SFT_POLICY)
    request = RolloutRequest(task="near", split="train", init_state=0, controller="sample", seed=1, count=3)
    with closing(LocalPool(params.env)) as pool:
        ((_, episodes),) = list(pool.run([request], snapshot(policy)))
    assert all(episode.length % policy.chunk for episode in episodes), "no chunk is cut short"
    batch = collate(policy, episodes).with_zero_padding()
    with torch.no_grad():
        again = policy.log_prob(batch.inputs, batch.actions, request.temperature)
    recomputed = torch.where(batch.mask[..., None], again, 0)
    torch.testing.assert_close(recomputed, batch.log_probs, rtol=0, atol=2e-5)
    assert batch.log_probs.abs().sum() > 0


def test_what_an_update_reads_of_a_decision_is_recorded_in_training_and_not_in_evaluation() -> None:
    params = with_policy("sde")
    torch.manual_seed(0)
    policy = policies.fresh(params.policy, {"objects": (3,), "task": (2,), "instruction": ()}, action_dim=7)
    train = RolloutRequest(task="near", split="train", init_state=0, controller="sample", seed=1)
    with closing(LocalPool(params.env)) as pool:
        played = dict(pool.run([train, replace(train, split="eval")], snapshot(policy)))
    (trained,), (evaluated,) = played[0], played[1]
    assert trained.latents
    assert not evaluated.latents
    assert evaluated.log_probs.any()


def test_a_noise_network_alone_has_a_std_to_learn() -> None:
    with_policy("noise", rloo={"learn_std": True, "entropy_coef": 0.005})
    with pytest.raises(ValueError, match=r"learn_std has no effect while the policy is flow with flow_sde"):
        with_policy("sde", rloo={"learn_std": True})
    for learn_std in (False, True):
        with pytest.raises(ValueError, match=r"entropy_coef has no effect: the noise of flow_sde is not learned"):
            with_policy("sde", rloo={"entropy_coef": 0.005, "learn_std": learn_std})


def test_the_entropy_of_a_noise_network_depends_on_the_tokens_that_are_always_trained() -> None:
    assert with_policy("noise", rloo={"entropy_coef": 0.005, "learn_std": False}).rloo.entropy_coef == 0.005


def test_rlpd_does_not_train_it() -> None:
    with pytest.raises(
        ValueError, match=r"rlpd needs policy\.head: tanh_gaussian, but the policy is flow with flow_sde"
    ):
        with_policy("sde", algorithms=["rlpd"])
