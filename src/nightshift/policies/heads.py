"""Action heads: from a network's outputs to a distribution of actions.

A network gives `outputs` [B, C, A, P]: P numbers for each of A dimensions of C actions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nightshift.policies.base import EncoderPolicy, Inputs

MIN_STD = 1e-2
"""Lower bound of the demos' std: constant features are not amplified, constant actions are still explored a little."""
_QUADRATURE = 32
"""Nodes of the Gauss-Hermite quadrature of a tanh-Gaussian's entropy."""
_LOG_STD_RANGE = (-20.0, 2.0)
"""As in RLPD."""
MAX_TANH = 1 - 1e-5
"""Actions of demos may be 1; tanh never is. As RLPD clips them."""
CLONE_LOG_STD = -0.5 - 0.5 * math.log(2 * math.pi * math.e)
"""Of a Gaussian with an entropy of -1/2, the usual target of SAC per action dimension: a std of 0.147."""


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


class BinsHead(ActionHead):
    """Every dimension falls into one of 256 bins of equal width between the demos' minimum and maximum.

    Actions are the bins' centres, and log-probs are those of bins. An action beyond the range counts as the nearest
    bin. Temperature divides the logits.
    """

    outputs_per_dim = 256
    action_min: Tensor
    bin_width: Tensor

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.register_buffer("action_min", torch.full((action_dim,), -1.0))
        self.register_buffer("bin_width", torch.full((action_dim,), 2 / self.outputs_per_dim))

    def normalise_by(self, statistics: Mapping[str, Any]) -> None:
        low, high = torch.tensor(statistics["min"]), torch.tensor(statistics["max"])
        centre, half = (low + high) / 2, ((high - low) / 2).clamp(min=MIN_STD)
        self.action_min.copy_(centre - half)
        self.bin_width.copy_(2 * half / self.outputs_per_dim)

    def std_parameters(self) -> Sequence[nn.Parameter]:
        return []

    def greedy(self, outputs: Tensor) -> Tensor:
        return self._centres(outputs.argmax(-1))

    def sample(
        self, outputs: Tensor, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]:
        shape = outputs.shape[1:3]
        uniform = np.stack([generator.random(shape, dtype=np.float32) for generator in generators])
        # Inverse-CDF sampling. In double precision the product stays below the total, so that a bin has a probability.
        cumulative = (outputs / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
        threshold = torch.from_numpy(uniform).to(outputs.device)[..., None] * cumulative[..., -1:]
        actions = self._centres((cumulative <= threshold).sum(-1))
        return actions, self.log_prob(outputs, actions, temperature)

    def log_prob(self, outputs: Tensor, actions: Tensor, temperature: float) -> Tensor:
        log_probs = (outputs / temperature).log_softmax(-1)
        return log_probs.gather(-1, self._bins(actions)[..., None]).squeeze(-1)

    def entropy(self, outputs: Tensor, temperature: float) -> Tensor:
        log_probs = (outputs / temperature).log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

    def bc_loss(self, outputs: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        targets = self._bins(torch.where(mask[..., None], actions, 0))
        errors = functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none").mean(-1)
        return torch.where(mask, errors, 0).sum() / mask.sum()

    def _centres(self, bins: Tensor) -> Tensor:
        return self.action_min + (bins + 0.5) * self.bin_width

    def _bins(self, actions: Tensor) -> Tensor:
        bins = ((actions - self.action_min) / self.bin_width).floor()
        return bins.clamp(0, self.outputs_per_dim - 1).long()


class TanhGaussianHead(ActionHead):
    """A diagonal Gaussian through tanh: actions in (-1, 1), with a std that depends on the observation (SAC).

    The mean and the log-std are those before tanh. Temperature scales the std.
    """

    outputs_per_dim = 2
    action_std: Tensor
    nodes: Tensor
    weights: Tensor

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.register_buffer("action_std", torch.ones(action_dim))
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE)
        self.register_buffer("nodes", torch.tensor(nodes, dtype=torch.float32), persistent=False)
        self.register_buffer("weights", torch.tensor(weights / weights.sum(), dtype=torch.float32), persistent=False)

    def normalise_by(self, statistics: Mapping[str, Any]) -> None:
        """The std weighs errors in cloning. Actions are not normalised: tanh has the range of the simulator."""
        self.action_std.copy_(torch.tensor(statistics["std"]).clamp(min=MIN_STD))

    def std_parameters(self) -> Sequence[nn.Parameter]:
        return []

    def greedy(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].tanh()

    def rsample(self, outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions and their log-probs, both [B, C, A], as differentiable functions of standard normal `noise`."""
        mean, log_std = self._parameters_of(outputs)
        before = mean + log_std.exp() * noise
        return before.tanh(), _normal_log_prob(noise, log_std) - _log_tanh_slope(before)

    def sample(
        self, outputs: Tensor, generators: Sequence[np.random.Generator], temperature: float
    ) -> tuple[Tensor, Tensor]:
        shape = outputs.shape[1:3]
        noise = np.stack([generator.standard_normal(shape, dtype=np.float32) for generator in generators])
        mean, log_std = self._parameters_of(outputs)
        actions = (mean + temperature * log_std.exp() * torch.from_numpy(noise).to(outputs.device)).tanh()
        return actions, self.log_prob(outputs, actions, temperature)

    def log_prob(self, outputs: Tensor, actions: Tensor, temperature: float) -> Tensor:
        mean, log_std = self._parameters_of(outputs)
        log_std = log_std + math.log(temperature)
        before = actions.clamp(-MAX_TANH, MAX_TANH).atanh()
        return _normal_log_prob((before - mean) / log_std.exp(), log_std) - _log_tanh_slope(before)

    def entropy(self, outputs: Tensor, temperature: float) -> Tensor:
        """That of the Gaussian, and the mean of the log of the slope of tanh by Gauss-Hermite quadrature."""
        mean, log_std = self._parameters_of(outputs)
        log_std = log_std + math.log(temperature)
        before = mean[..., None] + log_std.exp()[..., None] * self.nodes
        return log_std + 0.5 * math.log(2 * math.pi * math.e) + _log_tanh_slope(before) @ self.weights

    def bc_loss(self, outputs: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        """The squared error of the greedy action, and of the log-std to CLONE_LOG_STD.

        The likelihood of few demos is highest for a std near zero: a clone trained by it does not explore, and its
        entropy is so far below the target that the temperature tears it away from the demos.
        """
        _, log_std = self._parameters_of(outputs)
        targets = torch.where(mask[..., None], actions, 0)  # before the square: the gradient of a masked NaN is NaN
        squares = ((self.greedy(outputs) - targets) / self.action_std).square()
        errors = (squares + (log_std - CLONE_LOG_STD).square()).mean(-1)
        return torch.where(mask, errors, 0).sum() / mask.sum().clamp(min=1)  # a small batch may have no demo

    def _parameters_of(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the log-std before tanh, both [B, C, A]."""
        return outputs[..., 0], outputs[..., 1].clamp(*_LOG_STD_RANGE)


def _normal_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)


def _log_tanh_slope(before: Tensor) -> Tensor:
    """log(1 - tanh(before)²), without the cancellation of that formula."""
    return 2 * (math.log(2) - before - functional.softplus(-2 * before))


HEADS: Mapping[str, Callable[[int], ActionHead]] = {
    "gaussian": GaussianHead,
    "bins": BinsHead,
    "tanh_gaussian": TanhGaussianHead,
}
"""By their name in params.yaml; each is made for a number of action dimensions."""


class HeadPolicy(EncoderPolicy):
    """A policy that is a network with an action head: a family only says what the network is.

    The network has two parts: `encode`, which critics can share, and `decode`, which only acts.
    """

    head: ActionHead

    @abstractmethod
    def decode(self, encoded: Tensor) -> Tensor:
        """The head's outputs [B, C, A, P], in float32."""

    def encoder_parameters(self) -> Sequence[nn.Parameter]:
        """Those of `encode` that critics train; none where it has no parameters."""
        return []

    def forward(self, inputs: Inputs) -> Tensor:
        """The head's outputs [B, C, A, P]."""
        return self.decode(self.encode(inputs))

    def outputs(self, inputs: Inputs) -> Tensor:
        outputs: Tensor = self(inputs)
        return outputs

    def normalise_actions_by(self, statistics: Mapping[str, Any]) -> None:
        self.head.normalise_by(statistics)

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
