"""What is computed here and by other libraries (oracles.py): networks with weights of the recipe, and their inputs."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nightshift.policies import lora
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.openvla_oft.vit import TowerSpec, VisionTransformer
from tests.policies import examples, recipe

LLAMA = list(product(["bidirectional", "causal"], [False, True]))
"""Masks, and whether there is padding."""
LORA: lora.LoraSpec = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "qkv", "fc1"]}
ADAPTED_NETWORK: Any = {**examples.NETWORK, "action_head": "tokens"}
TOWERS: dict[str, TowerSpec] = {
    "vit_large_patch14_reg4_dinov2": {
        "width": 1024,
        "mlp": 4096,
        "depth": 2,
        "heads": 16,
        "registers": 4,
        "layer_scale": True,
    },
    "vit_so400m_patch14_siglip_224": {
        "width": 1152,
        "mlp": 4304,
        "depth": 2,
        "heads": 16,
        "registers": -1,
        "layer_scale": False,
    },
}
"""By timm's names: the published towers but for their depth."""
WHOLE = {"vit_large_patch14_reg4_dinov2": 23, "vit_so400m_patch14_siglip_224": 26}
"""Blocks of the published towers, without the last, which nothing reads."""
EVERY = 16
"""One of so many patches is kept of the features of an image."""
TEXTS = ["lift the cube", "put the  bowl on the stove", "Öffne die Schublade 你好", "a\nb", "in: what action?"]


class LlamaInputs(NamedTuple):
    embeddings: Tensor
    real: Tensor
    positions: Tensor
    mask: Tensor


def llama(attention: str, *, padded: bool) -> LlamaInputs:
    """Padding in the middle of the first row takes no positions."""
    real = torch.ones(2, 20, dtype=torch.bool)
    real[0, 5:9] = not padded
    mask = real[:, None, None] & (torch.ones(20, 20, dtype=torch.bool).tril() | (attention == "bidirectional"))
    return LlamaInputs(recipe.drawn("embeddings", 2, 20, 64), real, (real.cumsum(1) - 1).clamp(min=0), mask)


def llama_name(attention: str, *, padded: bool) -> str:
    return f"{attention}_{'padded' if padded else 'whole'}"


def tower(name: str, depth: int) -> VisionTransformer:
    made = VisionTransformer({**TOWERS[name], "depth": depth}, image_size=224)
    recipe.fill(made)
    return made.requires_grad_(False)


def pixels() -> Tensor:
    return recipe.drawn("pixels", 1, 3, 224, 224)


def adapted() -> OpenVlaOft:
    """With an adapter that changes something: a fresh one does not."""
    policy = OpenVlaOft(**{**examples.OPENVLA_OFT, "network": ADAPTED_NETWORK, "lora": LORA})
    recipe.fill(policy.network)
    return policy


def adapted_weights(policy: OpenVlaOft) -> dict[str, Tensor]:
    """Merged, by the names of the layers' own."""
    return {f"{path}.weight": layer.merged().detach() for path, layer in lora.adapters(policy.network)}


def adapter_files(folder: Path) -> dict[str, Any]:
    """What a merge reads of a saved adapter: settings, and the shape of every tensor."""
    settings = json.loads((folder / lora.CONFIG).read_text())
    settings = {name: settings[name] for name in ("peft_type", "r", "lora_alpha", "target_modules", "bias")}
    shapes = {name: list(tensor.shape) for name, tensor in sorted(load_file(folder / lora.WEIGHTS).items())}
    return {"settings": settings, "shapes": shapes}


def linear_and_convolution() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Conv2d(3, 4, 2, bias=False))
    recipe.fill(made)
    return made
