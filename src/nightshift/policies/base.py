"""The seam every policy family sits behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from nightshift.types import Array, Observation


class Policy(nn.Module, ABC):
    """A torch module that acts. B observations at a time, A action dimensions, D features."""

    @property
    @abstractmethod
    def spec(self) -> Mapping[str, Any]:
        """JSON from which `policies.build` makes the same architecture again."""

    @abstractmethod
    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Centre and scale what the policy sees by the dataset's statistics, by field: mean, std, min, max."""

    @abstractmethod
    def features(self, observations: Observation) -> Tensor:
        """The observations the policy looks at, as one tensor [B, D]."""

    @abstractmethod
    def act(self, observations: Observation) -> Array:
        """The action the policy holds best, [B, A]."""

    @abstractmethod
    def sample(self, observations: Observation, noise: Array) -> tuple[Array, Array]:
        """A draw from the policy driven by standard normal `noise` [B, A]: actions [B, A] and log-probs [B]."""

    @abstractmethod
    def log_prob(self, features: Tensor, actions: Tensor) -> Tensor:
        """Log-density of `actions` [B, A] at `features` [B, D], summed over dimensions: [B]."""

    @abstractmethod
    def imitation_loss(self, features: Tensor, actions: Tensor) -> Tensor:
        """How far the policy is from having chosen `actions`; a scalar to minimise."""
