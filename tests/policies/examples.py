"""Small policies of every family, and observations for them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nightshift.policies.base import Inputs, Policy, with_loss_draws
from nightshift.policies.cnn import Cnn
from nightshift.policies.flow import Flow
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.heads import HeadPolicy
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.pi0.policy import Pi0
from nightshift.policies.vla import Vla
from nightshift.types import INSTRUCTION, Observation

SIZE = 32
CHUNK = 2
ACTION_DIM = 3
WORDS = 6
SHAPES: Mapping[str, tuple[int, ...]] = {
    "agentview": (SIZE, SIZE, 3),
    "wrist": (SIZE, SIZE, 3),
    "proprio": (4,),
    INSTRUCTION: (),
}
SEEING: dict[str, Any] = {
    "inputs": SHAPES,
    "max_words": WORDS,
    "augmentation": {"crop": 2, "jitter": 0.2},
    "chunk": CHUNK,
    "action_dim": ACTION_DIM,
}
VLA: dict[str, Any] = {**SEEING, "patch_size": 8, "width": 32, "depth": 1, "heads": 2}
FLOW: dict[str, dict[str, Any]] = {
    "sde": {"flow_sde": {"noise_level": 0.5}, "flow_noise": None},
    "noise": {"flow_sde": None, "flow_noise": {"min_std": 0.08, "max_std": 0.16, "log_prob": "sum"}},
}
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
PI0: dict[str, Any] = {
    "inputs": SHAPES,
    "network": {
        "image_size": 28,
        "siglip": {"width": 32, "mlp": 48, "depth": 1, "heads": 2},
        "gemma": {"width": 40, "mlp": 64},
        "expert": {"width": 24, "mlp": 56},
        "attention": {"heads": 4, "key_value_heads": 1, "head_width": 8},
        "depth": 2,
        "vocabulary": 300,
        "state_dim": 6,
        "action_dim": 5,
        "horizon": 4,
        "adaptive_norms": False,
    },
    "chunk": CHUNK,
    "action_dim": ACTION_DIM,
    "max_tokens": 40,
    "train": "all",
    "lora": None,
    "reuse_vision_features": False,
    "delta_actions": False,
    "actions": {"mean": [0.1, -0.3, 0.5], "std": [0.2, 0.7, 0.01]},
    "state": {"mean": [0.1, -0.2, 0.0, 0.3], "std": [1.0, 0.5, 2.0, 0.01]},
    "tokenizer": {"vocabulary": {piece: number for number, piece in enumerate(PIECES)}, "merges": []},
    "augmentation": {"crop": 2, "jitter": 0.2},
    "denoising_steps": 4,
}
STATISTICS = {
    "observations.proprio": {
        "mean": [0.1, -0.2, 0.0, 0.3],
        "std": [1.0, 0.5, 2.0, 0.0],
        "min": [-2.0, -1.0, -4.0, 0.3],
        "max": [2.0, 1.0, 4.0, 0.3],
    },
    "actions": {"mean": [0.1, -0.3, 0.5], "std": [0.2, 0.7, 0.0], "min": [-1.0, -2.0, 0.5], "max": [1.0, 1.0, 0.5]},
}
SEES = ("cnn", "vla", "vla bins", "flow sde", "flow noise", "openvla-oft tokens", "openvla-oft l1", "pi0 sde")
FAMILIES = ("gaussian_mlp", *SEES, "gaussian_mlp tanh_gaussian", "cnn tanh_gaussian")
"""And the head, where it is not Gaussian."""
TOWER = {"width": 16, "mlp": 32, "depth": 1, "heads": 2}
NETWORK: dict[str, Any] = {
    "image_size": 28,
    "dinov2": {**TOWER, "registers": 4, "layer_scale": True},
    "siglip": {**TOWER, "registers": -1, "layer_scale": False},
    "llama": {"width": 32, "mlp": 64, "depth": 2, "heads": 2, "vocabulary": 32064},
    "proprio": 4,
    "chunk": CHUNK,
    "action_dim": ACTION_DIM,
    "attention": "bidirectional",
    "stop_token": True,
    "dtype": "float32",
}
OPENVLA_OFT: dict[str, Any] = {
    "inputs": SHAPES,
    "images": "bicubic",
    "pixels": {"mean": [0.5] * 6, "std": [0.5] * 6},
    "max_tokens": 20,
    "lora": None,
    "reuse_vision_features": False,
    "augmentation": {"crop": 2, "jitter": 0.2},
    "published": None,
}


def make(family: str) -> HeadPolicy:
    """As `make_policy`, of a family that has a head."""
    policy = make_policy(family)
    assert isinstance(policy, HeadPolicy)
    return policy


def make_policy(family: str) -> Policy:
    """A policy with seeded weights everywhere: a fresh one's output layer is zero.

    A copy, since a vocabulary of 32064 tokens takes longer to draw than most tests of it; torch draws next what it
    would draw after making one."""
    policy, random_state = _made(family)
    torch.set_rng_state(random_state)
    return copy.deepcopy(policy)


@functools.cache
def _made(family: str) -> tuple[Policy, Tensor]:
    torch.manual_seed(0)
    policy = _fresh(family)
    policy.normalise_by(STATISTICS)
    for parameter in policy.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return policy, torch.get_rng_state()


def _fresh(name: str) -> Policy:
    family, _, head = name.partition(" ")
    head = head or "gaussian"
    if family == "gaussian_mlp":
        return GaussianMlp(inputs={"proprio": 4}, hidden=[8], chunk=CHUNK, action_dim=ACTION_DIM, head=head)
    if family == "cnn":
        return Cnn(**SEEING, channels=[8, 8], hidden=[16, 16], head=head)
    if family == "openvla-oft":
        return OpenVlaOft(**{**OPENVLA_OFT, "network": {**NETWORK, "action_head": head}})
    if family == "flow":
        return Flow(**VLA, denoising_steps=4, **FLOW[head])
    if family == "pi0":
        return Pi0(**PI0, **FLOW[head])
    return Vla(**{**VLA, "head": head})


def cloning_inputs(policy: Policy, count: int, seed: int = 0) -> Inputs:
    """As a learner gives them to `bc_loss`."""
    draws = torch.rand(count, policy.loss_draws, generator=torch.Generator().manual_seed(seed))
    return with_loss_draws(policy, policy.inputs(observe(count)), draws)


def observe(count: int, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    texts = np.array(["lift the cube", "open the top drawer", "put the cube on the plate"])
    return {
        "agentview": rng.integers(0, 256, (count, SIZE, SIZE, 3), np.uint8),
        "wrist": rng.integers(0, 256, (count, SIZE, SIZE, 3), np.uint8),
        "proprio": rng.standard_normal((count, 4), np.float32),
        INSTRUCTION: texts[np.arange(count) % len(texts)],
    }


def demo_actions(count: int, seed: int = 0, horizon: int = CHUNK) -> Tensor:
    """Actions [N, H, A] within the range of STATISTICS."""
    fractions = np.random.default_rng(seed).random((count, horizon, ACTION_DIM), np.float32)
    low, high = (torch.tensor(STATISTICS["actions"][key]) for key in ("min", "max"))
    return low + torch.from_numpy(fractions) * (high - low)


def generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng((seed, row)) for row in range(count)]
