"""Learning from episodes that the policy itself has just played: RLOO, GRPO, REINFORCE++ and PPO in one update.

They differ in the credit a decision gets (credit.py); what is then done with it is the same. Every sum runs over all
ranks, so that the update does not depend on how many there are, nor on how much of a minibatch fits into memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nightshift.algorithms.batch import Batch
from nightshift.algorithms.collective import Alone, Collective, Share, share
from nightshift.algorithms.critics import Critic
from nightshift.algorithms.estimators import Groups, credited
from nightshift.algorithms.objectives import (
    AdaptiveWeight,
    Clip,
    clipped_surrogate,
    elements,
    kl_divergence,
    kl_penalty,
)
from nightshift.algorithms.optimizer import Descent
from nightshift.algorithms.sft import Demos
from nightshift.policies.base import Policy

if TYPE_CHECKING:
    from nightshift import config


_TERMS = ("loss", "clipped", "ppo_kl", "entropy", "kl_reference")
_REPORTED = (*_TERMS, "gradient_norm")


class OnPolicyLearner:
    def __init__(
        self,
        policy: Policy,
        settings: config.Rloo,
        generator: torch.Generator,
        *,
        demos: Demos | None = None,
        collective: Collective | None = None,
    ) -> None:
        """`generator` is the same on every rank, and so is every draw from it; `demos` are for imitation."""
        self.policy = policy
        self.generator = generator
        for parameter in policy.width_parameters():
            parameter.requires_grad_(settings.learn_width)
        self.descent = Descent(policy.parameters(), settings.optimizer)
        self.critic: Critic | None = None
        if settings.advantage == "gae":
            self.critic = Critic(policy.feature_size, settings.critic.hidden)
            rate = settings.optimizer.model_copy(update={"learning_rate": settings.critic.learning_rate})
            self.critic_descent = Descent(self.critic.parameters(), rate)
        self.kl_weight = AdaptiveWeight(settings.kl.weight, target=settings.kl.target, horizon=settings.kl.horizon)
        self._reference = copy.deepcopy(policy).requires_grad_(False) if settings.kl.weight else None
        self.version = 0
        """Updates so far."""
        self.pieces = 0
        """Of all updates so far: moves while an update does, for another thread to watch."""
        self._demos = demos
        self._settings = settings
        self._clip = Clip(**settings.clip.model_dump())
        self._collective = collective or Alone()

    def update(self, groups: Groups, progress: float) -> dict[str, float]:
        """Move the policy towards what worked; `progress` is the share of training that is behind, for the decay."""
        batch = credited(groups, self.policy, self.critic, self._settings, self._collective)
        ours = share(self._collective, len(batch))
        start = self._log_probs(batch)
        if self._settings.old_log_probs == "recomputed":
            batch = batch.with_log_probs(start)
        history, moved = self._descend(batch, start, ours, progress)
        if self.critic is not None:
            for index in self._minibatches(ours):
                self._fit(self.critic, batch[index], progress)
        if history:
            self.kl_weight.observe(_mean(history, "kl_reference"), self._episodes(batch))
        self.version += 1
        return self._metrics(history, moved)

    @property
    def trained(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """What a checkpoint must hold of networks; `state` is the rest."""
        networks: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {"policy": (self.policy, self.descent.optimizer)}
        if self.critic is not None:
            networks["critic"] = (self.critic, self.critic_descent.optimizer)
        return networks

    @property
    def state(self) -> dict[str, float]:
        state = {
            "version": self.version,
            "kl_weight": self.kl_weight.value,
            "steps": self.descent.steps,
            "skipped": self.descent.skipped,
        }
        if self.critic is not None:
            state |= {"critic_steps": self.critic_descent.steps, "critic_skipped": self.critic_descent.skipped}
        return state

    def restore(self, state: Mapping[str, float]) -> None:
        self.version = int(state["version"])
        self.kl_weight.value = state["kl_weight"]
        self.descent.steps, self.descent.skipped = int(state["steps"]), int(state["skipped"])
        if self.critic is not None:
            self.critic_descent.steps = int(state["critic_steps"])
            self.critic_descent.skipped = int(state["critic_skipped"])

    def _descend(
        self, batch: Batch, start: Tensor, ours: Share, progress: float
    ) -> tuple[list[dict[str, float]], float]:
        """Gradients until the last one, or the limit: what each came to, and how far from `start` they led."""
        limit, weights = self._settings.kl_limit, self._weights(batch)
        history: list[dict[str, float]] = []
        moved = 0.0
        for index in self._minibatches(ours):
            history.append(self._gradient(batch[index], weights[index], progress))
            if limit is not None and (moved := self._moved(batch, start, ours)) > limit:
                break
        if limit is None and history:
            moved = self._moved(batch, start, ours)
        return history, moved

    def _minibatches(self, ours: Share) -> Iterator[Tensor]:
        """Our part of every minibatch; the same order on all ranks."""
        for _ in range(self._settings.epochs if ours.total else 0):
            order = torch.randperm(ours.total, generator=self.generator)
            for part in torch.split(order, self._settings.mini_batch):
                yield ours.of(part)

    def _weights(self, batch: Batch) -> Tensor:
        """Of each element of a decision [N]: one, or its part of its episode."""
        if self._settings.average == "step":
            return torch.ones(len(batch))
        _, counted = elements(batch.log_probs, batch.mask, self._settings.level)
        sizes = torch.zeros(int(batch.episode.max()) + 1 if len(batch) else 0).index_add_(
            0, batch.episode, counted.sum(1).float()
        )
        return 1 / sizes[batch.episode]

    def _gradient(self, part: Batch, weights: Tensor, progress: float) -> dict[str, float]:
        """One step on one minibatch, piece by piece; what its terms came to on average."""
        _, counted = elements(part.log_probs, part.mask, self._settings.level)
        total = (weights[:, None] * counted).sum()
        self._collective.sum([total])
        sums = torch.zeros(len(_TERMS))
        for piece in self._pieces(len(part)):
            sums += self._backward(part[piece], weights[piece], total)
        self._imitate()
        self._collective.sum([sums, *self.descent.gradients()])
        norm = self.descent.step(progress)
        return {**dict(zip(_TERMS, sums.tolist(), strict=True)), "gradient_norm": norm}

    def _fit(self, critic: Critic, part: Batch, progress: float) -> None:
        """One step of the critic towards what came of it."""
        total = torch.tensor(float(len(part)))
        self._collective.sum([total])
        for piece in self._pieces(len(part)):
            loss = (critic(part.features[piece]) - part.returns[piece]).square().sum() / total
            loss.backward()
        self._collective.sum(self.critic_descent.gradients())
        self.critic_descent.step(progress)

    def _backward(self, part: Batch, weights: Tensor, total: Tensor) -> Tensor:
        """Add the gradient of one piece of a minibatch; its part of every term's average."""
        settings = self._settings
        log_probs, counted = self._elements(part, self._now(part))
        old, _ = self._elements(part, part.log_probs)
        weight = weights[:, None] * counted / total
        surrogate = clipped_surrogate(log_probs, old, part.advantages[:, None], self._clip)
        entropy, _ = self._elements(part, self.policy.entropy(part.features, settings.temperature))
        kl = self._penalty(part, log_probs)
        values = (surrogate.losses, surrogate.clipped, surrogate.ppo_kl, entropy, kl)
        terms = [(weight * value).sum() for value in values]
        loss, _, _, bonus, penalty = terms
        objective = loss - settings.entropy * bonus + self.kl_weight.value * penalty
        objective.backward()  # type: ignore[no-untyped-call]
        return torch.stack(terms).detach()

    def _imitate(self) -> None:
        """Add the gradient of cloning one draw of demos, the same on all ranks; each does its part, piece by piece."""
        if self._demos is None or not self._settings.imitation:
            return
        chosen = torch.randint(len(self._demos), (self._settings.mini_batch,), generator=self.generator)
        total = self._demos.mask[chosen].sum()
        ours = torch.tensor_split(chosen, self._collective.size)[self._collective.rank]
        for piece in self._pieces(len(ours)):
            demos = self._demos[ours[piece]]
            loss = self.policy.imitation_loss(demos.features, demos.actions, demos.mask)
            part_of_it = loss * self._settings.imitation * (demos.mask.sum() / total)
            part_of_it.backward()  # type: ignore[no-untyped-call]

    def _now(self, part: Batch) -> Tensor:
        return self.policy.log_prob(part.features, part.actions, self._settings.temperature)

    def _penalty(self, part: Batch, log_probs: Tensor) -> Tensor:
        """For every element, how far the policy is from the one that training started from; if that matters."""
        if self._reference is None:
            return torch.zeros_like(log_probs)
        with torch.no_grad():
            before = self._reference.log_prob(part.features, part.actions, self._settings.temperature)
        return kl_penalty(log_probs, self._elements(part, before)[0], self._settings.kl.form)

    def _elements(self, part: Batch, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        return elements(log_probs, part.mask, self._settings.level)

    @torch.no_grad()
    def _log_probs(self, batch: Batch) -> Tensor:
        """Under the policy as it is now."""
        return torch.cat([batch.log_probs[:0], *(self._now(batch[piece]) for piece in self._pieces(len(batch)))])

    def _pieces(self, count: int) -> Iterator[Tensor]:
        """What fits into memory at a time."""
        for piece in torch.split(torch.arange(count), self._settings.micro_batch) if count else ():
            yield piece
            self.pieces += 1

    @torch.no_grad()
    def _moved(self, batch: Batch, start: Tensor, ours: Share) -> float:
        """How far, per decision, the policy is from the one that the update began with."""
        new, _ = elements(self._log_probs(batch), batch.mask, "chunk")
        old, _ = elements(start, batch.mask, "chunk")
        total = kl_divergence(new, old).sum()
        self._collective.sum([total])
        return total.item() / ours.total

    def _episodes(self, batch: Batch) -> int:
        """Of all ranks."""
        count = torch.tensor(len(torch.unique(batch.episode)))
        self._collective.sum([count])
        return int(count)

    def _metrics(self, history: Sequence[Mapping[str, float]], moved: float) -> dict[str, float]:
        count = len(history)
        means = {name: _mean(history, name) if count else 0.0 for name in _REPORTED}
        of_critic = {} if self.critic is None else {"update/critic_skipped": float(self.critic_descent.skipped)}
        return {
            "update/gradients": float(count),
            "update/kl": moved,
            "update/kl_weight": self.kl_weight.value,
            "update/skipped": float(self.descent.skipped),
            **of_critic,
            **{f"update/{name}": mean for name, mean in means.items()},
        }


def _mean(history: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(entry[name] for entry in history) / len(history)
