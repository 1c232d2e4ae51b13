"""From the episodes of an iteration to a batch with advantages, by the estimator that params.yaml names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nightshift.algorithms import advantages
from nightshift.algorithms.batch import DecisionBatch, collate, nothing_seen
from nightshift.algorithms.collective import global_moments
from nightshift.algorithms.critic import ValueNetwork, with_gae
from nightshift.algorithms.strategy import Strategy
from nightshift.policies.base import Inputs, Policy
from nightshift.types import Trajectory

if TYPE_CHECKING:
    from nightshift import config

Groups = Sequence[Sequence[Trajectory]]
"""Episodes of one init state each; every group is complete."""

_WITHIN_GROUPS = {"rloo": advantages.leave_one_out, "grpo": advantages.group_relative}


CriticFeatures = Callable[[Inputs, int], Tensor]
"""What the critic sees [N, F] of N inputs."""


def estimate_advantages(
    groups: Groups,
    policy: Policy,
    critic: ValueNetwork | None,
    features: CriticFeatures,
    settings: config.Rloo,
    strategy: Strategy,
) -> DecisionBatch:
    """Every decision with its advantage. Estimators within groups leave out uniform groups: their advantage is 0."""
    if settings.advantage_estimator in _WITHIN_GROUPS:
        groups = [group for group in groups if len({episode.success for episode in group}) > 1]
    episodes = [episode for group in groups for episode in group]
    batch = collate(policy, episodes)
    if critic is None:
        return batch.with_advantages(_of_outcomes(groups, batch, settings.advantage_estimator, strategy))
    batch = batch.with_critic_features(features(batch.inputs, len(batch)))
    critic.normalise_by(global_moments(strategy, batch.critic_features))
    finals = features(_final_inputs(policy, episodes), len(episodes))
    gamma, gae_lambda = settings.critic.gamma, settings.critic.gae_lambda
    batch = with_gae(batch, episodes, finals, critic, gamma=gamma, gae_lambda=gae_lambda)
    normalised = advantages.normalise(batch.advantages, global_moments(strategy, batch.advantages))
    return batch.with_advantages(normalised, returns=batch.returns)


def _final_inputs(policy: Policy, episodes: Sequence[Trajectory]) -> Inputs:
    if not episodes:
        return policy.inputs(nothing_seen(0, policy, policy.observations))
    return policy.inputs(
        {name: np.stack([episode.final[name] for episode in episodes]) for name in policy.observations}
    )


def _of_outcomes(groups: Groups, batch: DecisionBatch, estimator: str, strategy: Strategy) -> Tensor:
    """Advantages [N] from the outcome of each episode; all decisions of an episode share one."""
    returns = torch.tensor([[float(episode.success) for episode in group] for group in groups])
    if estimator in _WITHIN_GROUPS:
        of_episodes = _WITHIN_GROUPS[estimator](returns) if len(returns) else returns
        return of_episodes.flatten()[batch.episode]
    if estimator == "rloo_batch":
        moments = global_moments(strategy, returns.flatten())
        return advantages.leave_one_out_of_batch(returns.flatten(), moments)[batch.episode]
    of_steps = returns.flatten()[batch.episode]
    return advantages.whiten(of_steps, global_moments(strategy, of_steps))
