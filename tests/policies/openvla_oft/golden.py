"""The tiny random model of the golden files, built from their recipe (goldens/README.md)."""

from __future__ import annotations

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nightshift.policies.openvla_oft.network import (
    FIRST_ACTION_TOKEN,
    LM_HEAD,
    PAD,
    NetworkSpec,
    OpenVlaOftNetwork,
)

FOLDER = Path(__file__).parent / "goldens"
TOLERANCE = 5e-5
SAMPLES = 3


@cache
def arrays(name: str = "openvla_oft_tiny") -> dict[str, Any]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


@cache
def recipe() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "openvla_oft_tiny.json").read_text())
    return loaded


def tensor(name: str) -> Tensor:
    return torch.from_numpy(arrays()[name])


@cache
def published_weights() -> dict[str, Tensor]:
    """By their published names, with those that nothing reads and all rows of the output layer."""
    shapes = recipe()["parameters"]
    return {name: torch.from_numpy(_weight(name, tuple(shape))) for name, shape in shapes.items()}


def _weight(name: str, shape: tuple[int, ...]) -> Any:
    drawn = _random(zlib.crc32(name.encode()), shape)
    if "norm" in name and name.endswith("weight"):
        return 1 + np.float32(0.2) * drawn
    plain = len(shape) >= 2 and "embed_tokens" not in name and "lm_head" not in name
    return np.float32(0.08 if plain else 0.3) * drawn


def _random(stream: int, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng([recipe()["seed"], stream]).standard_normal(shape).astype(np.float32)


def pixels() -> Tensor:
    return torch.from_numpy(_random(8, (SAMPLES, 6, 224, 224)))


def pixels_of_two_images() -> Tensor:
    return torch.from_numpy(_random(9, (1, 12, 224, 224)))


def prompt(sample: int) -> Tensor:
    """[1, L] after BOS, without padding."""
    return tensor(f"ids_{sample}")[None, 1:]


def prompts(length: int = 15) -> Tensor:
    """Of all samples, padded to a length."""
    rows = torch.full((SAMPLES, length), PAD)
    for sample in range(SAMPLES):
        row = prompt(sample)[0]
        rows[sample, length - len(row) :] = row
    return rows


def spec(**changes: Any) -> NetworkSpec:
    text = recipe()["text_config"]
    found: dict[str, Any] = {
        "image_size": 224,
        "dinov2": {"width": 48, "mlp": 192, "depth": 3, "heads": 4, "registers": 4, "layer_scale": True},
        "siglip": {"width": 72, "mlp": 269, "depth": 4, "heads": 4, "registers": -1, "layer_scale": False},
        "llama": {
            "width": text["hidden_size"],
            "mlp": text["intermediate_size"],
            "depth": text["num_hidden_layers"],
            "heads": text["num_attention_heads"],
            "vocabulary": text["vocab_size"],
        },
        "proprio": 0,
        "action_head": "tokens",
        "chunk": 8,
        "action_dim": 7,
        "attention": "bidirectional",
        "stop_token": True,
        "dtype": "float32",
        **changes,
    }
    return cast(NetworkSpec, found)


def network(**changes: Any) -> OpenVlaOftNetwork:
    built = OpenVlaOftNetwork(spec(**changes))
    weights = dict(published_weights())
    weights[LM_HEAD] = weights[LM_HEAD][FIRST_ACTION_TOKEN:PAD]
    built.load_state_dict({name: weights[name] for name in built.state_dict()})
    return built.requires_grad_(False)


def logits(built: OpenVlaOftNetwork, images: Tensor, tokens: Tensor) -> Tensor:
    """[B, 56, 256]."""
    return built.decode(built(built.see(images), tokens)).flatten(1, 2)
