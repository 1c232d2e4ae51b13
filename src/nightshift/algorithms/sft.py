"""Behaviour cloning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nightshift.policies.base import Policy

if TYPE_CHECKING:
    from nightshift import config


class SftLearner:
    def __init__(self, policy: Policy, settings: config.Sft) -> None:
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
        self._schedule = settings

    def update(self, features: Tensor, actions: Tensor, step: int) -> float:
        """One gradient on a batch: features [B, D], actions [B, A]. The learning rate falls linearly to zero."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._schedule.learning_rate * (1 - step / self._schedule.steps)
        loss = self.policy.imitation_loss(features, actions)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()
