"""Published pi0 weights: read tensor by tensor, and refused by name and shape where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nightshift.errors import DataError
from nightshift.policies.pi0.checkpoint import Pi0Checkpoint, published_name
from nightshift.policies.pi0.network import NetworkSpec, Pi0Network
from tests.policies.pi0 import tiny

PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
SPEC: NetworkSpec = {**tiny.SPEC, "siglip": {**tiny.SPEC["siglip"], "heads": 16}}
"""The published tower has 16 heads at any width."""
EMBEDDING = f"{PALIGEMMA}model.language_model.embed_tokens.weight"
POSITIONS = f"{PALIGEMMA}model.vision_tower.vision_model.embeddings.position_embedding.weight"
GATE = f"{PALIGEMMA}model.language_model.layers.0.mlp.gate_proj.weight"
KEYS = f"{EXPERT}model.layers.0.self_attn.k_proj.weight"
Weights = dict[str, Tensor]


def weights(spec: NetworkSpec = SPEC) -> Weights:
    """With what published files have and nothing reads: the rest of the last layer, a norm, output layers."""
    torch.manual_seed(0)
    found = {published_name(name): tensor for name, tensor in Pi0Network(spec).state_dict().items()}
    width, last = SPEC["gemma"]["width"], f"{PALIGEMMA}model.language_model.layers.{SPEC['depth'] - 1}."
    return {
        **found,
        f"{last}self_attn.q_proj.weight": torch.zeros(32, width),
        f"{last}mlp.up_proj.weight": torch.zeros(64, width),
        f"{PALIGEMMA}model.language_model.norm.weight": torch.zeros(width),
        f"{PALIGEMMA}lm_head.weight": found[EMBEDDING].clone(),
        f"{EXPERT}lm_head.weight": torch.zeros(64, 24),
    }


def write(folder: Path, tensors: Weights, shards: int = 2) -> Path:
    folder.mkdir()
    names = sorted(tensors)
    placed = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: tensors[name].contiguous() for name in names if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def load(folder: Path) -> Pi0Network:
    checkpoint = Pi0Checkpoint.open(folder)
    with torch.device("meta"):
        network = Pi0Network(checkpoint.network_spec(horizon=SPEC["horizon"]))
    checkpoint.check(network)
    checkpoint.load(network, torch.float32)
    return network


def test_the_names_are_those_of_openpi() -> None:
    assert published_name("vision_tower.encoder.layers.1.self_attn.out_proj.bias") == (
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers.1.self_attn.out_proj.bias"
    )
    assert published_name("projector.weight") == f"{PALIGEMMA}model.multi_modal_projector.linear.weight"
    assert published_name("expert.layers.0.mlp.up_proj.weight") == f"{EXPERT}model.layers.0.mlp.up_proj.weight"
    assert published_name("action_time_mlp_in.weight") == "action_time_mlp_in.weight"


def test_sizes_and_weights_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "pi0", weights())
    assert Pi0Checkpoint.open(folder).network_spec(horizon=SPEC["horizon"]) == SPEC
    for name, tensor in load(folder).state_dict().items():
        assert torch.equal(tensor, weights()[published_name(name)])


def test_weights_of_pi05_are_recognised_by_their_time_mlp(tmp_path: Path) -> None:
    spec: NetworkSpec = {**SPEC, "state_dim": 0, "adaptive_norms": True}
    folder = write(tmp_path / "pi05", weights(spec))
    assert Pi0Checkpoint.open(folder).network_spec(horizon=SPEC["horizon"]) == spec
    network = load(folder)
    name = "expert.layers.1.post_attention_layernorm.dense.weight"
    assert torch.equal(network.state_dict()[name], weights(spec)[f"{EXPERT}model.{name.removeprefix('expert.')}"])


def test_an_embedding_that_is_saved_as_output_layer_alone_is_found(tmp_path: Path) -> None:
    tied = {name: tensor for name, tensor in weights().items() if name != EMBEDDING}
    network = load(write(tmp_path / "pi0", tied))
    assert torch.equal(network.language_model.embed_tokens.weight, weights()[EMBEDDING])


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda found: {key: tensor for key, tensor in found.items() if key != name}


def as_integers(name: str) -> Callable[[Weights], Weights]:
    return lambda found: {**found, name: found[name].to(torch.int8)}


def with_tensor(name: str, *shape: int) -> Callable[[Weights], Weights]:
    return lambda found: {**found, name: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("action_out_proj.bias"), r"has no action_out_proj\.bias"),
        (without("state_proj.weight"), r"has no state_proj\.weight"),
        (with_tensor(f"{EXPERT}model.norm.weight", 23), r"norm\.weight has shape \[23\] in .*, and \[24\] is expected"),
        (with_tensor("projector.fc3.weight", 4, 4), r"has projector\.fc3\.weight, which pi0 does not have"),
        (
            with_tensor("time_mlp_in.weight", 24, 24),
            r"has no .*input_layernorm\.dense\.weight|has no time_mlp_in\.bias",
        ),
        (with_tensor(POSITIONS, 4), r"position_embedding\.weight has shape \[4\] in the checkpoint, and 2 dimensions"),
        (
            with_tensor(POSITIONS, 4, 33),
            r"position_embedding\.weight has width 33 .*, and a multiple of 16 is expected",
        ),
        (with_tensor(EMBEDDING, 64), r"embed_tokens\.weight has shape \[64\] in the checkpoint, and 2 dimensions"),
        (with_tensor("action_in_proj.weight", 24), r"action_in_proj\.weight has shape \[24\] in .*, and 2 dimensions"),
        (with_tensor("state_proj.weight", 24), r"state_proj\.weight has shape \[24\] in .*, and 2 dimensions"),
        (with_tensor(GATE, 64), r"gate_proj\.weight has shape \[64\] in .*, and 2 dimensions"),
        (with_tensor(KEYS, 0, 24), r"k_proj\.weight has shape \[0, 24\] in .*, and 2 dimensions, none of them 0, are"),
        (with_tensor(KEYS, 7, 24), r"k_proj\.weight has width 7 .*, and a multiple of 2 is expected"),
        (as_integers("action_out_proj.weight"), r"action_out_proj\.weight in .*\.safetensors is of type I8"),
        (with_tensor(f"{EXPERT}model.layers.3.mlp.up_proj.weight", 56, 24), r"has no .*layers\.2\.self_attn\.o_proj"),
    ],
)
def test_weights_of_another_network_are_refused_by_name(
    tmp_path: Path, change: Callable[[Weights], Weights], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        load(write(tmp_path / "pi0", change(weights())))


def test_a_missing_and_a_truncated_shard_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "pi0", weights())
    shard = folder / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DataError, match="is truncated or damaged"):
        Pi0Checkpoint.open(folder)
    shard.unlink()
    with pytest.raises(DataError, match="is missing"):
        Pi0Checkpoint.open(folder)


def test_at_full_size_it_has_the_published_number_of_weights() -> None:
    """Of the last layer of the language model only what is read: Gemma 2B less the rest of that layer, and its norm."""
    with torch.device("meta"):
        network = Pi0Network(
            {
                "image_size": 224,
                "siglip": {"width": 1152, "mlp": 4304, "depth": 27, "heads": 16},
                "gemma": {"width": 2048, "mlp": 16384},
                "expert": {"width": 1024, "mlp": 4096},
                "attention": {"heads": 8, "key_value_heads": 1, "head_width": 256},
                "depth": 18,
                "vocabulary": 257152,
                "state_dim": 32,
                "action_dim": 32,
                "horizon": 50,
                "adaptive_norms": False,
            }
        )
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    rest_of_last = 2 * 2048 * 2048 + 3 * 2048 * 16384 + 2048
    assert count["language_model"] == 2_506_172_416 + (257152 - 256000) * 2048 - rest_of_last - 2048
    assert count["vision_tower"] == 412_442_352
    assert round(count["expert"] / 1e6) == 311
