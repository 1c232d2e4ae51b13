"""The terms of a policy-gradient loss, element by element.

A decision is a chunk of C actions with A dimensions: log-probs are [N, C, A], and a mask [N, C] is true for actions
that were executed. Elements are what probability ratios are taken of: dimensions ("token"), actions or chunks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nightshift import config

RatioLevel = Literal["token", "action", "chunk"]
KlForm = Literal["k1", "k2", "k3", "abs"]

_MAX_LOG_RATIO = 20.0
"""The exponential of a larger log-ratio overflows, and so does its gradient."""
_K3_MAX_LOG_RATIO, _K3_MAX = 20.0, 10.0
_MAX_KL_ERROR = 0.2
"""Relative error of the KL beyond which the adaptive coefficient reacts no stronger."""


class Surrogate(NamedTuple):
    losses: Tensor  # [N, E]
    clipped: Tensor  # [N, E] whether the clipped term is the larger one, so that the gradient is zero
    ppo_kl: Tensor  # [N, E] old minus new log-probs, detached: PPO's signed estimate of KL(old || new)


def elements(log_probs: Tensor, mask: Tensor, level: RatioLevel) -> tuple[Tensor, Tensor]:
    """Log-probs [N, E] and mask [N, E] at a level; masked log-probs are replaced by 0, also those that are NaN."""
    selected = torch.where(mask[..., None], log_probs, 0)
    if level == "token":
        return selected.flatten(1), mask.repeat_interleave(log_probs.shape[-1], dim=1)
    if level == "action":
        return selected.sum(-1), mask
    return selected.sum((-2, -1))[:, None], mask.any(dim=1, keepdim=True)


def clipped_surrogate(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: config.Clip) -> Surrogate:
    """PPO's clipped objective with separate bounds below and above; advantages broadcast over elements."""
    max_log_ratio = _MAX_LOG_RATIO if clip.log_ratio is None else clip.log_ratio
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    losses = torch.maximum(unclipped, clipped)
    if clip.dual is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -clip.dual * advantages), losses)
    return Surrogate(losses=losses, clipped=clipped > unclipped, ppo_kl=-log_ratio.detach())


def kl_penalty(log_probs: Tensor, reference: Tensor, form: KlForm) -> Tensor:
    """Estimates of KL(policy || reference) from the policy's own samples, element by element.

    The gradient of k1 does not depend on the reference at all, so its value is paired with the gradient of k2.
    """
    difference = log_probs - reference
    k2 = 0.5 * difference.square()
    if form == "k1":
        return k2 + (difference - k2).detach()
    if form == "abs":
        return difference.abs()
    if form == "k2":
        return k2
    log_ratio = (-difference).clamp(-_K3_MAX_LOG_RATIO, _K3_MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1).clamp(-_K3_MAX, _K3_MAX)


def approx_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(old || new) from samples of the old policy, by the estimator that is never negative: r - 1 - log r."""
    log_ratio = log_probs - old_log_probs
    return log_ratio.expm1() - log_ratio


class AdaptiveKlCoef:
    """The coefficient of the KL penalty: raised while the KL to the reference is above `target`, else lowered."""

    def __init__(self, coef: float, *, target: float | None, horizon: int) -> None:
        """Without a target the coefficient is constant."""
        self.value = coef
        self._target = target
        self._horizon = horizon

    def observe(self, kl: float, episodes: int) -> None:
        if self._target is not None and math.isfinite(kl):
            error = min(max(kl / self._target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
            self.value *= 1 + error * min(episodes / self._horizon, 1.0)
