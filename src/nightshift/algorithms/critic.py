"""The critic: a value network, and the GAE advantages and returns computed with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from nightshift.algorithms.advantages import gae
from nightshift.algorithms.batch import DecisionBatch
from nightshift.algorithms.collective import Moments
from nightshift.types import Trajectory

_MIN_STD = 1e-2


class ValueNetwork(nn.Module):
    """The value of what a policy offers to its critic: [N, F] to [N]."""

    mean: Tensor
    std: Tensor
    normalised: Tensor

    def __init__(self, feature_size: int, hidden: Sequence[int]) -> None:
        super().__init__()
        sizes = [feature_size, *hidden]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self.register_buffer("mean", torch.zeros(feature_size))
        self.register_buffer("std", torch.ones(feature_size))
        self.register_buffer("normalised", torch.tensor(False))

    def forward(self, features: Tensor) -> Tensor:
        values: Tensor = self.net((features - self.mean) / self.std)
        return values.squeeze(-1)

    def normalise_by(self, features: Moments) -> None:
        """Normalise inputs by the moments of the first batch that is not empty, and never again."""
        if features.count and not self.normalised:
            self.mean.copy_(features.mean)
            self.std.copy_(features.variance.sqrt().clamp(min=_MIN_STD))
            self.normalised.fill_(True)


@torch.no_grad()
def with_gae(
    batch: DecisionBatch,
    episodes: Sequence[Trajectory],
    finals: Tensor,
    critic: ValueNetwork,
    *,
    gamma: float,
    gae_lambda: float,
) -> DecisionBatch:
    """The batch with GAE advantages, and with the critic's targets as returns.

    `finals` [episodes, F] is what the critic sees of the final observations.

    Success and unstable physics terminate an episode; at the horizon it bootstraps from the value of its final
    observation.
    """
    if not episodes:
        return batch
    lengths = torch.bincount(batch.episode, minlength=len(episodes))
    solved = torch.tensor([episode.success for episode in episodes])
    unstable = torch.tensor([episode.unstable for episode in episodes])
    values = critic(batch.critic_features).split(lengths.tolist())
    bootstrap = torch.where(solved | unstable, 0, critic(finals))
    padded = pad_sequence([torch.cat([v, b[None]]) for v, b in zip(values, bootstrap, strict=True)], batch_first=True)
    rewards = torch.zeros_like(padded[:, 1:])
    rewards[torch.arange(len(episodes)), lengths - 1] = solved.float()
    advantages = gae(rewards, padded, lengths, gamma=gamma, gae_lambda=gae_lambda)
    flat = advantages[torch.arange(rewards.shape[1]) < lengths[:, None]]
    return batch.with_advantages(flat, returns=flat + torch.cat(values))
