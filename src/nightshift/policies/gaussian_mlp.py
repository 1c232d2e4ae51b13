"""A diagonal Gaussian policy: an MLP on low-dimensional observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nightshift.policies.base import Inputs, Shapes
from nightshift.policies.heads import MIN_STD, GaussianHead, HeadPolicy
from nightshift.types import Observation

if TYPE_CHECKING:
    from nightshift import config

FAMILY = "gaussian_mlp"
STATE = "state"
"""The one input: all observations side by side."""
_CLIP = 5.0
"""Normalised features are clipped to this many standard deviations."""


class GaussianMlp(HeadPolicy):
    input_mean: Tensor
    input_std: Tensor

    def __init__(self, *, inputs: Mapping[str, int], hidden: Sequence[int], chunk: int, action_dim: int) -> None:
        """`inputs` maps the names of observations to their sizes."""
        super().__init__(chunk=chunk, action_dim=action_dim)
        self.sizes = dict(inputs)
        self.hidden = list(hidden)
        widths = [sum(self.sizes.values()), *self.hidden]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(widths[-1], chunk * action_dim))
        self.head = GaussianHead(action_dim)
        self.register_buffer("input_mean", torch.zeros(widths[0]))
        self.register_buffer("input_std", torch.ones(widths[0]))

    @classmethod
    def from_config(cls, settings: config.GaussianMlp, shapes: Shapes, action_dim: int) -> GaussianMlp:
        inputs = {name: shapes[name][0] for name in settings.inputs}
        return cls(inputs=inputs, hidden=settings.hidden, chunk=settings.chunk, action_dim=action_dim)

    @property
    def spec(self) -> Mapping[str, Any]:
        return {
            "family": FAMILY,
            "inputs": self.sizes,
            "hidden": self.hidden,
            "chunk": self.chunk,
            "action_dim": self.action_dim,
        }

    @property
    def observations(self) -> Sequence[str]:
        return list(self.sizes)

    @property
    def critic_size(self) -> int:
        return sum(self.sizes.values())

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        fields = [statistics[f"observations.{name}"] for name in self.sizes]
        self.input_mean.copy_(torch.cat([torch.tensor(field["mean"]) for field in fields]))
        self.input_std.copy_(torch.cat([torch.tensor(field["std"]) for field in fields]).clamp(min=MIN_STD))
        self.head.normalise_by(statistics["actions"])

    def inputs(self, observations: Observation) -> dict[str, Tensor]:
        return {STATE: torch.from_numpy(np.concatenate([observations[name] for name in self.sizes], axis=-1))}

    def forward(self, inputs: Inputs) -> Tensor:
        scaled = (inputs[STATE] - self.input_mean) / self.input_std
        outputs: Tensor = self.net(scaled.clamp(-_CLIP, _CLIP))
        return outputs.reshape(-1, self.chunk, self.action_dim, 1)

    def critic_features(self, inputs: Inputs) -> Tensor:
        return inputs[STATE]
