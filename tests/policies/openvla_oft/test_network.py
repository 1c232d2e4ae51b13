"""The network computes what the published code does, and the goldens would show if it did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nightshift.policies.openvla_oft import llama, vit
from nightshift.policies.openvla_oft.network import LM_HEAD, PAD, OpenVlaOftNetwork
from tests.policies import cases, goldens
from tests.policies.openvla_oft import golden

VISIBLE = 10 * golden.TOLERANCE


def error(built: OpenVlaOftNetwork, sample: int = 0) -> float:
    """The largest difference of a sample's logits from OpenVLA-OFT's."""
    found = golden.logits(built, golden.pixels()[sample : sample + 1], golden.prompt(sample))
    return float((found[0] - golden.tensor(f"oft_action_logits_{sample}")).abs().max())


def test_projected_patches_are_those_of_the_published_code() -> None:
    built = golden.network()
    patches = built.projector(built.vision_backbone(golden.pixels()[:1]))
    torch.testing.assert_close(patches[0], golden.tensor("projected_patches_0"), rtol=0, atol=golden.TOLERANCE)


@pytest.mark.parametrize("sample", range(golden.SAMPLES))
def test_hidden_states_and_logits_are_those_of_openvla_oft(sample: int) -> None:
    built = golden.network()
    hidden = built(built.see(golden.pixels()[sample : sample + 1]), golden.prompt(sample))
    torch.testing.assert_close(hidden[0], golden.tensor(f"oft_hidden_{sample}"), rtol=0, atol=golden.TOLERANCE)
    assert error(built, sample) < golden.TOLERANCE


@pytest.mark.parametrize("length", [12, 40])
def test_padded_prompts_in_one_batch_have_the_logits_that_they_have_alone(length: int) -> None:
    """SimpleVLA-RL's batched path; the greedy tokens are its own."""
    found = golden.logits(golden.network(), golden.pixels(), golden.prompts(length))
    expected = torch.stack([golden.tensor(f"oft_action_logits_{sample}") for sample in range(golden.SAMPLES)])
    torch.testing.assert_close(found, expected, rtol=0, atol=golden.TOLERANCE)
    assert torch.equal(found.argmax(-1) + PAD - 256, golden.tensor("simplevla_greedy_tokens"))


def test_without_a_stop_token_logits_are_those_of_rlinf() -> None:
    found = golden.logits(golden.network(stop_token=False), golden.pixels(), golden.prompts(15))
    torch.testing.assert_close(found, golden.tensor("rlinf_action_logits"), rtol=0, atol=1e-5)


def test_two_images_and_a_state_vector_have_the_published_hidden_states() -> None:
    built = golden.network(proprio=8)
    hidden = built(built.see(golden.pixels_of_two_images()), golden.prompt(0), torch.linspace(-1, 1, 8)[None])
    expected = golden.tensor("two_images_proprio_hidden")
    torch.testing.assert_close(hidden[0], expected, rtol=0, atol=golden.TOLERANCE)


def test_a_causal_mask_is_seen() -> None:
    assert error(golden.network(attention="causal")) > VISIBLE


def test_a_missing_stop_token_is_seen() -> None:
    assert error(golden.network(stop_token=False)) > VISIBLE


@pytest.mark.parametrize("tower", ["featurizer", "fused_featurizer"])
def test_swapped_queries_and_keys_of_a_tower_are_seen(tower: str) -> None:
    built = golden.network()
    attention = getattr(built.vision_backbone, tower).blocks[0].attn.qkv
    queries, keys, values = attention.weight.chunk(3)
    attention.weight.copy_(torch.cat([keys, queries, values]))
    assert error(built) > VISIBLE


def test_swapped_queries_and_keys_of_llama_are_seen() -> None:
    built = golden.network()
    attention: Any = built.language_model.model.layers[0].self_attn
    attention.q_proj, attention.k_proj = attention.k_proj, attention.q_proj
    assert error(built) > VISIBLE


def tanh_gelu(values: Tensor) -> Tensor:
    return functional.gelu(values, approximate="tanh")


@pytest.mark.parametrize("tower", ["featurizer", "fused_featurizer"])
def test_the_tanh_approximation_of_gelu_is_seen(tower: str) -> None:
    built = golden.network()
    for block in getattr(built.vision_backbone, tower).blocks:
        block.mlp.activation = tanh_gelu
    assert error(built) > golden.TOLERANCE


@pytest.mark.parametrize(
    "part",
    [
        lambda built: built.vision_backbone.featurizer.cls_token,
        lambda built: built.vision_backbone.featurizer.blocks[-1].ls2.scale_factor,
        lambda built: built.vision_backbone.fused_featurizer.blocks[-1].mlp.fc2.bias,
        lambda built: built.language_model.model.norm.weight,
    ],
)
def test_features_in_another_order_are_seen_in_every_part(part: Callable[[OpenVlaOftNetwork], Tensor]) -> None:
    built = golden.network()
    part(built).copy_(part(built).roll(1, dims=-1))
    assert error(built) > VISIBLE


def test_the_order_of_the_towers_is_seen() -> None:
    swapped = golden.pixels()[:1].roll(3, dims=1)
    found = golden.logits(golden.network(), swapped, golden.prompt(0))
    assert (found[0] - golden.tensor("oft_action_logits_0")).abs().max() > VISIBLE


def test_what_nothing_reads_is_not_built() -> None:
    published, built = golden.published_weights(), golden.network(proprio=8).state_dict()
    unused = {name for name in published if name not in built}
    assert {name.split(".")[2] + name.split(".")[3] for name in unused if "blocks" in name} == {"blocks3", "blocks4"}
    assert all("blocks" in name or "attn_pool" in name or "featurizer.norm" in name for name in unused)
    assert built[LM_HEAD].shape == (256, 64)


@pytest.mark.parametrize(("attention", "reaches"), [("bidirectional", True), ("causal", False)])
def test_a_causal_network_does_not_look_ahead(attention: str, reaches: bool) -> None:
    """The stop token is last: only where attention is bidirectional can it change an action."""
    built = golden.network(attention=attention)
    before = golden.logits(built, golden.pixels(), golden.prompts())
    built.language_model.model.embed_tokens.weight[2] += 1
    after = golden.logits(built, golden.pixels(), golden.prompts())
    assert ((after - before).abs().max() > VISIBLE) == reaches


def in_two_passes(built: OpenVlaOftNetwork, tokens: Tensor, tail: int) -> Tensor:
    """As RIPT-VLA computes it: keys and values of the prefix first, then all that comes after it."""
    model: Any = built.language_model.model
    count = tokens.shape[1] - tail - 1
    positions = torch.arange(tokens.shape[1])[None]
    whole, first = (llama._rotation(part, 16, tokens.dtype) for part in (positions, positions[:, :count]))
    prefix, rest = tokens[:, :count], tokens[:, count:]
    for layer in model.layers:
        rest = layer(torch.cat([prefix, rest], dim=1), whole, None)[:, count:]
        prefix = layer(prefix, first, None)
    hidden: Tensor = model.norm(rest)[:, :-2]
    return hidden


def test_with_a_prefix_of_its_own_hidden_states_are_those_of_two_passes() -> None:
    built, seen = golden.network(attention="prefix"), golden.pixels()[:1]
    given: list[Tensor] = []
    built.language_model.model.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    hidden = built(built.see(seen), golden.prompt(0))
    torch.testing.assert_close(hidden, in_two_passes(built, given[0], tail=57), rtol=0, atol=1e-5)
    assert (hidden[0] - golden.tensor("oft_hidden_0")).abs().max() > 0.05
    batched = built(built.see(golden.pixels()), golden.prompts(40))
    torch.testing.assert_close(batched[:1], hidden, rtol=0, atol=golden.TOLERANCE)


def test_a_published_size_has_the_published_number_of_parameters() -> None:
    """7541.2 million, less the last block of each tower with norm and pooling, and 31808 rows of the output layer."""
    dinov2: vit.TowerSpec = {"width": 1024, "mlp": 4096, "depth": 23, "heads": 16, "registers": 4, "layer_scale": True}
    siglip: vit.TowerSpec = {
        "width": 1152,
        "mlp": 4304,
        "depth": 26,
        "heads": 16,
        "registers": -1,
        "layer_scale": False,
    }
    llama = {"width": 4096, "mlp": 11008, "depth": 32, "heads": 32, "vocabulary": 32064}
    with torch.device("meta"):
        built = OpenVlaOftNetwork(golden.spec(dinov2=dinov2, siglip=siglip, llama=llama))

    def millions(module: torch.nn.Module) -> float:
        return round(sum(parameter.numel() for parameter in module.parameters()) / 1e6, 1)

    assert millions(built.vision_backbone.featurizer) == 290.6
    assert millions(built.vision_backbone.fused_featurizer) == 397.2
    assert millions(built.projector) == 71.4
    assert millions(built.language_model.model) == 6607.6


def llama_error(attention: str, *, padded: bool, golden_of: str | None = None) -> float:
    """The largest difference from the hidden states of transformers' Llama, with the mask of `golden_of`."""
    given = cases.llama(attention, padded=padded)
    found = golden.network().language_model.model(given.embeddings, given.positions, given.mask)
    expected = goldens.tensor("llama", cases.llama_name(golden_of or attention, padded=padded))
    return float((found - expected)[given.real].abs().max())


@pytest.mark.parametrize(("attention", "padded"), cases.LLAMA)
def test_llama_is_that_of_transformers(attention: str, padded: bool) -> None:
    assert llama_error(attention, padded=padded) < 5e-6


@pytest.mark.parametrize("padded", [False, True])
def test_another_mask_than_transformers_would_be_seen(padded: bool) -> None:
    assert llama_error("causal", padded=padded, golden_of="bidirectional") > VISIBLE


def other_rotary_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama, "_ROPE_BASE", 500_000.0)


def epsilon_of_llama_2(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama, "_EPS", 1e-5)


def gelu_for_silu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(functional, "silu", functional.gelu)


@pytest.mark.parametrize("wrong", [other_rotary_base, epsilon_of_llama_2, gelu_for_silu])
def test_another_llama_than_that_of_transformers_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    wrong(monkeypatch)
    assert llama_error("bidirectional", padded=False) > 2e-5


def tower_error(features: str, built: vit.VisionTransformer) -> float:
    """The largest difference from timm's features, relative to their standard deviation."""
    expected = goldens.tensor("towers", features)
    return float((built(cases.pixels())[:, :: cases.EVERY] - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", cases.TOWERS)
def test_a_tower_of_published_width_is_that_of_timm(name: str) -> None:
    """And another GELU would be seen. The tests above compare tiny ones, with the whole published code around them."""
    built: Any = cases.tower(name, cases.TOWERS[name]["depth"])
    assert tower_error(name, built) < 1e-5
    for block in built.blocks:
        block.mlp.activation = tanh_gelu
    assert tower_error(name, built) > 5e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "depth"), cases.WHOLE.items())
def test_a_published_tower_is_that_of_timm(name: str, depth: int) -> None:
    """To 5e-5 of the features' standard deviation: rounding adds up over so many blocks."""
    assert tower_error(f"{name}.whole", cases.tower(name, depth)) < 5e-5
