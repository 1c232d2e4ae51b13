"""A tiny policy of the family openvla-oft goes through the stages as any other does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from nightshift import config, policies
from nightshift.learners import checkpoint
from nightshift.pipeline import precheck
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.project import paths
from nightshift.rollouts.local import LocalPool
from nightshift.stages import collect, dataset, rloo, sft
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import small_params

TRANSFORMER = {"width": 16, "mlp": 32, "depth": 1, "heads": 2}
CHANGES: dict[str, Any] = {
    "env": {"cameras": {"names": ["agentview"], "size": 32, "shadows": True}},
    "policy": {
        "family": "openvla-oft",
        "inputs": ["agentview", "proprio", "instruction"],
        "variant": "simplevla-rl",
        "checkpoint": None,
        "size": {"image_size": 28, "dinov2": TRANSFORMER, "siglip": TRANSFORMER, "llama": TRANSFORMER},
        "max_tokens": 16,
        "chunk": 4,
        "dtype": "float32",
        "augmentation": {"crop": 2, "jitter": 0.1},
    },
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


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("head", ["tokens", "l1"])
def test_it_is_cloned_and_reinforced(job: Callable[[str], Job], head: str) -> None:
    chosen = config.merged(config.merged(small_params(), CHANGES), {"policy": {"head": head}})
    params = config.Params.model_validate(chosen)
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
