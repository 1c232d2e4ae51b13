"""What a policy-gradient update minimises, and how far it has moved the policy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    loss: Tensor  # scalar
    clipped: Tensor  # scalar, share of steps whose ratio no longer earns anything
    drift: Tensor  # scalar, mean of old - new log-probs: the first-order estimate of the KL


def clipped_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """PPO's pessimistic objective with separate bounds below and above; all inputs [N], mean over N."""
    ratio = (log_probs - old_log_probs).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(
        loss=torch.maximum(plain, bounded).mean(),
        clipped=(bounded > plain).float().mean(),
        drift=(old_log_probs - log_probs).mean(),
    )


def kl_divergence(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(old || new) from samples of the old policy, by the estimator that is never negative: r - 1 - log r."""
    log_ratio = log_probs - old_log_probs
    return (log_ratio.expm1() - log_ratio).mean()
