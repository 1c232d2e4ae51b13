"""What a policy-gradient update minimises, element by element, and how far it has moved the policy.

A decision is a chunk of C actions with A dimensions: log-probs are [N, C, A], and a mask [N, C] tells which actions
were played. Elements are what ratios are taken of: dimensions, actions or whole chunks.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Level = Literal["token", "action", "chunk"]
KlForm = Literal["k1", "k2", "k3", "abs"]

_OVERFLOW = 20.0
"""Log-ratios beyond this are as good as infinite, and a gradient of infinity is none."""
_K3_INNER, _K3_OUTER = 20.0, 10.0
_FARTHEST = 0.2
"""Relative error of the KL beyond which the weight reacts no stronger."""


class Clip(NamedTuple):
    """How far a ratio may move and still earn anything."""

    low: float
    high: float
    dual: float | None = None  # bounds the loss of what went badly and became far likelier
    log_ratio: float | None = None  # bounds the logarithm itself


class Surrogate(NamedTuple):
    losses: Tensor  # [N, E]
    clipped: Tensor  # [N, E] whether the ratio no longer earns anything
    ppo_kl: Tensor  # [N, E] old minus new log-probs, without a gradient: PPO's estimate of KL(old || new), of any sign


def elements(log_probs: Tensor, mask: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Log-probs [N, E] and mask [N, E] of what ratios are taken of; what was not played counts nothing."""
    played = log_probs * mask[..., None]
    if level == "token":
        return played.flatten(1), mask.repeat_interleave(log_probs.shape[-1], dim=1)
    if level == "action":
        return played.sum(-1), mask
    return played.sum((-2, -1))[:, None], mask.any(dim=1, keepdim=True)


def clipped_surrogate(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: Clip) -> Surrogate:
    """PPO's pessimistic objective with separate bounds below and above; advantages broadcast over elements."""
    farthest = _OVERFLOW if clip.log_ratio is None else clip.log_ratio
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-farthest, farthest).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    losses = torch.maximum(plain, bounded)
    if clip.dual is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -clip.dual * advantages), losses)
    return Surrogate(losses=losses, clipped=bounded > plain, ppo_kl=-log_ratio.detach())


def kl_penalty(log_probs: Tensor, reference: Tensor, form: KlForm) -> Tensor:
    """Estimates of KL(policy || reference) from what the policy did, element by element.

    The gradient of k1 itself would not depend on the reference at all: its value comes with the gradient of k2.
    """
    distance = log_probs - reference
    squared = 0.5 * distance.square()
    if form == "k1":
        return squared + (distance - squared).detach()
    if form == "abs":
        return distance.abs()
    if form == "k2":
        return squared
    inverse = (-distance).clamp(-_K3_INNER, _K3_INNER)
    return (inverse.exp() - inverse - 1).clamp(-_K3_OUTER, _K3_OUTER)


def kl_divergence(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(old || new) from samples of the old policy, by the estimator that is never negative: r - 1 - log r."""
    log_ratio = log_probs - old_log_probs
    return log_ratio.expm1() - log_ratio


class AdaptiveWeight:
    """The weight of a KL penalty: raised while the policy is farther than `target` from the reference, else lowered."""

    def __init__(self, weight: float, *, target: float | None, horizon: int) -> None:
        """Without a target it stays as it is."""
        self.value = weight
        self._target = target
        self._horizon = horizon

    def observe(self, kl: float, episodes: int) -> None:
        if self._target is not None and math.isfinite(kl):
            error = min(max(kl / self._target - 1, -_FARTHEST), _FARTHEST)
            self.value *= 1 + error * min(episodes / self._horizon, 1.0)
