"""A diagonal Gaussian policy: an MLP on low-dimensional observations for the mean, a std that ignores the state.

Inputs and actions are normalised by the mean and std of the demos. So one temperature explores metres and radians
alike, and hardly at all in dimensions that the demos do not move.
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
"""Normalised features are clipped to this many standard deviations."""
_MIN_STD = 1e-2
"""Lower bound of the demos' std: constant features are not amplified, constant actions are still explored a little."""


class GaussianMlp(Policy):
    input_mean: Tensor
    input_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def __init__(self, *, inputs: Mapping[str, int], hidden: Sequence[int], chunk: int, action_dim: int) -> None:
        """`inputs` maps the names of observations to their sizes."""
        super().__init__()
        self.inputs = dict(inputs)
        self.hidden = list(hidden)
        self._chunk = chunk
        self._action_dim = action_dim
        sizes = [sum(self.inputs.values()), *self.hidden]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(sizes[-1], chunk * action_dim))
        self.log_std = nn.Parameter(torch.zeros(action_dim))
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

    def std_parameters(self) -> Sequence[nn.Parameter]:
        return [self.log_std]

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        fields = [statistics[f"observations.{name}"] for name in self.inputs]
        self.input_mean.copy_(torch.cat([torch.tensor(field["mean"]) for field in fields]))
        self.input_std.copy_(torch.cat([torch.tensor(field["std"]) for field in fields]).clamp(min=_MIN_STD))
        self.action_mean.copy_(torch.tensor(statistics["actions"]["mean"]))
        self.action_std.copy_(torch.tensor(statistics["actions"]["std"]).clamp(min=_MIN_STD))

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
        actions = self.forward(features) + self._std(temperature) * torch.from_numpy(noise)
        return actions.numpy(), self.log_prob(features, actions, temperature).numpy()

    def log_prob(self, features: Tensor, actions: Tensor, temperature: float) -> Tensor:
        std = self._std(temperature)
        distance = (actions - self.forward(features)) / std
        return -0.5 * distance.square() - std.log() - 0.5 * math.log(2 * math.pi)

    def entropy(self, features: Tensor, temperature: float) -> Tensor:
        entropy = self._std(temperature).log() + 0.5 * math.log(2 * math.pi * math.e)
        return entropy.expand(len(features), self._chunk, self._action_dim)

    def bc_loss(self, features: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        targets = torch.where(mask[..., None], actions, 0)  # before the square: the gradient of a masked NaN is NaN
        errors = ((self.forward(features) - targets) / self.action_std).square().mean(-1)
        return torch.where(mask, errors, 0).sum() / mask.sum()

    def _std(self, temperature: float) -> Tensor:
        """Standard deviation of each action dimension [A]."""
        return temperature * self.log_std.exp() * self.action_std
