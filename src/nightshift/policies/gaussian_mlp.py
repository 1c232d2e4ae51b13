"""A small network on low-dimensional observations: a Gaussian of fixed width around its mean action.

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
from nightshift.types import ACTION_DIM, Array, Observation

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

    def __init__(self, *, inputs: Mapping[str, int], hidden: Sequence[int], std: float) -> None:
        """`inputs` maps the names of the observations it sees to their sizes."""
        super().__init__()
        self.inputs = dict(inputs)
        self.hidden = list(hidden)
        self.std = std
        sizes = [sum(self.inputs.values()), *self.hidden]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(sizes[-1], ACTION_DIM))
        self.register_buffer("input_mean", torch.zeros(sizes[0]))
        self.register_buffer("input_std", torch.ones(sizes[0]))
        self.register_buffer("action_mean", torch.zeros(ACTION_DIM))
        self.register_buffer("action_std", torch.ones(ACTION_DIM))

    @property
    def spec(self) -> Mapping[str, Any]:
        return {"family": FAMILY, "inputs": self.inputs, "hidden": self.hidden, "std": self.std}

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        fields = [statistics[f"observations.{name}"] for name in self.inputs]
        self.input_mean.copy_(torch.cat([torch.tensor(field["mean"]) for field in fields]))
        self.input_std.copy_(torch.cat([torch.tensor(field["std"]) for field in fields]).clamp(min=_LEAST_STD))
        self.action_mean.copy_(torch.tensor(statistics["actions"]["mean"]))
        self.action_std.copy_(torch.tensor(statistics["actions"]["std"]).clamp(min=_LEAST_STD))

    def forward(self, features: Tensor) -> Tensor:
        """The mean action [B, A]."""
        scaled = (features - self.input_mean) / self.input_std
        mean: Tensor = self.net(scaled.clamp(-_CLIP, _CLIP))
        return self.action_mean + self.action_std * mean

    def features(self, observations: Observation) -> Tensor:
        return torch.from_numpy(np.concatenate([observations[name] for name in self.inputs], axis=-1))

    @torch.inference_mode()
    def act(self, observations: Observation) -> Array:
        action: Array = self.forward(self.features(observations)).numpy()
        return action

    @torch.inference_mode()
    def sample(self, observations: Observation, noise: Array) -> tuple[Array, Array]:
        features = self.features(observations)
        actions = self.forward(features) + self.std * self.action_std * torch.from_numpy(noise)
        return actions.numpy(), self.log_prob(features, actions).numpy()

    def log_prob(self, features: Tensor, actions: Tensor) -> Tensor:
        width = self.std * self.action_std
        distance = (actions - self.forward(features)) / width
        return -0.5 * distance.square().sum(-1) - width.log().sum() - 0.5 * ACTION_DIM * math.log(2 * math.pi)

    def imitation_loss(self, features: Tensor, actions: Tensor) -> Tensor:
        return ((self.forward(features) - actions) / self.action_std).square().mean()
