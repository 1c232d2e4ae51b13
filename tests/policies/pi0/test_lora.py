"""LoRA of pi0: which layers have adapters, what they change, and what of them is saved and kept for the KL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nightshift import config, policies
from nightshift.algorithms.reference import Reference
from nightshift.algorithms.sft import DemoBatch, SftOptimizer
from nightshift.algorithms.strategy import SingleProcess
from nightshift.errors import ConfigError
from nightshift.policies import lora
from nightshift.policies.base import Inputs
from nightshift.policies.pi0.policy import Pi0
from nightshift.policies.published import VISION_FEATURES
from tests.policies import examples

ROWS = 4
LORA: lora.LoraSpec = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj", "down_proj", "action_out_proj"]}
SFT = config.Sft.model_validate({"steps": 10, "batch_size": ROWS, "learning_rate": 1e-2, "warmup_steps": 0})
EVERYWHERE = {"vision_tower", "language_model", "expert", "action_out_proj"}


def make(**changes: Any) -> Pi0:
    """A fresh adapter, and seeded weights everywhere."""
    torch.manual_seed(0)
    policy = Pi0(**{**examples.PI0, **examples.FLOW["sde"], "lora": LORA, **changes})
    for name, parameter in policy.named_parameters():
        if not parameter.any() and "lora_" not in name:
            nn.init.normal_(parameter, std=0.1)
    return policy


def adapted(**changes: Any) -> Pi0:
    """With an adapter that changes something: a fresh one does not."""
    policy = make(**changes)
    for _, layer in lora.adapters(policy.network):
        nn.init.normal_(layer.lora_B, std=0.1)
    return policy


def parts_of(policy: Pi0) -> set[str]:
    """The parts of the network that have adapters."""
    return {path.partition(".")[0] for path, _ in lora.adapters(policy.network)}


def decided(policy: Pi0) -> tuple[Inputs, Tensor]:
    inputs = policy.inputs(examples.observe(ROWS))
    with torch.no_grad():
        actions, _, latents = policy.decide(inputs, examples.generators(ROWS), 1.0)
    return {**inputs, **latents}, actions


def train(policy: Pi0) -> None:
    optimizer = SftOptimizer(policy, SFT, microbatch_size=3)
    mask = torch.ones(ROWS, policy.horizon, dtype=torch.bool)
    actions = examples.demo_actions(ROWS, horizon=policy.horizon)
    for step in range(2):
        batch = DemoBatch(policy.inputs(examples.observe(ROWS)), actions, mask)
        optimizer.update(batch, torch.Generator().manual_seed(step))


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [
        ("expert", {"expert", "action_out_proj"}),
        ("language_model", EVERYWHERE - {"vision_tower"}),
        ("all", EVERYWHERE),
    ],
)
def test_adapters_alone_are_trained_and_only_in_the_parts_that_train_names(chosen: str, parts: set[str]) -> None:
    policy = adapted(train=chosen)
    assert parts_of(policy) == parts
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    train(policy)
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert changed.isdisjoint(policy.frozen)
    assert policy.frozen == {name for name, _ in policy.named_parameters() if "lora_" not in name}


@pytest.mark.parametrize("chosen", ["expert", "language_model", "all"])
def test_without_adapters_training_changes_the_parts_that_train_names(chosen: str) -> None:
    policy = make(train=chosen, lora=None)
    frozen = {name.split(".")[1] for name in policy.frozen}
    assert (
        frozen
        == {
            "expert": {"vision_tower", "projector", "language_model"},
            "language_model": {"vision_tower"},
            "all": set(),
        }[chosen]
    )


def test_a_fresh_adapter_changes_nothing() -> None:
    plain = make(lora=None)
    expected = plain.act(examples.observe(ROWS))
    fresh = make()
    fresh.load_state_dict(plain.state_dict(), strict=False)
    assert np.array_equal(fresh.act(examples.observe(ROWS)), expected)


def test_a_policy_with_merged_weights_has_the_same_log_probs() -> None:
    policy = adapted()
    inputs, actions = decided(policy)
    plain = make(lora=None)
    merged = {f"network.{path}.weight": layer.merged() for path, layer in lora.adapters(policy.network)}
    own = {name: tensor for name, tensor in policy.state_dict().items() if "lora_" not in name}
    plain.load_state_dict(own)
    with torch.no_grad():
        expected, base = policy.log_prob(inputs, actions, 1.0), plain.log_prob(inputs, actions, 1.0)
        plain.load_state_dict({**own, **merged})
        found = plain.log_prob(inputs, actions, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(base, expected, atol=1e-2)


def test_the_reference_of_the_kl_shares_the_base_and_copies_adapters_alone() -> None:
    """With a fresh adapter it is the published policy."""
    policy, published = make(), make(lora=None)
    policy.load_state_dict(published.state_dict(), strict=False)
    inputs, actions = decided(policy)
    with torch.no_grad():
        expected = published.log_prob(inputs, actions, 1.0)
    reference = Reference(policy, SingleProcess())
    train(policy)
    with torch.no_grad():
        assert not torch.allclose(policy.log_prob(inputs, actions, 1.0), expected)
    assert torch.equal(reference.log_prob(inputs, actions, 1.0), expected)
    copied = sum(tensor.numel() for tensor in reference._start)
    assert copied == sum(p.numel() for name, p in policy.named_parameters() if "lora_" in name)


def test_a_saved_policy_is_the_same_and_has_the_adapter_beside_it_under_published_names(tmp_path: Path) -> None:
    policy = adapted()
    policies.save(policy, tmp_path)
    assert np.array_equal(policies.load(tmp_path).act(examples.observe(3)), policy.act(examples.observe(3)))
    settings = json.loads((tmp_path / "adapter" / lora.CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (2, 4.0, sorted(LORA["targets"]))
    saved = load_file(tmp_path / "adapter" / lora.WEIGHTS)
    name = "base_model.model.paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(saved[name], policy.state_dict()["network.expert.layers.0.self_attn.q_proj.lora_A"])
    assert "base_model.model.action_out_proj.lora_B.weight" in saved


def test_peft_is_told_the_published_name_of_a_layer_that_has_another_one_here(tmp_path: Path) -> None:
    policies.save(adapted(train="language_model", lora={**LORA, "targets": ["projector"]}), tmp_path)
    settings = json.loads((tmp_path / "adapter" / lora.CONFIG).read_text())
    saved = load_file(tmp_path / "adapter" / lora.WEIGHTS)
    assert all(name.split(".")[-3] in settings["target_modules"] for name in saved)
    assert any(name.endswith("multi_modal_projector.linear.lora_A.weight") for name in saved)


@pytest.mark.parametrize(("chosen", "target"), [("all", "qkv"), ("expert", "out_proj"), ("expert", "projector")])
def test_a_target_that_no_trained_part_has_is_refused_by_name(chosen: str, target: str) -> None:
    with pytest.raises(ConfigError, match=f"policy.lora.targets has {target}, and") as refused:
        make(train=chosen, lora={**LORA, "targets": ["q_proj", target]})
    known = refused.value.next_step.removeprefix("choose from ").split(", ")
    assert "q_proj" in known and target not in known


def test_adapters_of_gemma_and_the_expert_leave_vision_features_to_be_reused() -> None:
    policy = adapted(train="language_model", reuse_vision_features=True)
    inputs, _ = decided(policy)
    assert VISION_FEATURES in inputs
    with pytest.raises(ConfigError, match="training changes the vision encoder"):
        adapted(train="all", reuse_vision_features=True)
