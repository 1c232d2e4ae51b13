"""The seam every policy family sits behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nightshift.types import Array, Observation


class Policy(nn.Module, ABC):
    """A torch module that acts in chunks. B observations at a time, C actions per chunk, A dimensions, D features.

    `temperature` widens or narrows what the policy draws from; 0 would be its mean action, which `act` gives.
    """

    @property
    @abstractmethod
    def spec(self) -> Mapping[str, Any]:
        """JSON from which `policies.build` makes the same architecture again."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """Actions per decision."""

    @property
    @abstractmethod
    def action_dim(self) -> int:
        """A."""

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """D."""

    @abstractmethod
    def width_parameters(self) -> Sequence[nn.Parameter]:
        """Those that decide how widely the policy draws, not what it holds best."""

    @abstractmethod
    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Centre and scale what the policy sees by the dataset's statistics, by field: mean, std, min, max."""

    @abstractmethod
    def features(self, observations: Observation) -> Tensor:
        """The observations the policy looks at, as one tensor [B, D]."""

    @abstractmethod
    def act(self, observations: Observation) -> Array:
        """The actions the policy holds best, [B, C, A]."""

    @abstractmethod
    def sample(self, observations: Observation, noise: Array, temperature: float) -> tuple[Array, Array]:
        """A draw driven by standard normal `noise` [B, C, A]: actions [B, C, A] and their log-probs [B, C, A]."""

    @abstractmethod
    def log_prob(self, features: Tensor, actions: Tensor, temperature: float) -> Tensor:
        """Log-density of `actions` [B, C, A] at `features` [B, D], dimension by dimension: [B, C, A]."""

    @abstractmethod
    def entropy(self, features: Tensor, temperature: float) -> Tensor:
        """Of what the policy draws from at `features` [B, D], dimension by dimension: [B, C, A]."""

    @abstractmethod
    def imitation_loss(self, features: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        """How far, on average over where `mask` [B, C] holds, the policy is from having chosen `actions` [B, C, A]."""
