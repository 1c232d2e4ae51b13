"""A small network on low-dimensional observations: a Gaussian around its mean actions, equally wide everywhere.

Both sides are in units of the demos: a feature or an action of 1 is one standard deviation from what they show on
average. So the same width explores as boldly in metres as in radians, and hardly at all where the demos hold still.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nightshift.policies.base import Policy
from nightshift.types import Array, Observation

FAMILY = "gaussian_mlp"
_CLIP = 5.0
"""Standard deviations beyond which a feature is as good as infinitely far from the demos."""
_LEAST_STD = 1e-2
"""A feature that hardly varies in the demos is not blown up; an action that hardly does is still explored a little."""


class GaussianMlp(Policy):
    input_mean: Tensor
    input_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def __init__(self, *, inputs: Mapping[str, int], hidden: Sequence[int], chunk: int, action_dim: int) -> None:
        """`inputs` maps the names of the observations it sees to their sizes."""
        super().__init__()
        self.inputs = dict(inputs)
        self.hidden = list(hidden)
        self._chunk = chunk
        self._action_dim = action_dim
        sizes = [sum(self.inputs.values()), *self.hidden]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(sizes[-1], chunk * action_dim))
        self.log_width = nn.Parameter(torch.zeros(action_dim))
        self.register_buffer("input_mean", torch.zeros(sizes[0]))
        self.register_buffer("input_std", torch.ones(sizes[0]))
        self.register_buffer("action_mean", torch.zeros(action_dim))
        self.register_buffer("action_std", torch.ones(action_dim))

    @property
    def spec(self) -> Mapping[str, Any]:
        return {
            "family": FAMILY,
            "inputs": self.inputs,
            "hidden": self.hidden,
            "chunk": self.chunk,
            "action_dim": self.action_dim,
        }

    @property
    def chunk(self) -> int:
        return self._chunk

    @property
    def action_dim(self) -> int:
        return self._action_dim

    @property
    def feature_size(self) -> int:
        return sum(self.inputs.values())

    def width_parameters(self) -> Sequence[nn.Parameter]:
        return [self.log_width]

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        fields = [statistics[f"observations.{name}"] for name in self.inputs]
        self.input_mean.copy_(torch.cat([torch.tensor(field["mean"]) for field in fields]))
        self.input_std.copy_(torch.cat([torch.tensor(field["std"]) for field in fields]).clamp(min=_LEAST_STD))
        self.action_mean.copy_(torch.tensor(statistics["actions"]["mean"]))
        self.action_std.copy_(torch.tensor(statistics["actions"]["std"]).clamp(min=_LEAST_STD))

    def forward(self, features: Tensor) -> Tensor:
        """The mean actions [B, C, A]."""
        scaled = (features - self.input_mean) / self.input_std
        mean: Tensor = self.net(scaled.clamp(-_CLIP, _CLIP))
        return self.action_mean + self.action_std * mean.reshape(-1, self._chunk, self._action_dim)

    def features(self, observations: Observation) -> Tensor:
        return torch.from_numpy(np.concatenate([observations[name] for name in self.inputs], axis=-1))

    @torch.inference_mode()
    def act(self, observations: Observation) -> Array:
        actions: Array = self.forward(self.features(observations)).numpy()
        return actions

    @torch.inference_mode()
    def sample(self, observations: Observation, noise: Array, temperature: float) -> tuple[Array, Array]:
        features = self.features(observations)
        actions = self.forward(features) + self._width(temperature) * torch.from_numpy(noise)
        return actions.numpy(), self.log_prob(features, actions, temperature).numpy()

    def log_prob(self, features: Tensor, actions: Tensor, temperature: float) -> Tensor:
        width = self._width(temperature)
        distance = (actions - self.forward(features)) / width
        return -0.5 * distance.square() - width.log() - 0.5 * math.log(2 * math.pi)

    def entropy(self, features: Tensor, temperature: float) -> Tensor:
        entropy = self._width(temperature).log() + 0.5 * math.log(2 * math.pi * math.e)
        return entropy.expand(len(features), self._chunk, self._action_dim)

    def imitation_loss(self, features: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        distance = ((self.forward(features) - actions) / self.action_std).square().mean(-1)
        return (distance * mask).sum() / mask.sum()

    def _width(self, temperature: float) -> Tensor:
        """Standard deviation of each action dimension [A]."""
        return temperature * self.log_width.exp() * self.action_std
