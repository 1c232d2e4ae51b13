"""How much better an episode, or a step of it, went than could be expected.

G groups of K episodes each; the episodes of a group began in the same state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nightshift.algorithms.collective import Moments

_GRPO_EPSILON = 1e-6
_GAE_EPSILON = 1e-5
_LEAST_VARIANCE = 1e-8


def leave_one_out(returns: Tensor) -> Tensor:
    """RLOO: each return minus the mean of the others in its group. [G, K] -> [G, K], K at least 2."""
    _, members = returns.shape
    if members == 1:
        raise ValueError("leave-one-out needs groups of K >= 2 episodes: with one there is nobody to compare with")
    others = returns.sum(dim=1, keepdim=True) - returns
    return returns - others / (members - 1)


def leave_one_out_of_all(returns: Tensor, everyone: Moments) -> Tensor:
    """RLOO over the whole batch: each return minus the mean of all others, by the moments of all. Any shape."""
    if everyone.number == 1:
        raise ValueError("leave-one-out needs K >= 2 episodes: with one there is nobody to compare with")
    return (returns - everyone.mean.to(returns)) * (everyone.number / max(everyone.number - 1, 1))


def group_relative(returns: Tensor) -> Tensor:
    """GRPO: distance from the group's mean in its standard deviations (n - 1 in the denominator). [G, K] -> [G, K]."""
    if returns.shape[1] == 1:
        raise ValueError("GRPO needs groups of K >= 2 episodes: one alone has no standard deviation")
    centred = returns - returns.mean(dim=1, keepdim=True)
    return centred / (returns.std(dim=1, keepdim=True) + _GRPO_EPSILON)


def whitened(values: Tensor, everyone: Moments) -> Tensor:
    """REINFORCE++: mean 0 and variance 1 over all steps of the batch, longer episodes counting more. Any shape."""
    return (values - everyone.mean.to(values)) * everyone.variance.clamp(min=_LEAST_VARIANCE).rsqrt().to(values)


def normalised(values: Tensor, everyone: Moments) -> Tensor:
    """PPO's habit: mean 0 and standard deviation 1 (n - 1 in the denominator) over all steps of the batch."""
    std = (everyone.variance * everyone.number / max(everyone.number - 1, 1)).sqrt()
    return (values - everyone.mean.to(values)) / (std + _GAE_EPSILON).to(values)


def generalised(rewards: Tensor, values: Tensor, lengths: Tensor, *, discount: float, decay: float) -> Tensor:
    """GAE. Rewards [B, T] and values [B, T + 1] of B episodes, of which the first `lengths` [B] steps count.

    The value after the last step is what is still to be expected there: 0 where the episode terminated.
    """
    steps = torch.arange(rewards.shape[1])
    ahead = rewards + discount * values[:, 1:] - values[:, :-1]
    ahead = torch.where(steps < lengths[:, None], ahead, 0)
    advantages = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[:, 0])
    for step in reversed(range(rewards.shape[1])):
        carried = ahead[:, step] + discount * decay * carried
        advantages[:, step] = carried
    return advantages
