"""The episodes of an iteration as one batch of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from nightshift.policies.base import Policy
from nightshift.types import Trajectory


@dataclass(frozen=True)
class Batch:
    """N decisions of all episodes end to end; a decision is a chunk of C actions with A dimensions."""

    features: Tensor  # [N, D]
    actions: Tensor  # [N, C, A]
    mask: Tensor  # [N, C] the actions that were played: up to the one that ended the episode, and none after it
    log_probs: Tensor  # [N, C, A] under the policy that acted
    episode: Tensor  # [N] which episode each decision belongs to
    advantages: Tensor  # [N]
    returns: Tensor  # [N] what a critic is to foresee

    def __getitem__(self, index: Tensor) -> Batch:
        return Batch(*(getattr(self, field.name)[index] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.features)

    def with_log_probs(self, log_probs: Tensor) -> Batch:
        return replace(self, log_probs=log_probs)

    def with_advantages(self, advantages: Tensor, returns: Tensor | None = None) -> Batch:
        return replace(self, advantages=advantages, returns=advantages if returns is None else returns)


def collate(policy: Policy, episodes: Sequence[Trajectory]) -> Batch:
    """Every decision of `episodes`; advantages are yet to be told."""
    if not episodes:
        return _empty(policy)
    chunks = [_chunked(policy, episode) for episode in episodes]
    features, actions, mask, log_probs = (torch.cat(column) for column in zip(*chunks, strict=True))
    decisions = torch.tensor([len(chunk[0]) for chunk in chunks])
    nothing = torch.zeros(len(features))
    return Batch(
        features=features,
        actions=actions,
        mask=mask,
        log_probs=log_probs,
        episode=torch.arange(len(episodes)).repeat_interleave(decisions),
        advantages=nothing,
        returns=nothing,
    )


def _empty(policy: Policy) -> Batch:
    """Of a rank that has nothing to learn from, but takes part."""
    actions = torch.zeros(0, policy.chunk, policy.action_dim)
    nothing = torch.zeros(0)
    mask, number = torch.zeros(0, policy.chunk, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
    return Batch(torch.zeros(0, policy.feature_size), actions, mask, actions, number, nothing, nothing)


def _chunked(policy: Policy, episode: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, actions, mask and log-probs of one episode, decision by decision; the last chunk is filled up."""
    missing = -episode.length % episode.chunk
    seen = {name: values[:: episode.chunk] for name, values in episode.observations.items()}
    played = torch.ones(episode.length, dtype=torch.bool)
    return (
        policy.features(seen),
        _fold(torch.tensor(episode.actions), missing, episode.chunk),
        _fold(played, missing, episode.chunk),
        _fold(torch.tensor(episode.log_probs), missing, episode.chunk),
    )


def _fold(steps: Tensor, missing: int, chunk: int) -> Tensor:
    """[T, …] to [decisions, C, …]."""
    filler = torch.zeros((missing, *steps.shape[1:]), dtype=steps.dtype)
    return torch.cat([steps, filler]).reshape(-1, chunk, *steps.shape[1:])
