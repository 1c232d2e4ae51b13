"""Random weights and inputs that depend on a name alone: the same on every machine and with every version of torch."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor, nn

_EMBEDDINGS = ("embed_tokens", "pos_embed", "position_embedding")


def drawn(name: str, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.from_numpy(_generator(name).standard_normal(shape).astype(np.float32))


def uniform(name: str, *shape: int) -> Tensor:
    """Numbers between 0 and 1."""
    return torch.from_numpy(_generator(name).random(shape, np.float32))


def integers(name: str, below: int, *shape: int) -> Tensor:
    """From 1 on."""
    return torch.from_numpy(_generator(name).integers(1, below, shape))


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Norms, biases and scales are random too: at their usual start they would hide errors."""
    numbers = drawn(name, *shape)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.2 * numbers
    if len(shape) < 2 or any(part in name for part in _EMBEDDINGS):
        return 0.3 * numbers
    return numbers / math.sqrt(math.prod(shape[1:]))


def fill(module: nn.Module) -> None:
    """Give a module its weights, each by its name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weight(name, tuple(parameter.shape)))


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))
