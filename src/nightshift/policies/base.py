"""The interface that every policy family implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nightshift.types import Array, Observation


class Policy(nn.Module, ABC):
    """A torch module that acts in chunks. B observations at a time, C actions per chunk, A dimensions, D features.

    `temperature` scales the standard deviation that `sample` draws with; `act` is the limit of 0, the greedy action.
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
    def std_parameters(self) -> Sequence[nn.Parameter]:
        """Those of the standard deviation of `sample`; `act` does not depend on them."""

    @abstractmethod
    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Normalise inputs and actions by the dataset's statistics, by field: mean, std, min, max."""

    @abstractmethod
    def features(self, observations: Observation) -> Tensor:
        """The observations that are the policy's inputs, as one tensor [B, D]."""

    @abstractmethod
    def act(self, observations: Observation) -> Array:
        """The greedy actions [B, C, A]."""

    @abstractmethod
    def sample(self, observations: Observation, noise: Array, temperature: float) -> tuple[Array, Array]:
        """A draw driven by standard normal `noise` [B, C, A]: actions [B, C, A] and their log-probs [B, C, A]."""

    @abstractmethod
    def log_prob(self, features: Tensor, actions: Tensor, temperature: float) -> Tensor:
        """Log-density of `actions` [B, C, A] at `features` [B, D], dimension by dimension: [B, C, A]."""

    @abstractmethod
    def entropy(self, features: Tensor, temperature: float) -> Tensor:
        """Of the action distribution at `features` [B, D], dimension by dimension: [B, C, A]."""

    @abstractmethod
    def bc_loss(self, features: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        """The behaviour-cloning loss of `actions` [B, C, A], a mean over the actions where `mask` [B, C] is true.

        Masked actions may be NaN: they have no influence on the loss or its gradient.
        """
