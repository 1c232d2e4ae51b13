"""RLPD's update written out plainly: a list of networks, a loop over them, Adam by its formula.

It follows the published code (rlpd, sac_learner.py) and shares nothing with nightshift.algorithms.rlpd.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Fault = Literal["mask from truncation", "one critic too few", "target once per step", "actor on the minimum"]


@dataclass
class Batch:
    """One slice, and the random numbers of its critic step."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    masks: Tensor  # 0 after termination
    timeouts: Tensor  # 1 at a time limit
    next_states: Tensor
    members: Sequence[int]
    next_noise: Tensor
    noise: Tensor


class Adam:
    def __init__(self, parameters: Sequence[nn.Parameter], learning_rate: float) -> None:
        self.parameters, self.learning_rate, self.steps = list(parameters), learning_rate, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    def descend(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, self.parameters)
        self.steps += 1
        with torch.no_grad():
            for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
                m.copy_(0.9 * m + 0.1 * g)
                v.copy_(0.999 * v + 0.001 * g**2)
                corrected = m / (1 - 0.9**self.steps), v / (1 - 0.999**self.steps)
                p.sub_(self.learning_rate * corrected[0] / (corrected[1].sqrt() + 1e-8))


@dataclass
class Agent:
    actor: nn.Module  # states to (mean, log_std) side by side, each [B, N]
    critics: list[nn.Module]
    log_temperature: nn.Parameter
    learning_rate: float
    discount: float
    tau: float
    target_entropy: float

    def __post_init__(self) -> None:
        self.targets = copy.deepcopy(self.critics)
        self._critic_optimizers = [Adam(list(c.parameters()), self.learning_rate) for c in self.critics]
        self._actor_optimizer = Adam(list(self.actor.parameters()), self.learning_rate)
        self._temperature_optimizer = Adam([self.log_temperature], self.learning_rate)

    def update(self, slices: Sequence[Batch], fault: Fault | None = None) -> None:
        for batch in slices:
            self._update_critics(batch, fault)
            if fault != "target once per step":
                self._update_targets()
        if fault == "target once per step":
            self._update_targets()
        self._update_actor(slices[-1], fault)

    def _act(self, states: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(states).chunk(2, dim=-1)
        log_std = log_std.clamp(-20, 2)
        normal = torch.distributions.Normal(mean, log_std.exp())
        before = mean + log_std.exp() * noise
        log_probs = normal.log_prob(before) - torch.log(1 - before.tanh() ** 2)  # type: ignore[no-untyped-call]
        return before.tanh(), log_probs.sum(-1)

    def _update_critics(self, batch: Batch, fault: Fault | None) -> None:
        members = batch.members[:-1] if fault == "one critic too few" else batch.members
        masks = batch.masks * (1 - batch.timeouts) if fault == "mask from truncation" else batch.masks
        with torch.no_grad():
            actions, log_probs = self._act(batch.next_states, batch.next_noise)
            joint = torch.cat([batch.next_states, actions], -1)
            values = torch.stack([self.targets[i](joint).squeeze(-1) for i in members]).min(0).values
            target = batch.rewards + self.discount * masks * values
            target -= self.discount * masks * self.log_temperature.exp() * log_probs
        joint = torch.cat([batch.states, batch.actions], -1)
        for critic, optimizer in zip(self.critics, self._critic_optimizers, strict=True):
            error = (critic(joint).squeeze(-1) - target).square().mean()
            optimizer.descend(error / len(self.critics))

    @torch.no_grad()
    def _update_targets(self) -> None:
        for target, critic in zip(self.targets, self.critics, strict=True):
            for average, parameter in zip(target.parameters(), critic.parameters(), strict=True):
                average.copy_(self.tau * parameter + (1 - self.tau) * average)

    def _update_actor(self, batch: Batch, fault: Fault | None) -> None:
        actions, log_probs = self._act(batch.states, batch.noise)
        joint = torch.cat([batch.states, actions], -1)
        values = torch.stack([critic(joint).squeeze(-1) for critic in self.critics])
        followed = values.min(0).values if fault == "actor on the minimum" else values.mean(0)
        self._actor_optimizer.descend((self.log_temperature.exp().detach() * log_probs - followed).mean())
        entropy = -log_probs.detach().mean()
        self._temperature_optimizer.descend(self.log_temperature.exp() * (entropy - self.target_entropy))
