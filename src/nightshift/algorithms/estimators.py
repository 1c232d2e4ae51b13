"""Which credit every decision of an iteration gets: one name in params.yaml, one estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nightshift.algorithms import advantages
from nightshift.algorithms.batch import Batch, collate
from nightshift.algorithms.collective import Collective, moments
from nightshift.algorithms.critics import Critic, foreseen
from nightshift.policies.base import Policy
from nightshift.types import Trajectory

if TYPE_CHECKING:
    from nightshift import config

Groups = Sequence[Sequence[Trajectory]]
"""Episodes of one init state each; every group is complete."""

_WITHIN_GROUPS = {"rloo": advantages.leave_one_out, "grpo": advantages.group_relative}


def credited(
    groups: Groups, policy: Policy, critic: Critic | None, settings: config.Rloo, collective: Collective
) -> Batch:
    """Every decision with its advantage. Groups that cannot teach, since all of one fared alike, are left out."""
    if settings.advantage in _WITHIN_GROUPS:
        groups = [group for group in groups if len({episode.success for episode in group}) > 1]
    episodes = [episode for group in groups for episode in group]
    batch = collate(policy, episodes)
    if critic is not None:
        critic.centre_on(moments(collective, batch.features))
        batch = foreseen(
            critic, policy, batch, episodes, discount=settings.critic.discount, decay=settings.critic.decay
        )
        everyone = moments(collective, batch.advantages)
        return batch.with_advantages(advantages.normalised(batch.advantages, everyone), returns=batch.returns)
    return batch.with_advantages(_of_outcomes(groups, batch, settings.advantage, collective))


def _of_outcomes(groups: Groups, batch: Batch, estimator: str, collective: Collective) -> Tensor:
    """Advantages [N] that every decision of an episode shares."""
    returns = torch.tensor([[float(episode.success) for episode in group] for group in groups])
    if estimator in _WITHIN_GROUPS:
        of_episodes = _WITHIN_GROUPS[estimator](returns) if len(returns) else returns
        return of_episodes.flatten()[batch.episode]
    if estimator == "rloo_batch":
        return advantages.leave_one_out_of_all(returns.flatten(), moments(collective, returns.flatten()))[batch.episode]
    of_steps = returns.flatten()[batch.episode]
    return advantages.whitened(of_steps, moments(collective, of_steps))
