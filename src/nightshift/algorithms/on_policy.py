"""On-policy reinforcement learning: RLOO, GRPO, REINFORCE++ and PPO in one update.

They differ in their advantages (estimators.py); the clipped policy-gradient update is the same. Every sum runs over all
ranks, so the update depends neither on the number of ranks nor on the size of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nightshift.algorithms.batch import DecisionBatch, idle
from nightshift.algorithms.collective import RankSlice, global_moments, rank_slice, share_out
from nightshift.algorithms.critic import ValueNetwork
from nightshift.algorithms.estimators import Groups, estimate_advantages
from nightshift.algorithms.objectives import AdaptiveKlCoef, approx_kl, clipped_surrogate, elements, kl_penalty
from nightshift.algorithms.optimizer import ClippedAdamW
from nightshift.algorithms.reference import Reference
from nightshift.algorithms.sft import Demos
from nightshift.algorithms.strategy import SingleProcess, Strategy, Trained
from nightshift.policies.base import Inputs, Policy, to_device

if TYPE_CHECKING:
    from nightshift import config


_TERMS = ("loss", "clip_fraction", "ppo_kl", "entropy", "kl_reference")
_AVERAGED = (*_TERMS, "grad_norm")
_GENERATOR = "generator"


class Iteration(NamedTuple):
    """What a rank learns from in one update."""

    groups: Groups
    """This rank's part; none where the others have all of them."""
    progress: float
    """The share of all iterations that is done, for the schedule."""


class OnPolicyLearner:
    def __init__(
        self,
        policy: Policy,
        settings: config.Rloo,
        generator: torch.Generator,
        *,
        microbatch_size: int,
        demos: Demos | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        """`generator` is in the same state on every rank, so all ranks draw alike; `demos` are for the BC loss."""
        self._strategy = strategy or SingleProcess()
        self.generator = generator
        for parameter in policy.std_parameters():
            parameter.requires_grad_(settings.learn_std)
        self.policy = self._strategy.wrap(policy)
        self._reference = Reference(self.policy, self._strategy) if settings.kl.coef else None
        self.policy_optimizer = ClippedAdamW(self.policy.parameters(), settings.optimizer, self._strategy)
        self.critic: ValueNetwork | None = None
        if settings.advantage_estimator == "gae":
            self.critic = self._strategy.wrap(ValueNetwork(policy.critic_size, settings.critic.hidden))
            of_critic = settings.optimizer.model_copy(update={"learning_rate": settings.critic.learning_rate})
            self.critic_optimizer = ClippedAdamW(self.critic.parameters(), of_critic, self._strategy)
        self.kl_coef = AdaptiveKlCoef(settings.kl.coef, target=settings.kl.target, horizon=settings.kl.horizon)
        self.version = 0
        """Updates so far."""
        self.microbatches = 0
        """Microbatches of all updates so far: rises during an update, so another thread can see that it is alive."""
        self._microbatch_size = microbatch_size
        self._demos = demos
        self._settings = settings
        self._temperature = settings.temperature
        """That the episodes of the current update were sampled at."""

    def update(self, iteration: Iteration) -> dict[str, float]:
        groups, progress = iteration
        if groups:
            self._temperature = groups[0][0].request.temperature
        batch = estimate_advantages(
            groups, self.policy, self.critic, self._critic_features, self._settings, self._strategy
        )
        return self.update_on(batch, progress)

    def update_on(self, batch: DecisionBatch, progress: float) -> dict[str, float]:
        """The update on a batch that has advantages. What the mask excludes has no influence, also if it is NaN."""
        batch = batch.with_zero_padding().resident_on(self.policy.device)
        local = rank_slice(self._strategy, len(batch))
        start = self._log_probs(batch)
        deviation = self._rollout_deviation(batch, start)
        if self._recomputes_log_probs:
            batch = batch.with_log_probs(start)
        history, kl = self._optimize_policy(batch, start, local, progress)
        self._optimize_critic(batch, local, progress)
        if history:
            self.kl_coef.observe(_mean(history, "kl_reference"), self._episodes(batch))
        self.version += 1
        return {**self._metrics(history, kl), **deviation}

    @property
    def _recomputes_log_probs(self) -> bool:
        """On a GPU the rollouts' batches have other shapes, and so other rounding, than the learner's. With a staleness
        of 1 another policy acted, whose log-probs only the rollouts have."""
        on_gpu = self.policy.device.type != "cpu" and self._settings.sampling.staleness == 0
        return self._settings.old_log_probs == "recomputed" or on_gpu

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what a checkpoint must hold; `counters` are the rest."""
        return {_GENERATOR: self.generator.get_state(), **self._strategy.state(self.trained)}

    @property
    def counters(self) -> dict[str, float]:
        counters = {
            "version": self.version,
            "kl_coef": self.kl_coef.value,
            "steps": self.policy_optimizer.steps,
            "skipped": self.policy_optimizer.skipped,
        }
        if self.critic is not None:
            counters |= {"critic_steps": self.critic_optimizer.steps, "critic_skipped": self.critic_optimizer.skipped}
        return counters

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None:
        self.generator.set_state(tensors[_GENERATOR])
        self._strategy.restore(tensors, self.trained)
        self.version = int(counters["version"])
        self.kl_coef.value = counters["kl_coef"]
        self.policy_optimizer.steps, self.policy_optimizer.skipped = int(counters["steps"]), int(counters["skipped"])
        if self.critic is not None:
            self.critic_optimizer.steps = int(counters["critic_steps"])
            self.critic_optimizer.skipped = int(counters["critic_skipped"])

    @property
    def trained(self) -> Trained:
        trained: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {
            "policy": (self.policy, self.policy_optimizer.optimizer)
        }
        if self.critic is not None:
            trained["critic"] = (self.critic, self.critic_optimizer.optimizer)
        return trained

    def _optimize_policy(
        self, batch: DecisionBatch, start: Tensor, local: RankSlice, progress: float
    ) -> tuple[list[dict[str, float]], float]:
        """Gradient steps until the last epoch, or target_kl: the terms of each, and the KL from `start` at the end."""
        target_kl, weights = self._settings.target_kl, self._weights(batch)
        self.policy_optimizer.begin_update(progress)
        history: list[dict[str, float]] = []
        kl = 0.0
        for index in self._minibatches(local):
            history.append(self._policy_step(batch, index, weights[index], demos=self._minibatch_size(local.total)))
            if target_kl is not None and (kl := self._approx_kl(batch, start, local)) > target_kl:
                break
        if target_kl is None and history:
            kl = self._approx_kl(batch, start, local)
        return history, kl

    def _optimize_critic(self, batch: DecisionBatch, local: RankSlice, progress: float) -> None:
        if self.critic is None:
            return
        self.critic_optimizer.begin_update(progress)
        for index in self._minibatches(local):
            self._critic_step(self.critic, batch.critic_features[index], batch.returns[index])

    def _minibatches(self, local: RankSlice) -> Iterator[Tensor]:
        """This rank's part of every minibatch; the order is the same on all ranks."""
        for _ in range(self._settings.epochs if local.total else 0):
            order = torch.randperm(local.total, generator=self.generator)
            for part in self._parts(order):
                yield local.local(part)

    def _parts(self, order: Tensor) -> Sequence[Tensor]:
        count = self._settings.num_minibatches
        if count is not None:
            return torch.tensor_split(order, min(count, len(order)))
        return torch.split(order, self._minibatch_size(len(order)))

    def _minibatch_size(self, decisions: int) -> int:
        """The most decisions of a minibatch, where an epoch has so many."""
        size, count = self._settings.minibatch_size, self._settings.num_minibatches
        if size is not None:
            return size
        assert count is not None  # one of the two is set
        return math.ceil(decisions / count)

    def _weights(self, batch: DecisionBatch) -> Tensor:
        """The weight [N] of each element of a decision: 1, or 1 / the number of elements of its episode."""
        if self._settings.loss_aggregation == "step":
            return torch.ones(len(batch))
        _, counted = self._elements(batch, batch.log_probs)
        sizes = torch.zeros(int(batch.episode.max()) + 1 if len(batch) else 0).index_add_(
            0, batch.episode, counted.sum(1).float()
        )
        return 1 / sizes[batch.episode]

    def _policy_step(self, batch: DecisionBatch, minibatch: Tensor, weights: Tensor, *, demos: int) -> dict[str, float]:
        """One gradient step on the decisions `minibatch` [M] of the batch; the weighted mean of each loss term.

        `demos`: how many of their steps are drawn for the BC loss."""
        _, counted = elements(batch.log_probs[minibatch], batch.mask[minibatch], self._settings.ratio_level)
        total = torch.where(counted, weights[:, None], 0).sum()
        self._strategy.sum([total])
        sums = torch.zeros(len(_TERMS))
        for index in self._microbatches(len(minibatch)):
            own = weights[index] / total if len(index) else torch.zeros(1)
            sums += self._accumulate_gradient(self._or_idle(batch[minibatch[index]]), own).cpu()
        self._accumulate_bc_gradient(demos)
        self._strategy.sum([sums])
        norm = self.policy_optimizer.step()
        return {**dict(zip(_TERMS, sums.tolist(), strict=True)), "grad_norm": norm}

    def _critic_step(self, critic: ValueNetwork, features: Tensor, returns: Tensor) -> None:
        """One gradient step on the squared error of the values."""
        total = torch.tensor(float(len(returns)))
        self._strategy.sum([total])
        for index in self._microbatches(len(returns)):
            loss = (critic(features[index]) - returns[index]).square().sum() / total
            loss.backward()
        self.critic_optimizer.step()

    def _accumulate_gradient(self, microbatch: DecisionBatch, weights: Tensor) -> Tensor:
        """Add one microbatch's gradient of the policy loss; its part of each term's mean."""
        settings = self._settings
        microbatch, weights = microbatch.to(self.policy.device), weights.to(self.policy.device)
        reference = self._reference_log_probs(microbatch)  # before the policy's own pass: it takes other weights
        new, entropies = self.policy.evaluate_actions(microbatch.inputs, microbatch.actions, self._temperature)
        log_probs, counted = self._elements(microbatch, new)
        old_log_probs, _ = self._elements(microbatch, microbatch.log_probs)
        surrogate = clipped_surrogate(log_probs, old_log_probs, microbatch.advantages[:, None], settings.clip)
        entropy, _ = self._elements(microbatch, entropies)
        kl = torch.zeros_like(log_probs) if reference is None else kl_penalty(log_probs, reference, settings.kl.form)
        values = (surrogate.losses, surrogate.clipped, surrogate.ppo_kl, entropy, kl)
        weight = torch.where(counted, weights[:, None], 0)
        terms = [(weight * torch.where(counted, value, 0)).sum() for value in values]
        loss, _, _, mean_entropy, mean_kl = terms
        objective = loss - settings.entropy_coef * mean_entropy + self.kl_coef.value * mean_kl
        objective.backward()  # type: ignore[no-untyped-call]
        return torch.stack(terms).detach()

    def _accumulate_bc_gradient(self, count: int) -> None:
        """Add the gradient of the BC loss on one draw of demos, which the ranks share out."""
        if self._demos is None or not self._settings.bc_weight:
            return
        chosen = torch.randint(len(self._demos), (count,), generator=self.generator)
        draws = torch.rand(len(chosen), self.policy.loss_draws, generator=self.generator)
        total = self._demos.mask[chosen].sum()
        local = share_out(self._strategy, len(chosen))
        for index in self._microbatches(local.end - local.start):
            own = local.start + index if len(index) else torch.zeros(1, dtype=torch.long)
            demos = self._demos[chosen[own]].with_loss_draws(self.policy, draws[own]).to(self.policy.device)
            loss = self.policy.bc_loss(demos.inputs, demos.actions, demos.mask)
            share = demos.mask.sum() / total if len(index) else 0.0
            weighted = loss * self._settings.bc_weight * share
            weighted.backward()  # type: ignore[no-untyped-call]

    def _reference_log_probs(self, batch: DecisionBatch) -> Tensor | None:
        """Of every element; None without a reference policy."""
        if self._reference is None:
            return None
        log_probs = self._reference.log_prob(batch.inputs, batch.actions, self._temperature)
        return self._elements(batch, log_probs)[0]

    def _elements(self, batch: DecisionBatch, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        return elements(log_probs, batch.mask, self._settings.ratio_level)

    @torch.no_grad()
    def _log_probs(self, batch: DecisionBatch) -> Tensor:
        """Of a whole batch under the policy as it is now."""
        parts = []
        for index in self._microbatches(len(batch)):
            part = self._or_idle(batch[index]).to(self.policy.device)
            log_probs = self.policy.log_prob(part.inputs, part.actions, self._temperature)
            parts.append(log_probs[: len(index)].cpu())
        return torch.cat([batch.log_probs[:0], *parts])

    @torch.no_grad()
    def _critic_features(self, inputs: Inputs, count: int) -> Tensor:
        parts = []
        for index in self._microbatches(count):
            # A pass without data sees zeros of the same names: with and without latents other weights are used.
            seen = {name: t[index] if len(index) else t.new_zeros(1, *t.shape[1:]) for name, t in inputs.items()}
            features = self.policy.critic_features(to_device(seen, self.policy.device))
            parts.append(features[: len(index)].float().cpu())
        return torch.cat([torch.zeros(0, self.policy.critic_size), *parts])

    def _microbatches(self, count: int) -> Iterator[Tensor]:
        """The indices of `count` samples in parts that fit into memory, and an empty part for every further pass that
        the strategy makes."""
        parts = torch.split(torch.arange(count), self._microbatch_size) if count else ()
        for number in range(self._strategy.passes(len(parts))):
            yield parts[number] if number < len(parts) else torch.arange(0)
            self.microbatches += 1

    @cached_property
    def _idle(self) -> DecisionBatch:
        return idle(self.policy)

    def _or_idle(self, microbatch: DecisionBatch) -> DecisionBatch:
        """In a pass without data the policy runs all the same: what FSDP sums in it waits for every rank."""
        return microbatch if len(microbatch) else self._idle

    @torch.no_grad()
    def _approx_kl(self, batch: DecisionBatch, start: Tensor, local: RankSlice) -> float:
        """The mean KL per decision from the policy that the update started with."""
        new, _ = elements(self._log_probs(batch), batch.mask, "chunk")
        old, _ = elements(start, batch.mask, "chunk")
        total = approx_kl(new, old).sum()
        self._strategy.sum([total])
        return total.item() / local.total

    def _rollout_deviation(self, batch: DecisionBatch, start: Tensor) -> dict[str, float]:
        """How far the rollout's probabilities are from those that the learner computes of the same policy: by rounding,
        or more, where what acts differs from what learns."""
        new, counted = self._elements(batch, start)
        old, _ = self._elements(batch, batch.log_probs)
        moments = global_moments(self._strategy, (new - old)[counted].expm1().abs())
        return {
            "update/rollout_deviation": moments.mean.item(),
            "update/rollout_deviation_std": moments.variance.sqrt().item(),
        }

    def _episodes(self, batch: DecisionBatch) -> int:
        """The number of episodes of all ranks."""
        count = torch.tensor(len(torch.unique(batch.episode)))
        self._strategy.sum([count])
        return int(count)

    def _metrics(self, history: Sequence[Mapping[str, float]], kl: float) -> dict[str, float]:
        count = len(history)
        means = {name: _mean(history, name) if count else 0.0 for name in _AVERAGED}
        of_critic = {} if self.critic is None else {"update/critic_skipped_steps": float(self.critic_optimizer.skipped)}
        return {
            "update/gradients": float(count),
            "update/kl": kl,
            "update/kl_coef": self.kl_coef.value,
            "update/skipped_steps": float(self.policy_optimizer.skipped),
            **of_critic,
            **{f"update/{name}": mean for name, mean in means.items()},
        }


def _mean(history: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(entry[name] for entry in history) / len(history)
