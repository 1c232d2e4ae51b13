"""A tiny random checkpoint in the published layout: random weights, in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nightshift.policies.checkpoint_files import INDEX
from nightshift.policies.openvla_oft.network import LM_HEAD, NetworkSpec, OpenVlaOftNetwork
from tests.policies.openvla_oft import golden

PIXELS = [
    {"mean": [0.484375, 0.455078125, 0.40625], "std": [0.228515625, 0.2236328125, 0.224609375]},
    {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
]
CONFIG: dict[str, Any] = {
    "architectures": ["OpenVLAForActionPrediction"],
    "model_type": "openvla",
    "text_config": {"num_attention_heads": 4, "vocab_size": 32064, "pad_token_id": 32000},
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
}


def tokenizer_json() -> dict[str, Any]:
    """Single characters, bytes and a few words, with Llama 2's id of the space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return {
        "model": {
            "type": "BPE",
            "vocab": {**vocabulary, "\u2581": 29871, "th": 400, "the": 401},
            "merges": ["t h", "th e"],
        }
    }


def spec(**changes: Any) -> NetworkSpec:
    """Of the network in the checkpoint. The published towers have 16 heads at any width."""
    towers = {"depth": 2, "mlp": 40, "heads": 16}
    dinov2 = {"width": 32, "registers": 4, "layer_scale": True, **towers}
    siglip = {"width": 48, "registers": -1, "layer_scale": False, **towers}
    llama = {"width": 64, "mlp": 96, "depth": 2, "heads": 4, "vocabulary": 32064}
    return golden.spec(**{"dinov2": dinov2, "siglip": siglip, "llama": llama, **changes})


@cache
def weights() -> dict[str, Tensor]:
    """Of safetensors files: a block more in each tower, a norm, pooling, and all rows of the output layer."""
    torch.manual_seed(0)
    found = OpenVlaOftNetwork(
        spec(dinov2={**spec()["dinov2"], "depth": 3}, siglip={**spec()["siglip"], "depth": 3})
    ).state_dict()
    for name, width in (("featurizer", 32), ("fused_featurizer", 48)):
        found[f"vision_backbone.{name}.norm.weight"] = torch.ones(width)
        found[f"vision_backbone.{name}.norm.bias"] = torch.zeros(width)
    found["vision_backbone.fused_featurizer.attn_pool.latent"] = torch.zeros(1, 1, 48)
    found[LM_HEAD] = torch.randn(32064, 64)
    return found


def parts() -> dict[str, dict[str, Tensor]]:
    """Modules that have a file of their own."""
    torch.manual_seed(1)
    built = OpenVlaOftNetwork(spec(proprio=8, action_head="l1"))
    return {"proprio_projector": built.proprio_projector.state_dict(), "action_head": built.action_head.state_dict()}


def statistics() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(golden.recipe()["norm_stats"]))
    found["libero_x_no_noops"]["proprio"] = {"q01": [-1.0] * 8, "q99": [1.0] * 8}
    return found


def write(
    folder: Path, tensors: Mapping[str, Tensor] | None = None, *, shards: int = 3, own_files: Sequence[str] = ()
) -> Path:
    """The folder, with everything that the published ones have; `own_files` names the parts that it has."""
    tensors = weights() if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    placed = {name: names[number % shards] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name].contiguous() for name in tensors if placed[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    for part in own_files:
        own = {f"module.{name}": tensor for name, tensor in parts()[part].items()}
        torch.save(own, folder / f"{part}--150000_checkpoint.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps({"tvf_normalize_params": PIXELS}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "dataset_statistics.json").write_text(json.dumps(statistics()))
    return folder
