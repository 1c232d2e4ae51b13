"""Behaviour cloning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nightshift.policies.base import Policy
from nightshift.types import Array, Observation

if TYPE_CHECKING:
    from nightshift import config


@dataclass(frozen=True)
class Demos:
    """N steps of demos."""

    features: Tensor  # [N, D]
    actions: Tensor  # [N, C, A] the chunk that follows each step
    mask: Tensor  # [N, C] what of the chunk is still in the episode: its first action at least

    @classmethod
    def seen_by(cls, policy: Policy, observations: Observation, actions: Array, mask: NDArray[np.bool_]) -> Demos:
        return cls(policy.features(observations), torch.tensor(actions), torch.tensor(mask))

    def __getitem__(self, index: Tensor) -> Demos:
        return Demos(self.features[index], self.actions[index], self.mask[index])

    def __len__(self) -> int:
        return len(self.features)


class SftLearner:
    def __init__(self, policy: Policy, settings: config.Sft) -> None:
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
        self._schedule = settings

    @property
    def trained(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """What a checkpoint must hold."""
        return {"policy": (self.policy, self.optimizer)}

    def update(self, demos: Demos, step: int) -> float:
        """One gradient on a batch. The learning rate falls linearly to zero."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._schedule.learning_rate * (1 - step / self._schedule.steps)
        loss = self.policy.imitation_loss(demos.features, demos.actions, demos.mask)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()
