"""A tiny pi0 with random weights everywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nightshift.policies.pi0.gemma import RmsNorm
from nightshift.policies.pi0.network import NetworkSpec, Pi0Network
from tests.policies import recipe

SPEC: NetworkSpec = {
    "image_size": 28,
    "siglip": {"width": 32, "mlp": 48, "depth": 2, "heads": 2},
    "gemma": {"width": 40, "mlp": 64},
    "expert": {"width": 24, "mlp": 56},
    "attention": {"heads": 4, "key_value_heads": 1, "head_width": 8},
    "depth": 3,
    "vocabulary": 64,
    "state_dim": 6,
    "action_dim": 5,
    "horizon": 7,
    "adaptive_norms": False,
}
PI05: NetworkSpec = {**SPEC, "state_dim": 0, "adaptive_norms": True}
PATCHES = 4
ROWS, CAMERAS, WORDS = 3, 2, 6
STEPS = 4
"""Of a chain of denoising."""


class Batch(NamedTuple):
    images: Tensor
    cameras: Tensor
    prompt: Tensor
    words: Tensor
    state: Tensor
    noisy: Tensor
    times: Tensor


def network(spec: NetworkSpec = SPEC) -> Pi0Network:
    made = Pi0Network(spec)
    recipe.fill(made)
    for part in made.modules():
        if isinstance(part, RmsNorm):
            part.weight.data -= 1  # Gemma's are relative to one
    return made.eval()


def batch() -> Batch:
    """The second camera of the second row is not there, and prompts have different lengths."""
    lengths = torch.tensor([WORDS, 3, 4])
    cameras = torch.ones(ROWS, CAMERAS, dtype=torch.bool)
    cameras[1, 1] = False
    return Batch(
        images=recipe.uniform("images", ROWS, CAMERAS, 3, 28, 28) * 2 - 1,
        cameras=cameras,
        prompt=recipe.integers("prompt", SPEC["vocabulary"], ROWS, WORDS),
        words=torch.arange(WORDS) < lengths[:, None],
        state=recipe.drawn("state", ROWS, SPEC["state_dim"]),
        noisy=recipe.drawn("noisy", ROWS, SPEC["horizon"], SPEC["action_dim"]),
        times=torch.tensor([1.0, 0.5, 0.03]),
    )


@torch.no_grad()
def velocity(network: Pi0Network, given: Batch) -> Tensor:
    prefix = network.prefix(network.see(given.images), given.cameras, given.prompt, given.words)
    return network.velocity(given.state, given.noisy, given.times, prefix)[0]
