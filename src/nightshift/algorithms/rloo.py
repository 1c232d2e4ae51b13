"""RLOO: leave-one-out advantages, clipped policy gradient, kept inside a trust region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nightshift.algorithms.advantages import leave_one_out
from nightshift.algorithms.objectives import clipped_surrogate, kl_divergence
from nightshift.policies.base import Policy
from nightshift.types import Trajectory

if TYPE_CHECKING:
    from nightshift import config

Groups = Sequence[Sequence[Trajectory]]
"""Episodes of one init state each; every group is complete."""


@dataclass(frozen=True)
class Batch:
    """All steps of an iteration's episodes, N in number."""

    features: Tensor  # [N, D]
    actions: Tensor  # [N, A]
    log_probs: Tensor  # [N] under the policy that acted
    advantages: Tensor  # [N] every step carries its episode's

    def __getitem__(self, index: Tensor) -> Batch:
        return Batch(self.features[index], self.actions[index], self.log_probs[index], self.advantages[index])


class RlooLearner:
    def __init__(self, policy: Policy, settings: config.Rloo, generator: torch.Generator) -> None:
        self.policy = policy
        # Rectified, since Adam's first steps go as far as the learning rate allows in every direction at once.
        self.optimizer = torch.optim.RAdam(policy.parameters(), lr=settings.learning_rate)
        self.generator = generator
        self._settings = settings

    def update(self, groups: Groups) -> dict[str, float]:
        """Move the policy towards what worked. Groups that all succeeded or all failed teach nothing."""
        informative = [group for group in groups if len({t.success for t in group}) > 1]
        if not informative:
            return {"update/gradients": 0.0, "update/kl": 0.0, "update/clipped": 0.0, "update/loss": 0.0}
        return self._descend(self._batch(informative))

    def _descend(self, batch: Batch) -> dict[str, float]:
        gradients, losses, clipped, kl = 0, 0.0, 0.0, 0.0
        for part in self._minibatches(batch):
            loss, share = self._gradient(part)
            gradients, losses, clipped = gradients + 1, losses + loss, clipped + share
            kl = self._distance(batch)
            if kl > self._settings.kl_limit:
                break
        return {
            "update/gradients": float(gradients),
            "update/kl": kl,
            "update/clipped": clipped / gradients,
            "update/loss": losses / gradients,
        }

    def _minibatches(self, batch: Batch) -> Iterator[Batch]:
        count = len(batch.advantages)
        for _ in range(self._settings.epochs):
            order = torch.randperm(count, generator=self.generator)
            for part in torch.split(order, self._settings.minibatch):
                yield batch[part]

    def _gradient(self, part: Batch) -> tuple[float, float]:
        surrogate = clipped_surrogate(
            self.policy.log_prob(part.features, part.actions),
            part.log_probs,
            part.advantages,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
        )
        self.optimizer.zero_grad()
        surrogate.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._settings.gradient_norm)
        self.optimizer.step()
        return surrogate.loss.item(), surrogate.clipped.item()

    @torch.no_grad()
    def _distance(self, batch: Batch) -> float:
        return kl_divergence(self.policy.log_prob(batch.features, batch.actions), batch.log_probs).item()

    def _batch(self, groups: Groups) -> Batch:
        returns = torch.tensor([[float(t.success) for t in group] for group in groups])
        episodes = [trajectory for group in groups for trajectory in group]
        lengths = torch.tensor([t.length for t in episodes])
        return Batch(
            features=torch.cat([self.policy.features(t.observations) for t in episodes]),
            actions=torch.cat([torch.tensor(t.actions) for t in episodes]),
            log_probs=torch.cat([torch.tensor(t.log_probs) for t in episodes]),
            advantages=leave_one_out(returns).flatten().repeat_interleave(lengths),
        )
