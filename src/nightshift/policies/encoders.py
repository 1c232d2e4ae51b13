"""Networks that policy families share: normalisation of state vectors, and convolutions on camera images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from nightshift.policies.heads import MIN_STD

_CLIP = 5.0
"""Normalised features are clipped to this many standard deviations."""
_GROUPS = 8


class Normaliser(nn.Module):
    """State vectors in standard deviations of the demos."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def normalise_by(self, *fields: Mapping[str, Any]) -> None:
        """Statistics of the fields of the dataset that the vector is made of."""
        self.mean.copy_(torch.cat([torch.tensor(field["mean"]) for field in fields]))
        self.std.copy_(torch.cat([torch.tensor(field["std"]) for field in fields]).clamp(min=MIN_STD))

    def forward(self, vectors: Tensor) -> Tensor:
        return ((vectors - self.mean) / self.std).clamp(-_CLIP, _CLIP)


class ConvStem(nn.Module):
    """Strided convolutions with group norm: images uint8 [B, H, W, 3] to a map [B, C, H / stride, W / stride]."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int], activation: type[nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for (a, b), stride in zip(pairwise([3, *channels]), strides, strict=True):
            kernel = 2 * (stride // 2) + 1
            convolution = nn.Conv2d(a, b, kernel, stride, padding=kernel // 2, bias=False)
            layers += [convolution, nn.GroupNorm(gcd(b, _GROUPS), b), activation()]
        self.net = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        scaled = images.permute(0, 3, 1, 2) / 127.5 - 1
        features: Tensor = self.net(scaled)
        return features


class CameraEncoder(nn.Module):
    """One camera's images uint8 [B, H, W, 3] as features [B, F]; every convolution halves the image.

    A condition [B, K], such as the instruction, scales and shifts the channels of the last map (FiLM, Perez et al.
    2018), so that a task picks what it looks at.
    """

    def __init__(self, image: tuple[int, int], channels: Sequence[int], features: int, condition: int) -> None:
        """`condition` is K; 0 makes an encoder without one."""
        super().__init__()
        height, width = image
        for _ in channels:
            height, width = (height + 1) // 2, (width + 1) // 2
        self.stem = ConvStem(channels, [2] * len(channels), nn.ReLU)
        self.film = nn.Linear(condition, 2 * channels[-1]) if condition else None
        self.project = nn.Linear(height * width * channels[-1], features)
        self.norm = nn.LayerNorm(features)

    def forward(self, images: Tensor, condition: Tensor | None) -> Tensor:
        channels = self.stem(images)
        if self.film is not None:
            scale, shift = self.film(condition)[..., None, None].chunk(2, dim=1)
            channels = channels * (1 + scale) + shift
        features: Tensor = self.norm(self.project(channels.flatten(1)))
        return features
