"""A budget of tokens per backward pass: as many decisions as it has room for, and the update of one by count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nightshift.algorithms.on_policy import Iteration
from nightshift.algorithms.strategy import SingleProcess
from nightshift.errors import ConfigError, DeviceError
from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.learners.local import Rank
from nightshift.policies.base import Policy
from nightshift.policies.blocks import decisions_within
from nightshift.types import INSTRUCTION
from tests.learners import test_cloning, test_fsdp
from tests.policies import examples
from tests.rollouts.parts import run_out_of_memory

dataset = test_cloning.dataset
FEW, MANY = 2, 1000
"""Decisions per pass."""


def first_blocks(policy: Any) -> list[nn.Module]:
    """Their tokens together are those of a decision."""
    if policy.family == "openvla-oft":
        return [policy.network.language_model.model.layers[0]]
    if policy.family == "pi0":
        return [policy.network.language_model.layers[0], policy.network.expert.layers[0]]
    return [policy.blocks[0], policy.expert[0]] if policy.family == "flow" else [policy.blocks[0]]


@pytest.mark.parametrize("family", ["vla", "flow sde", "openvla-oft tokens", "openvla-oft l1", "pi0 sde"])
def test_the_tokens_of_a_decision_are_those_that_the_blocks_compute(family: str) -> None:
    policy = examples.make_policy(family)
    seen: list[int] = []
    for block in first_blocks(policy):
        block.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[1]))
    inputs = dict(examples.cloning_inputs(policy, 3))
    inputs[INSTRUCTION] = torch.full_like(inputs[INSTRUCTION], 5)  # the longest: padding may be left out
    policy.bc_loss(inputs, examples.demo_actions(3, horizon=policy.horizon), torch.ones(3, policy.horizon).bool())
    assert sum(seen) == policy.tokens_per_decision


@pytest.mark.parametrize("family", ["flow sde", "flow noise", "pi0 sde", "pi0 noise"])
def test_reinforcing_computes_the_actions_of_a_decision_once_for_every_step_with_a_log_prob(family: str) -> None:
    """All of them are kept for the backward pass."""
    policy = examples.make_policy(family)
    seen: list[int] = []
    inputs = dict(policy.inputs(examples.observe(3)))
    inputs[INSTRUCTION] = torch.full_like(inputs[INSTRUCTION], 5)
    decision = policy.decide(inputs, examples.generators(3), 1.0)
    for block in first_blocks(policy):
        block.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[1]))
    policy.evaluate_actions({**inputs, **decision.latents}, decision.actions, 1.0)
    assert sum(seen) == policy.tokens_per_decision


def budget(policy: Policy, decisions: int) -> int:
    """With room for so many, and not quite for one more."""
    return (decisions + 1) * policy.tokens_per_decision - 1


def learned(spec: LearnerSpec[Any], work: Any) -> tuple[LearnerState, int]:
    rank = Rank(spec, SingleProcess())
    rank.update(work)
    return rank.state(), rank.microbatches


def assert_budget_replaces_count(spec: LearnerSpec[Any], policy: Policy, work: Any) -> None:
    expected, passes = learned(replace(spec, microbatch_size=FEW), work)
    by_tokens = replace(spec, microbatch_size=MANY, microbatch_tokens=budget(policy, FEW))
    found, counted = learned(by_tokens, work)
    assert counted == passes > learned(replace(spec, microbatch_size=MANY), work)[1]
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.mark.parametrize("family", ["vla", "openvla-oft tokens"])
def test_cloning_by_tokens_makes_the_steps_of_cloning_by_count(family: str, dataset: Path) -> None:
    policy = examples.make_policy(family)
    assert_budget_replaces_count(test_cloning.make_spec(family, dataset), policy, test_cloning.FIRST)


@pytest.mark.parametrize("family", ["flow sde", "openvla-oft tokens"])
def test_reinforcing_by_tokens_makes_the_update_of_reinforcing_by_count(family: str) -> None:
    policy = examples.make_policy(family)
    spec = replace(test_fsdp.make_spec(policy), strategy="data_parallel")
    assert_budget_replaces_count(spec, policy, Iteration(test_fsdp.groups(policy), 0.0))


def test_a_policy_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"microbatch_tokens is 4096, and the policy family gaussian_mlp has no tok"):
        decisions_within(examples.make("gaussian_mlp"), 4096)


def test_a_budget_below_one_decision_is_refused_with_what_one_takes() -> None:
    policy = examples.make_policy("vla")
    needed = policy.tokens_per_decision
    assert decisions_within(policy, needed) == 1
    with pytest.raises(ConfigError, match=rf"is {needed - 1}, and one decision of the policy has {needed} tokens"):
        decisions_within(policy, needed - 1)


@pytest.mark.parametrize(("tokens", "setting"), [(None, "microbatch_size"), (4096, "microbatch_tokens")])
def test_where_memory_runs_out_the_setting_that_counts_is_named(
    tokens: int | None, setting: str, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(test_cloning.make_spec("vla", dataset, microbatch_tokens=tokens), SingleProcess())
    monkeypatch.setattr(type(examples.make_policy("vla")), "bc_loss", run_out_of_memory)
    with pytest.raises(DeviceError, match=rf"lower machine\.{setting} in params\.yaml"):
        rank.update(test_cloning.FIRST)
