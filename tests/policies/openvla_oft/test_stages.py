"""A tiny policy of the family openvla-oft goes through the stages as any other does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from nightshift import config, envs, policies
from nightshift.algorithms.strategy import SingleProcess
from nightshift.envs.grid import misfit
from nightshift.errors import NightshiftError
from nightshift.learners import checkpoint
from nightshift.learners.algorithms import OnPolicy
from nightshift.pipeline import precheck
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.project import paths
from nightshift.rollouts.local import LocalPool
from nightshift.stages import collect, dataset, rloo, sft
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import small_params
from tests.policies import examples
from tests.policies.openvla_oft import published, tiny

CHANGES: dict[str, Any] = {
    "env": {"cameras": {"names": ["agentview"], "size": 32, "shadows": True}},
    "policy": tiny.section(inputs=["agentview", "proprio", "instruction"]),
    "sft": {"steps": 40, "batch_size": 16, "learning_rate": 5.0e-3},
    "rloo": {"iterations": 2, "groups": 2, "group_size": 4, "epochs": 1, "target_kl": None, "validation": {"every": 2}},
}


class HalfSolved(LocalPool):
    """Plays for real, and calls every other episode of a group solved: groups to learn from need both."""

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        for index, group in super().run(requests, policy):
            yield index, [replace(one, success=one.member % 2 == 0) for one in group]


def with_policy(**changes: Any) -> config.Params:
    return config.Params.model_validate(config.merged(config.merged(small_params(), CHANGES), changes))


def test_a_trained_policy_that_cannot_read_an_instruction_cannot_play_there() -> None:
    """As a champion of other tasks: an evaluation would end at its first episode, after a night's training."""
    params = with_policy(policy={"max_tokens": 5})
    shapes = {name: box.shape for name, box in envs.observation_space(params.env).items()}
    why = misfit(params.env, policies.fresh(params.policy, shapes, 7))
    assert "the instruction 'reach near' has 12 tokens, and the policy reads 5" in why
    assert not misfit(params.env, policies.fresh(with_policy().policy, shapes, 7))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_tokens": 5}, r"prompt for the instruction 'reach near' has 12 tokens, and the policy reads 5"),
        ({"inputs": ["wrist", "instruction"]}, r"policy\.inputs has wrist"),
    ],
)
def test_a_prompt_that_is_too_long_and_a_camera_that_is_not_there_are_found_before_any_stage(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(NightshiftError, match=sentence):
        precheck.check_policy(with_policy(policy=changes))


@pytest.mark.parametrize(("steps", "algorithms"), [(1, []), (0, ["rloo"])])
def test_bfloat16_weights_are_not_trained_themselves(tmp_path: Path, steps: int, algorithms: list[str]) -> None:
    policy = {**from_checkpoint(tmp_path), "dtype": "bfloat16"}
    with pytest.raises(NightshiftError, match=r"are no float32, .* is bfloat16") as refused:
        precheck.check_policy(with_policy(policy=policy, sft={"steps": steps}, algorithms=algorithms))
    assert "set policy.dtype: float32" in refused.value.next_step


def test_bfloat16_weights_are_played_as_they_are_and_trained_by_adapters(tmp_path: Path) -> None:
    policy = {**from_checkpoint(tmp_path), "dtype": "bfloat16"}
    precheck.check_policy(with_policy(policy=policy, sft={"steps": 0}, algorithms=[]))
    precheck.check_policy(with_policy(policy={**policy, "lora": ADAPTERS}))


ADAPTERS = {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}


@pytest.mark.parametrize(
    ("stored", "policy", "start", "sentence"),
    [
        ("adapter", {}, "scratch", "register.weights is adapter, and policy has no adapter"),
        ("merged", {}, "scratch", "register.weights is merged, and policy has no adapter"),
        ("adapter", {"lora": ADAPTERS}, "scratch", "its base, policy.checkpoint, is null"),
        ("merged", {"lora": ADAPTERS}, "champion", "merged leaves no adapter that could be trained"),
    ],
)
def test_what_cannot_be_registered_as_asked_is_refused_with_the_params(
    stored: str, policy: dict[str, Any], start: str, sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        with_policy(policy=policy, register={"weights": stored}, start=start)


def test_a_learner_refuses_to_train_bfloat16_weights() -> None:
    """Also where the cloned policy is older than the params, and no stage before it is checked."""
    policy = examples.make("openvla-oft tokens").bfloat16()
    algorithm = OnPolicy(settings=with_policy().rloo, demos=None)
    with pytest.raises(NightshiftError, match="are no float32"):
        algorithm.learner(policy, seed=0, microbatch_size=1, strategy=SingleProcess())


def from_checkpoint(folder: Path) -> dict[str, Any]:
    """A policy with the tiny weights, written there."""
    source = {
        "path": str(published.write(folder / "x")),
        "adapter": None,
        "unnorm_key": "libero_x",
        "range": "q01_q99",
    }
    return {
        "inputs": ["agentview", "instruction"],
        "checkpoint": source,
        "size": None,
        "max_tokens": 80,
    }


def test_random_weights_have_to_be_cloned() -> None:
    with pytest.raises(ValidationError, match=r"sft\.steps is 0, and the policy has no checkpoint"):
        with_policy(sft={"steps": 0})


@pytest.mark.usefixtures("project")
def test_a_checkpoint_is_handed_on_as_it_is_if_there_are_no_steps_of_cloning(
    job: Callable[[str], Job], tmp_path: Path
) -> None:
    params = with_policy(policy=from_checkpoint(tmp_path), sft={"steps": 0})
    precheck.check_policy(params)
    collect.run(job("collect"), seed=0, env=params.env, states=params.states, collect=params.collect)
    dataset.run(job("dataset"), seed=0, dataset=params.dataset)
    sft.run(job("sft"), seed=0, policy=params.policy, sft=params.sft)
    handed_on = policies.load(paths.SFT_POLICY).state_dict()
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(handed_on[f"network.{name}"], published.weights()[name])
    assert "sft/validation_loss" in (job("sft").state / "metrics.jsonl").read_text()


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("head", ["tokens", "l1"])
def test_it_is_cloned_and_reinforced(job: Callable[[str], Job], head: str) -> None:
    params = with_policy(policy={"head": head})
    precheck.check_policy(params)
    collect.run(job("collect"), seed=0, env=params.env, states=params.states, collect=params.collect)
    dataset.run(job("dataset"), seed=0, dataset=params.dataset)
    sft.run(job("sft"), seed=0, policy=params.policy, sft=params.sft)
    lines = [json.loads(line) for line in (job("sft").state / "metrics.jsonl").read_text().splitlines()]
    losses = [line["sft/loss"] for line in lines if "sft/loss" in line]
    assert losses[-1] < losses[0]
    with closing(HalfSolved(params.env)) as pool:
        playing = replace(job("rloo"), pool=lambda env: pool)
        rloo.run(playing, seed=0, env=params.env, states=params.states, rloo=params.rloo)
    history = json.loads(paths.RLOO_HISTORY.read_text())["iterations"]
    assert [iteration["update/gradients"] for iteration in history] == [1, 1]
    assert all(abs(iteration["update/ppo_kl"]) < 1e-5 for iteration in history), "update and rollout agree on log-probs"
    last = checkpoint.newest(playing.state)
    assert last is not None
    cloned = policies.load(paths.SFT_POLICY).state_dict()
    learned = {name for name in cloned if not torch.equal(last.tensors[f"policy.weights.{name}"], cloned[name])}
    assert {"network.vision_backbone.featurizer.cls_token", "network.projector.fc1.weight"} <= learned
    assert not {name for name in learned if "bounds" in name}


RECORDED_BFLOAT16 = {"dtype": "bfloat16", "reuse_vision_features": True}


@pytest.mark.usefixtures("project")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed, switching to BLAS")
@pytest.mark.parametrize(
    ("targets", "changes"),
    [(["q_proj", "qkv"], {}), (["q_proj", "gate_proj"], RECORDED_BFLOAT16)],
    ids=["images", "recorded features"],
)
def test_adapters_are_cloned_and_reinforced_and_their_base_stays(
    job: Callable[[str], Job], targets: list[str], changes: dict[str, Any]
) -> None:
    adapters = {"rank": 2, "alpha": 4.0, "targets": targets}
    params = with_policy(
        policy={"lora": adapters, **changes},
        sft={"steps": 4},
        rloo={"kl": {"coef": 0.1}},
        machine={"gradient_checkpointing": True, "checkpoint_every": {"sft_steps": 2}},
    )
    precheck.check_policy(params)
    collect.run(job("collect"), seed=0, env=params.env, states=params.states, collect=params.collect)
    dataset.run(job("dataset"), seed=0, dataset=params.dataset)
    sft.run(replace(job("sft"), machine=params.machine), seed=0, policy=params.policy, sft=params.sft)
    cloned = policies.load(paths.SFT_POLICY)
    with closing(HalfSolved(params.env)) as pool:
        playing = replace(job("rloo"), pool=lambda env: pool, machine=params.machine)
        rloo.run(playing, seed=0, env=params.env, states=params.states, rloo=params.rloo)
    last = checkpoint.newest(playing.state)
    assert last is not None
    kept = {name.removeprefix("policy.weights.") for name in last.tensors if name.startswith("policy.weights.")}
    assert kept == set(cloned.state_dict()) - cloned.frozen
    start = cloned.state_dict()
    learned = {name for name in kept if not torch.equal(last.tensors[f"policy.weights.{name}"], start[name])}
    assert {name for name in kept if "lora_" in name} <= learned
    handed_on = policies.load(paths.RLOO_POLICY).state_dict()
    assert all(torch.equal(handed_on[name], start[name]) for name in cloned.frozen)
    assert (paths.RLOO_POLICY / "adapter" / "adapter_model.safetensors").exists()
