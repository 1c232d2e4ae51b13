"""Action heads: from a network's outputs to a distribution of actions.

A network gives `outputs` [B, C, A, P]: P numbers for each of A dimensions of C actions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nightshift.policies.base import Inputs, Policy

MIN_STD = 1e-2
"""Lower bound of the demos' std: constant features are not amplified, constant actions are still explored a little."""


class ActionHead(nn.Module, ABC):
    outputs_per_dim: int
    """P."""

    @abstractmethod
    def normalise_by(self, statistics: Mapping[str, Any]) -> None:
        """Those of the demos' actions: mean, std, min, max."""

    @abstractmethod
    def std_parameters(self) -> Sequence[nn.Parameter]: ...

    @abstractmethod
    def greedy(self, outputs: Tensor) -> Tensor: ...

    @abstractmethod
    def sample(
        self, outputs: Tensor, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def log_prob(self, outputs: Tensor, actions: Tensor, temperature: float) -> Tensor: ...

    @abstractmethod
    def entropy(self, outputs: Tensor, temperature: float) -> Tensor: ...

    @abstractmethod
    def bc_loss(self, outputs: Tensor, actions: Tensor, mask: Tensor) -> Tensor: ...


class GaussianHead(ActionHead):
    """A diagonal Gaussian with a std that ignores the observation.

    Actions are normalised by the mean and std of the demos. So one temperature explores metres and radians alike, and
    hardly at all in dimensions that the demos do not move.
    """

    outputs_per_dim = 1
    action_mean: Tensor
    action_std: Tensor

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(action_dim))
        self.register_buffer("action_mean", torch.zeros(action_dim))
        self.register_buffer("action_std", torch.ones(action_dim))

    def normalise_by(self, statistics: Mapping[str, Any]) -> None:
        self.action_mean.copy_(torch.tensor(statistics["mean"]))
        self.action_std.copy_(torch.tensor(statistics["std"]).clamp(min=MIN_STD))

    def std_parameters(self) -> Sequence[nn.Parameter]:
        return [self.log_std]

    def greedy(self, outputs: Tensor) -> Tensor:
        return self.action_mean + self.action_std * outputs.squeeze(-1)

    def sample(
        self, outputs: Tensor, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]:
        shape = outputs.shape[1:3]
        noise = np.stack([generator.standard_normal(shape, dtype=np.float32) for generator in generators])
        actions = self.greedy(outputs) + self._std(temperature) * torch.from_numpy(noise).to(outputs.device)
        return actions, self.log_prob(outputs, actions, temperature)

    def log_prob(self, outputs: Tensor, actions: Tensor, temperature: float) -> Tensor:
        std = self._std(temperature)
        distance = (actions - self.greedy(outputs)) / std
        return -0.5 * distance.square() - std.log() - 0.5 * math.log(2 * math.pi)

    def entropy(self, outputs: Tensor, temperature: float) -> Tensor:
        entropy = self._std(temperature).log() + 0.5 * math.log(2 * math.pi * math.e)
        return entropy.expand(outputs.shape[:3])

    def bc_loss(self, outputs: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        targets = torch.where(mask[..., None], actions, 0)  # before the square: the gradient of a masked NaN is NaN
        errors = ((self.greedy(outputs) - targets) / self.action_std).square().mean(-1)
        return torch.where(mask, errors, 0).sum() / mask.sum()

    def _std(self, temperature: float) -> Tensor:
        """Standard deviation of each action dimension [A]."""
        return temperature * self.log_std.exp() * self.action_std


class HeadPolicy(Policy):
    """A policy that is a network with an action head: a family only says what the network is."""

    head: ActionHead

    def __init__(self, *, chunk: int, action_dim: int) -> None:
        super().__init__()
        self._chunk = chunk
        self._action_dim = action_dim

    @property
    def chunk(self) -> int:
        return self._chunk

    @property
    def action_dim(self) -> int:
        return self._action_dim

    @abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """The head's outputs [B, C, A, P], in float32."""

    def outputs(self, inputs: Inputs) -> Tensor:
        outputs: Tensor = self(inputs)
        return outputs

    def std_parameters(self) -> Sequence[nn.Parameter]:
        return self.head.std_parameters()

    def greedy(self, inputs: Inputs) -> Tensor:
        return self.head.greedy(self.outputs(inputs))

    def sample(
        self, inputs: Inputs, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]:
        return self.head.sample(self.outputs(inputs), generators, temperature)

    def evaluate_actions(self, inputs: Inputs, actions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        outputs = self.outputs(inputs)
        return self.head.log_prob(outputs, actions, temperature), self.head.entropy(outputs, temperature)

    def bc_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor) -> Tensor:
        return self.head.bc_loss(self.outputs(inputs), actions, mask)
