"""Random weights with which a transformer hears its images from the first step, at any width and depth."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def grid_positions(height: int, width: int, size: int) -> Tensor:
    """Where each patch of an image is, [1, height * width, size]: sines and cosines of its row and its column.

    Position embeddings start from it and are learned. Small random ones take long to be heard beside the patches.
    """
    frequencies = torch.logspace(0, -2, math.ceil(size / 4))
    rows = torch.arange(height)[:, None, None] * frequencies
    columns = torch.arange(width)[None, :, None] * frequencies
    waves = [wave.expand(height, width, -1) for angle in (rows, columns) for wave in (angle.sin(), angle.cos())]
    return torch.cat(waves, dim=-1)[..., :size].reshape(1, height * width, size)


def initialise(layer: nn.Linear | nn.Conv2d, gain: float = 1.0) -> None:
    """Outputs start `gain` times as large as inputs, at any width."""
    nn.init.trunc_normal_(layer.weight, std=gain / math.sqrt(layer.weight[0].numel()))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def residual_gain(depth: int) -> float:
    """Of layers whose outputs are added to the tokens, two per block, as in GPT-2: what all blocks add up to does not
    grow with depth."""
    return 1 / math.sqrt(2 * depth)
