"""The episodes of an iteration as one batch of decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from nightshift.policies.arrays import to_tensor
from nightshift.policies.base import Inputs, Policy, observation_dtype
from nightshift.policies.device import free_memory
from nightshift.types import Observation, Trajectory

_RESIDENT_SHARE = 1 / 16
"""Of a GPU's free memory. The rest is for activations."""


@dataclass(frozen=True)
class DecisionBatch:
    """N decisions of all episodes end to end; a decision is a chunk of C actions with A dimensions."""

    inputs: Inputs  # each [N, …] what the policy saw, and the latents of its decisions
    actions: Tensor  # [N, C, A]
    mask: Tensor  # [N, C] true for actions that were executed: up to the one that ended the episode
    log_probs: Tensor  # [N, C, A] under the policy that acted
    episode: Tensor  # [N] index of the episode each decision belongs to
    advantages: Tensor  # [N]
    returns: Tensor  # [N] the critic's targets
    critic_features: Tensor  # [N, F] what the critic sees; [N, 0] without one

    def __getitem__(self, index: Tensor) -> DecisionBatch:
        return self._map(lambda tensor: tensor[index])

    def __len__(self) -> int:
        return len(self.actions)

    def to(self, device: torch.device) -> DecisionBatch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def resident_on(self, device: torch.device) -> DecisionBatch:
        """With the inputs on the device if they take a small part of its free memory: every epoch reads them anew, and
        to gather and send images takes longer than to learn from them."""
        needed = sum(tensor.nbytes for tensor in self.inputs.values())
        if device.type == "cpu" or needed > _RESIDENT_SHARE * free_memory(device):
            return self
        return replace(self, inputs={name: tensor.to(device) for name, tensor in self.inputs.items()})

    def with_log_probs(self, log_probs: Tensor) -> DecisionBatch:
        return replace(self, log_probs=log_probs)

    def with_advantages(self, advantages: Tensor, returns: Tensor | None = None) -> DecisionBatch:
        return replace(self, advantages=advantages, returns=advantages if returns is None else returns)

    def with_critic_features(self, critic_features: Tensor) -> DecisionBatch:
        return replace(self, critic_features=critic_features)

    def with_zero_padding(self) -> DecisionBatch:
        """The batch with zeros wherever the mask is false.

        Masking the loss alone is not enough: the gradient through a masked NaN is 0 * NaN.
        """
        action, decision = self.mask[..., None], self.mask.any(dim=1)
        return replace(
            self,
            inputs={name: _select(decision, tensor) for name, tensor in self.inputs.items()},
            actions=torch.where(action, self.actions, 0),
            log_probs=torch.where(action, self.log_probs, 0),
            advantages=torch.where(decision, self.advantages, 0),
            returns=torch.where(decision, self.returns, 0),
            critic_features=_select(decision, self.critic_features),
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> DecisionBatch:
        tensors = {field.name: change(getattr(self, field.name)) for field in fields(self) if field.name != "inputs"}
        return DecisionBatch(inputs={name: change(tensor) for name, tensor in self.inputs.items()}, **tensors)


def collate(policy: Policy, episodes: Sequence[Trajectory]) -> DecisionBatch:
    """Every decision of `episodes`, with advantages and returns of zero."""
    if not episodes:
        return idle(policy, 0)
    chunks = [_chunked(episode) for episode in episodes]
    actions, mask, log_probs = (torch.cat(column) for column in zip(*chunks, strict=True))
    names = policy.update_observations
    seen = {name: np.concatenate([episode.observations[name] for episode in episodes]) for name in names}
    latents = {
        name: to_tensor(np.concatenate([episode.latents[name] for episode in episodes])) for name in episodes[0].latents
    }
    zeros = torch.zeros(len(actions))
    return DecisionBatch(
        inputs=policy.update_inputs(seen, latents),
        actions=actions,
        mask=mask,
        log_probs=log_probs,
        episode=torch.arange(len(episodes)).repeat_interleave(torch.tensor([len(chunk[0]) for chunk in chunks])),
        advantages=zeros,
        returns=zeros,
        critic_features=torch.zeros(len(actions), 0),
    )


def idle(policy: Policy, count: int = 1) -> DecisionBatch:
    """Decisions that count for nothing. A rank without data runs the policy on one where others run it on theirs; with
    none of them it takes part in the sums of all ranks."""
    seen = nothing_seen(count, policy, policy.update_observations)
    actions, zeros = torch.zeros(count, policy.chunk, policy.action_dim), torch.zeros(count)
    return DecisionBatch(
        inputs=policy.update_inputs(seen, policy.idle_latents(count)),
        actions=actions,
        mask=torch.zeros(count, policy.chunk, dtype=torch.bool),
        log_probs=actions,
        episode=torch.zeros(count, dtype=torch.int64),
        advantages=zeros,
        returns=zeros,
        critic_features=torch.zeros(count, policy.critic_size),
    )


def nothing_seen(count: int, policy: Policy, names: Sequence[str]) -> Observation:
    """`count` observations of a policy, with zeros."""
    return {name: np.zeros((count, *policy.shapes[name]), observation_dtype(policy.shapes[name])) for name in names}


def _select(decision: Tensor, values: Tensor) -> Tensor:
    """`values` [N, …], with zeros where `decision` [N] is false."""
    return values if decision.all() else torch.where(decision.reshape(-1, *[1] * (values.dim() - 1)), values, 0)


def _chunked(episode: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    """Actions, mask and log-probs of one episode by decision; the last chunk is padded."""
    missing = -episode.length % episode.chunk
    executed = torch.ones(episode.length, dtype=torch.bool)
    return (
        _fold(torch.tensor(episode.actions), missing, episode.chunk),
        _fold(executed, missing, episode.chunk),
        _fold(torch.tensor(episode.log_probs), missing, episode.chunk),
    )


def _fold(steps: Tensor, missing: int, chunk: int) -> Tensor:
    """[T, …] to [decisions, C, …]."""
    padding = torch.zeros((missing, *steps.shape[1:]), dtype=steps.dtype)
    return torch.cat([steps, padding]).reshape(-1, chunk, *steps.shape[1:])
