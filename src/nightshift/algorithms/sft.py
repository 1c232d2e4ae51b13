"""Supervised fine-tuning: behaviour cloning of demos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from nightshift.policies.base import Policy
from nightshift.types import Array, Observation

if TYPE_CHECKING:
    from nightshift import config


@dataclass(frozen=True)
class Demos:
    """N steps of demos."""

    features: Tensor  # [N, D]
    actions: Tensor  # [N, C, A] the chunk that follows each step
    mask: Tensor  # [N, C] true for actions of the chunk before the episode's end: its first one at least

    @classmethod
    def from_steps(cls, policy: Policy, observations: Observation, actions: Array, mask: NDArray[np.bool_]) -> Demos:
        return cls(policy.features(observations), torch.tensor(actions), torch.tensor(mask))

    def __getitem__(self, index: Tensor) -> Demos:
        return Demos(self.features[index], self.actions[index], self.mask[index])

    def __len__(self) -> int:
        return len(self.features)


class SftLearner:
    def __init__(self, policy: Policy, settings: config.Sft) -> None:
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
        self._steps = settings.steps
        self._scheduler = self._linear_decay(0)

    @property
    def trained(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """What a checkpoint must hold."""
        return {"policy": (self.policy, self.optimizer)}

    def resume(self, step: int) -> None:
        """Continue the schedule after `step` updates."""
        self._scheduler = self._linear_decay(step)

    def update(self, demos: Demos) -> float:
        """One gradient step on a batch; its loss."""
        loss = self.policy.bc_loss(demos.features, demos.actions, demos.mask)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._scheduler.step()
        return loss.item()

    def _linear_decay(self, step: int) -> LambdaLR:
        """The learning rate falls linearly to zero over all steps."""
        return LambdaLR(self.optimizer, lambda done: 1 - done / self._steps, last_epoch=step - 1)
