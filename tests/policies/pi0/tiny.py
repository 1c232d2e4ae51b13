"""A tiny pi0 with random weights everywhere: norms and embeddings too, which would hide errors at their usual start."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nightshift.policies.pi0.network import NetworkSpec, Pi0Network

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


class Batch(NamedTuple):
    images: Tensor
    cameras: Tensor
    prompt: Tensor
    words: Tensor
    state: Tensor
    noisy: Tensor
    times: Tensor


def network(spec: NetworkSpec = SPEC) -> Pi0Network:
    torch.manual_seed(0)
    made = Pi0Network(spec)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            fan = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if fan == 1 or "embed" in name else fan**-0.5))
    return made.eval()


def batch() -> Batch:
    """The second camera of the second row is not there, and prompts have different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([WORDS, 3, 4])
    cameras = torch.ones(ROWS, CAMERAS, dtype=torch.bool)
    cameras[1, 1] = False
    return Batch(
        images=torch.rand(ROWS, CAMERAS, 3, 28, 28, generator=generator) * 2 - 1,
        cameras=cameras,
        prompt=torch.randint(1, SPEC["vocabulary"], (ROWS, WORDS), generator=generator),
        words=torch.arange(WORDS) < lengths[:, None],
        state=torch.randn(ROWS, SPEC["state_dim"], generator=generator),
        noisy=torch.randn(ROWS, SPEC["horizon"], SPEC["action_dim"], generator=generator),
        times=torch.tensor([1.0, 0.5, 0.03]),
    )


@torch.no_grad()
def velocity(network: Pi0Network, given: Batch) -> Tensor:
    prefix = network.prefix(network.see(given.images), given.cameras, given.prompt, given.words)
    return network.velocity(given.state, given.noisy, given.times, prefix)[0]
