"""A network that foresees how an episode will end, for advantages that tell good steps from bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from nightshift.algorithms.advantages import generalised
from nightshift.algorithms.batch import Batch
from nightshift.algorithms.collective import Moments
from nightshift.policies.base import Policy
from nightshift.types import Trajectory

_LEAST_STD = 1e-2


class Critic(nn.Module):
    """The value of what a policy sees: features [N, D] to [N]."""

    mean: Tensor
    std: Tensor
    centred: Tensor

    def __init__(self, size: int, hidden: Sequence[int]) -> None:
        super().__init__()
        sizes = [size, *hidden]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        self.register_buffer("centred", torch.tensor(False))

    def forward(self, features: Tensor) -> Tensor:
        values: Tensor = self.net((features - self.mean) / self.std)
        return values.squeeze(-1)

    def centre_on(self, features: Moments) -> None:
        """Scale what it sees by the first batch there is, once and for all."""
        if features.number and not self.centred:
            self.mean.copy_(features.mean)
            self.std.copy_(features.variance.sqrt().clamp(min=_LEAST_STD))
            self.centred.fill_(True)


@torch.no_grad()
def foreseen(
    critic: Critic, policy: Policy, batch: Batch, episodes: Sequence[Trajectory], *, discount: float, decay: float
) -> Batch:
    """The batch with GAE's advantages, and the returns that the critic is to foresee.

    Success and unstable physics are terminal; at the horizon the critic's value of the final observation counts.
    """
    if not episodes:
        return batch
    lengths = torch.bincount(batch.episode, minlength=len(episodes))
    solved = torch.tensor([episode.success for episode in episodes])
    unstable = torch.tensor([episode.unstable for episode in episodes])
    finals = {name: np.stack([episode.final[name] for episode in episodes]) for name in episodes[0].final}
    values = critic(batch.features).split(lengths.tolist())
    ahead = torch.where(solved | unstable, 0, critic(policy.features(finals)))
    padded = pad_sequence([torch.cat([v, a[None]]) for v, a in zip(values, ahead, strict=True)], batch_first=True)
    rewards = torch.zeros_like(padded[:, 1:])
    rewards[torch.arange(len(episodes)), lengths - 1] = solved.float()
    advantages = generalised(rewards, padded, lengths, discount=discount, decay=decay)
    flat = advantages[torch.arange(rewards.shape[1]) < lengths[:, None]]
    return batch.with_advantages(flat, returns=flat + torch.cat(values))
