"""LoRA: what an adapter computes, which weights it trains, and what of a policy is saved, sent and kept for the KL."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from nightshift.policies import lora, snapshot
from nightshift.policies.base import Policy
from nightshift.policies.openvla_oft.lora import Adapter
from nightshift.policies.openvla_oft.network import OpenVlaOftNetwork
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.pi0.policy import Pi0
from nightshift.policies.published import PublishedPolicy
from tests.policies import cases, examples, goldens

CPU = torch.device("cpu")
LORA = cases.LORA
SFT = config.Sft.model_validate({"steps": 10, "batch_size": 6, "learning_rate": 1e-2, "warmup_steps": 0})
LLAMA = {"width": 4096, "mlp": 11008, "depth": 32, "heads": 32, "vocabulary": 32064}
DINOV2, SIGLIP = cases.TOWERS.values()
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def network_spec(**changes: Any) -> Any:
    return {**examples.NETWORK, "action_head": "tokens", **changes}


def adapted(head: str = "tokens", *, seed: int = 0) -> OpenVlaOft:
    """With an adapter that changes something: a fresh one does not."""
    torch.manual_seed(seed)
    network: Any = {**examples.NETWORK, "action_head": head}
    policy = OpenVlaOft(**{**examples.OPENVLA_OFT, "network": network, "lora": LORA})
    policy.normalise_by(examples.STATISTICS)
    for _, layer in lora.adapters(policy.network):
        nn.init.normal_(layer.lora_B, std=0.1)
    return policy


def adapted_pi0() -> Pi0:
    torch.manual_seed(0)
    targets = {**LORA, "targets": ["q_proj", "v_proj", "down_proj", "action_out_proj"]}
    policy = Pi0(**{**examples.PI0, **examples.FLOW["sde"], "lora": targets})
    for parameter in policy.parameters():  # fresh ones are zero in places: nothing would be learned there
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return policy


@pytest.fixture(params=[adapted, adapted_pi0], ids=["openvla-oft", "pi0"])
def make(request: pytest.FixtureRequest) -> Callable[[], PublishedPolicy]:
    """Makes the same policy every time, with an adapter that is not fresh."""
    chosen: Callable[[], PublishedPolicy] = request.param
    return chosen


def batch(policy: Policy, count: int = 6) -> DemoBatch:
    mask = torch.ones(count, policy.horizon, dtype=torch.bool)
    actions = examples.demo_actions(count, horizon=policy.horizon)
    return DemoBatch(policy.inputs(examples.observe(count)), actions, mask)


def log_probs(policy: OpenVlaOft, of: DemoBatch) -> Tensor:
    with torch.no_grad():
        return policy.log_prob(of.inputs, of.actions, 1.0)


def train(policy: Policy, steps: int = 2) -> SftOptimizer:
    optimizer = SftOptimizer(policy, SFT, microbatch_size=3)
    for step in range(steps):
        optimizer.update(batch(policy), torch.Generator().manual_seed(step))
    return optimizer


def test_a_layer_with_an_adapter_computes_what_its_merged_weight_does() -> None:
    torch.manual_seed(0)
    layer = lora.LoraLinear(nn.Linear(12, 5), LORA)
    nn.init.normal_(layer.lora_B)
    inputs = torch.randn(7, 12)
    merged = torch.nn.functional.linear(inputs, layer.merged(), layer.bias)
    torch.testing.assert_close(layer(inputs), merged, rtol=0, atol=1e-5)
    assert not torch.allclose(merged, torch.nn.functional.linear(inputs, layer.weight, layer.bias))


def test_a_fresh_adapter_changes_nothing() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 5)
    inputs = torch.randn(7, 12)
    expected = layer(inputs)
    assert torch.equal(lora.LoraLinear(layer, LORA)(inputs), expected)


def test_the_adapter_of_a_bfloat16_layer_is_float32() -> None:
    layer = lora.LoraLinear(nn.Linear(12, 5).bfloat16(), LORA)
    assert layer.lora_A.dtype == layer.lora_B.dtype == torch.float32
    assert layer(torch.randn(3, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


def adapter_size(targets: list[str]) -> int:
    """Weights of adapters of rank 32 at the published size, with the last block of each tower."""
    towers = {"dinov2": {**DINOV2, "depth": 24}, "siglip": {**SIGLIP, "depth": 27}}
    with torch.device("meta"):
        network = OpenVlaOftNetwork(network_spec(llama=LLAMA, image_size=224, proprio=0, **towers))
        lora.adapt(network, {"rank": 32, "alpha": 16.0, "targets": targets})
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def test_llama_of_7b_has_as_many_adapter_weights_as_published() -> None:
    assert adapter_size(LLAMA_TARGETS) == 79_953_920


def test_all_linear_layers_of_7b_have_as_many_adapter_weights_as_openvla_prints() -> None:
    """peft's `all-linear` adapts the blocks that nothing reads as well, SigLIP's pooling, the convolutions that make
    patches and the output layer: these are counted by their shapes."""
    layers = [(32064, 4096), *((width, 3 * 14 * 14) for width in (1024, 1152))]
    layers += [(1152, 1152), (2 * 1152, 1152), (1152, 1152), (4304, 1152), (1152, 4304)]
    without = sum(32 * (outputs + inputs) for outputs, inputs in layers)
    everywhere = [*LLAMA_TARGETS, "qkv", "proj", "fc1", "fc2", "fc3"]
    assert adapter_size(everywhere) + without == 110_828_288


def test_a_layer_is_trained_whole_or_has_an_adapter_and_never_both() -> None:
    policy = adapted("l1")
    found = dict(lora.adapters(policy.network))
    assert "fc1" in LORA["targets"]
    assert any(path.startswith("vision_backbone.") and path.endswith(".fc1") for path in found)
    assert not any(path.startswith(("proprio_projector.", "action_head.")) for path in found)
    assert not any(layer.weight.requires_grad for layer in found.values())


def test_what_is_frozen_does_not_depend_on_who_plays_with_the_policy() -> None:
    policy = adapted()
    before = policy.frozen
    policy.requires_grad_(False)
    assert policy.frozen == before
    assert "network.proprio_projector.fc1.weight" not in before


@pytest.mark.parametrize("head", ["tokens", "l1"])
def test_training_changes_adapters_and_new_modules_alone(head: str) -> None:
    policy = adapted(head)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    train(policy)
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed.isdisjoint(policy.frozen)
    assert {name for name in before if "lora_" in name} <= changed
    assert any(name.startswith("network.action_head.") for name in changed) == (head == "l1")
    assert any(name.startswith("network.proprio_projector.") for name in changed)


def test_a_checkpoint_has_no_frozen_weight_and_resumes_bit_for_bit(make: Callable[[], PublishedPolicy]) -> None:
    whole = train(make(), steps=3)
    part = train(make(), steps=2)
    tensors = part.tensors()
    names = {name.removeprefix("policy.weights.") for name in tensors}
    assert names.isdisjoint(part.policy.frozen)
    resumed = SftOptimizer(make(), SFT, microbatch_size=3)
    resumed.resume(tensors, 2)
    resumed.update(batch(resumed.policy), torch.Generator().manual_seed(2))
    expected = whole.policy.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.policy.state_dict().items())


def test_another_version_of_a_policy_travels_without_its_frozen_weights(make: Callable[[], PublishedPolicy]) -> None:
    policy = make()
    first = snapshot.snapshot(policy)
    slot = snapshot.PolicySlot(CPU)
    held = slot.load(first)
    train(policy)
    second = snapshot.snapshot(policy, 1, first.frozen)
    assert set(second.weights).isdisjoint(policy.frozen)
    assert slot.load(second) is held
    trained = policy.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in held.state_dict().items())


def test_a_policy_of_another_base_is_built_anew() -> None:
    slot = snapshot.PolicySlot(CPU)
    held = slot.load(snapshot.snapshot(adapted()))
    other = adapted(seed=1)
    loaded = slot.load(snapshot.snapshot(other))
    assert loaded is not held
    expected = other.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_the_reference_of_the_kl_is_the_start_and_shares_the_frozen_weights() -> None:
    policy = adapted()
    of = batch(policy)
    expected = log_probs(policy, of)
    reference = Reference(policy, SingleProcess())
    train(policy)
    assert torch.equal(reference.log_prob(of.inputs, of.actions, 1.0), expected)
    assert not torch.allclose(log_probs(policy, of), expected)
    copied = sum(tensor.numel() for tensor in reference._start)
    assert copied == sum(p.numel() for p in policy.parameters() if p.requires_grad)


def test_the_reference_of_a_policy_without_frozen_weights_is_the_start_too() -> None:
    policy = examples.make("openvla-oft tokens")
    assert isinstance(policy, OpenVlaOft)
    of = batch(policy)
    expected = log_probs(policy, of)
    reference = Reference(policy, SingleProcess())
    train(policy)
    assert torch.equal(reference.log_prob(of.inputs, of.actions, 1.0), expected)


def test_a_saved_policy_is_the_same_and_has_the_adapter_beside_it(tmp_path: Path) -> None:
    policy = adapted()
    policies.save(policy, tmp_path)
    loaded = policies.load(tmp_path)
    assert np.array_equal(loaded.act(examples.observe(3)), policy.act(examples.observe(3)))
    settings = json.loads((tmp_path / "adapter" / lora.CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)


def test_the_adapter_beside_it_merges_as_a_published_one(tmp_path: Path) -> None:
    policy = adapted()
    policies.save(policy, tmp_path)
    weights = {name: tensor for name, tensor in policy.network.state_dict().items() if "lora_" not in name}
    adapter = Adapter.open(tmp_path / "adapter", {name: tuple(tensor.shape) for name, tensor in weights.items()})
    merged = {name: adapter.merged(name, tensor, None) for name, tensor in weights.items()}
    plain = OpenVlaOft(**{**examples.OPENVLA_OFT, "network": {**examples.NETWORK, "action_head": "tokens"}})
    others = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith("network.")}
    plain.load_state_dict({**others, **{f"network.{name}": tensor for name, tensor in merged.items()}})
    of = batch(policy)
    torch.testing.assert_close(log_probs(plain, of), log_probs(policy, of), rtol=0, atol=1e-5)


def test_a_merged_weight_is_that_which_peft_merges_from_the_saved_adapter(tmp_path: Path) -> None:
    policy = cases.adapted()
    policies.save(policy, tmp_path)
    assert cases.adapter_files(tmp_path / "adapter") == goldens.json("adapter_files"), "peft has read other files"
    for name, merged in cases.adapted_weights(policy).items():
        torch.testing.assert_close(merged, goldens.tensor("lora", f"ours.{name}"), rtol=0, atol=1e-6)
        assert (merged - policy.network.state_dict()[name]).abs().max() > 0.1


def test_saved_tensors_have_the_names_that_peft_gives_them(tmp_path: Path) -> None:
    policies.save(adapted(), tmp_path)
    names = set(load_file(tmp_path / "adapter" / lora.WEIGHTS))
    assert "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.vision_backbone.featurizer.blocks.0.attn.qkv.lora_B.weight" in names


@pytest.mark.parametrize("target", ["k_prj", "lm_head"])
def test_a_target_that_is_no_linear_layer_is_refused_by_name(target: str) -> None:
    network = OpenVlaOftNetwork(network_spec())
    with pytest.raises(ConfigError, match=target):
        lora.adapt(network, {"rank": 4, "alpha": 8.0, "targets": ["q_proj", target]})
