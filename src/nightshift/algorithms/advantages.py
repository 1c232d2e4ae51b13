"""Advantage estimators as pure functions: how much better an episode, or a step of it, went than its baseline.

G groups of K episodes each; the episodes of a group start from the same init state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nightshift.algorithms.collective import Moments

_GRPO_EPSILON = 1e-6
_GAE_EPSILON = 1e-5
_MIN_VARIANCE = 1e-8


def leave_one_out(returns: Tensor) -> Tensor:
    """RLOO: each return minus the mean of the others in its group. [G, K] -> [G, K], K at least 2."""
    _, members = returns.shape
    if members == 1:
        raise ValueError("leave-one-out needs groups of K >= 2 episodes: a single one has no baseline")
    others = returns.sum(dim=1, keepdim=True) - returns
    return returns - others / (members - 1)


def leave_one_out_of_batch(returns: Tensor, moments: Moments) -> Tensor:
    """RLOO over the whole batch: each return minus the mean of all others; `moments` are the batch's. Any shape."""
    if moments.count == 1:
        raise ValueError("leave-one-out needs K >= 2 episodes: a single one has no baseline")
    return (returns - moments.mean.to(returns)) * (moments.count / max(moments.count - 1, 1))


def group_relative(returns: Tensor) -> Tensor:
    """GRPO: distance from the group's mean in its standard deviations (n - 1 in the denominator). [G, K] -> [G, K]."""
    if returns.shape[1] == 1:
        raise ValueError("GRPO needs groups of K >= 2 episodes: a single one has no standard deviation")
    centred = returns - returns.mean(dim=1, keepdim=True)
    return centred / (returns.std(dim=1, keepdim=True) + _GRPO_EPSILON)


def whiten(values: Tensor, moments: Moments) -> Tensor:
    """REINFORCE++: mean 0 and variance 1 over all steps of the batch, so longer episodes weigh more. Any shape."""
    return (values - moments.mean.to(values)) * moments.variance.clamp(min=_MIN_VARIANCE).rsqrt().to(values)


def normalise(values: Tensor, moments: Moments) -> Tensor:
    """PPO's advantage normalisation: mean 0 and standard deviation 1 (n - 1 in the denominator) over the batch."""
    std = (moments.variance * moments.count / max(moments.count - 1, 1)).sqrt()
    return (values - moments.mean.to(values)) / (std + _GAE_EPSILON).to(values)


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation for B episodes: rewards [B, T], values [B, T + 1], lengths [B] -> [B, T].

    values[b, lengths[b]] bootstraps the return: 0 where the episode terminated. Entries after it are padding.
    """
    steps = torch.arange(rewards.shape[1])
    deltas = rewards + gamma * values[:, 1:] - values[:, :-1]
    deltas = torch.where(steps < lengths[:, None], deltas, 0)
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[:, 0])
    for step in reversed(range(rewards.shape[1])):
        advantage = deltas[:, step] + gamma * gae_lambda * advantage
        advantages[:, step] = advantage
    return advantages
