"""The episodes of an iteration as one batch of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from nightshift.policies.base import Policy
from nightshift.types import Trajectory


@dataclass(frozen=True)
class DecisionBatch:
    """N decisions of all episodes end to end; a decision is a chunk of C actions with A dimensions."""

    features: Tensor  # [N, D]
    actions: Tensor  # [N, C, A]
    mask: Tensor  # [N, C] true for actions that were executed: up to the one that ended the episode
    log_probs: Tensor  # [N, C, A] under the policy that acted
    episode: Tensor  # [N] index of the episode each decision belongs to
    advantages: Tensor  # [N]
    returns: Tensor  # [N] the critic's targets

    def __getitem__(self, index: Tensor) -> DecisionBatch:
        return DecisionBatch(*(getattr(self, field.name)[index] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.features)

    def with_log_probs(self, log_probs: Tensor) -> DecisionBatch:
        return replace(self, log_probs=log_probs)

    def with_advantages(self, advantages: Tensor, returns: Tensor | None = None) -> DecisionBatch:
        return replace(self, advantages=advantages, returns=advantages if returns is None else returns)

    def with_zero_padding(self) -> DecisionBatch:
        """The batch with zeros wherever the mask is false.

        Masking the loss alone is not enough: the gradient through a masked NaN is 0 * NaN.
        """
        action, decision = self.mask[..., None], self.mask.any(dim=1)
        return replace(
            self,
            features=torch.where(decision[:, None], self.features, 0),
            actions=torch.where(action, self.actions, 0),
            log_probs=torch.where(action, self.log_probs, 0),
            advantages=torch.where(decision, self.advantages, 0),
            returns=torch.where(decision, self.returns, 0),
        )


def collate(policy: Policy, episodes: Sequence[Trajectory]) -> DecisionBatch:
    """Every decision of `episodes`, with advantages and returns of zero."""
    if not episodes:
        return _empty(policy)
    chunks = [_chunked(policy, episode) for episode in episodes]
    features, actions, mask, log_probs = (torch.cat(column) for column in zip(*chunks, strict=True))
    decisions = torch.tensor([len(chunk[0]) for chunk in chunks])
    zeros = torch.zeros(len(features))
    return DecisionBatch(
        features=features,
        actions=actions,
        mask=mask,
        log_probs=log_probs,
        episode=torch.arange(len(episodes)).repeat_interleave(decisions),
        advantages=zeros,
        returns=zeros,
    )


def _empty(policy: Policy) -> DecisionBatch:
    """The batch of a rank without episodes, which still takes part in every collective sum."""
    actions = torch.zeros(0, policy.chunk, policy.action_dim)
    zeros = torch.zeros(0)
    mask, episode = torch.zeros(0, policy.chunk, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
    return DecisionBatch(torch.zeros(0, policy.feature_size), actions, mask, actions, episode, zeros, zeros)


def _chunked(policy: Policy, episode: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, actions, mask and log-probs of one episode by decision; the last chunk is padded."""
    missing = -episode.length % episode.chunk
    observed = {name: values[:: episode.chunk] for name, values in episode.observations.items()}
    executed = torch.ones(episode.length, dtype=torch.bool)
    return (
        policy.features(observed),
        _fold(torch.tensor(episode.actions), missing, episode.chunk),
        _fold(executed, missing, episode.chunk),
        _fold(torch.tensor(episode.log_probs), missing, episode.chunk),
    )


def _fold(steps: Tensor, missing: int, chunk: int) -> Tensor:
    """[T, …] to [decisions, C, …]."""
    padding = torch.zeros((missing, *steps.shape[1:]), dtype=steps.dtype)
    return torch.cat([steps, padding]).reshape(-1, chunk, *steps.shape[1:])
