"""The learner of RLPD: critics, temperature and actor, and everything that a resumed run needs of them.

One update belongs to one decision of the actor. With an update-to-data ratio U it is

    critics ─ Polyak ─ critics ─ Polyak ─ … U times, each on its own slice ─▶ actor, temperature on the last slice

An encoder that the policy shares with its critics keeps the clone's weights: the critics' loss would destroy the
features that the clone relies on. Of a policy from scratch it is trained by the critics' loss, and the actor's gradient
stops at it.
`averaged` is an exponential moving average of the policy's weights over its updates: the policy that acts greedily.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nightshift.algorithms.rlpd.critics import CriticEnsemble, polyak_update
from nightshift.algorithms.rlpd.cuda_graph import CudaGraph
from nightshift.algorithms.rlpd.losses import actor_loss, critic_loss, td_target, temperature_loss
from nightshift.algorithms.rlpd.transitions import Transitions
from nightshift.algorithms.strategy import SingleProcess, Trained
from nightshift.errors import ConfigError
from nightshift.policies.base import Inputs
from nightshift.policies.heads import HeadPolicy, TanhGaussianHead

if TYPE_CHECKING:
    from nightshift import config

Metrics = dict[str, Tensor]
"""Scalars by name, on the learner's device: reading one waits for it."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of an update. They come from the CPU, so that every device makes the same draws.

    U critic steps, B transitions each.
    """

    members: Tensor  # [U, K] the critics whose minimum is the target
    next_noise: Tensor  # [U, B, C, A] of the next actions
    noise: Tensor  # [B, C, A] of the actor's actions
    augmentation: Tensor  # [U, 2, B, D] of the observations before and after
    bc_weight: Tensor  # []

    def to(self, device: torch.device) -> Draws:
        moved = (getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__)
        return Draws(*moved)


class Temperature(nn.Module):
    """The weight of the entropy, by its logarithm."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_value = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        return self.log_value.exp()


class RlpdLearner:
    def __init__(
        self,
        policy: HeadPolicy,
        settings: config.Rlpd,
        *,
        seed: int,
        base_entropy: float = 0.0,
        cuda_graphs: bool = True,
    ) -> None:
        """`policy` acts, is trained in place, and is on the learner's device.

        `base_entropy` of a decision is what the target of `settings` is added to. On a GPU an update is recorded once
        as a CUDA graph: its many small operations would wait for Python.
        """
        self.policy = policy
        self._head = _tanh_gaussian(policy)
        self._settings = settings
        self.target_entropy = base_entropy + settings.entropy.target * policy.chunk * policy.action_dim
        """Of a decision."""
        self._strategy = SingleProcess()
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            input_size = policy.critic_size + policy.chunk * policy.action_dim
            self.critics = CriticEnsemble(input_size, settings.critics).to(policy.device)
        self.temperature = Temperature(settings.entropy.initial_temperature).to(policy.device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        shared = policy.encoder_parameters()
        trained_encoder = shared if settings.actor.start == "scratch" else []
        self._trains_encoder = bool(trained_encoder)
        self._target_policy = copy.deepcopy(policy).requires_grad_(False) if self._trains_encoder else policy
        self._target_encoder = self._target_policy.encoder_parameters() if self._trains_encoder else []
        self.averaged = copy.deepcopy(policy).requires_grad_(False)
        self._trained_by_critics = [*self.critics.parameters(), *trained_encoder]
        self._polyak = [*self.target_critics.parameters(), *self._target_encoder]
        own = {id(parameter) for parameter in shared}
        acting = [parameter for parameter in policy.parameters() if id(parameter) not in own]
        self._critic_optimizer = _adam(self._trained_by_critics, settings.critics.learning_rate)
        self._actor_optimizer = _adam(acting, settings.actor.learning_rate)
        self._temperature_optimizer = _adam(list(self.temperature.parameters()), settings.entropy.learning_rate)
        self.actor_updates = 0
        self._graphs: dict[tuple[bool, bool], CudaGraph] | None = (
            {} if cuda_graphs and policy.device.type == "cuda" else None
        )

    def update(self, batch: Transitions, *, train_actor: bool = True) -> Metrics:
        """One critic step per slice of `batch_size`, then one step of the actor and the temperature on the last slice.

        `train_actor` False leaves the actor as it is: that warms up critics and temperature.
        """
        device = self.policy.device
        bc_weight = self._bc_weight() if train_actor else 0.0
        draws = self._draw(len(batch) // self._settings.batch_size, bc_weight).to(device)
        self.actor_updates += train_actor
        if self._graphs is None:
            return self._update(batch.to(device), draws, train_actor=train_actor, clone=bc_weight > 0)
        return self._graph(train_actor, bc_weight > 0)(batch.to(device), draws)

    def state(self) -> dict[str, Tensor]:
        """Copies of everything that a checkpoint must hold, by flat names."""
        averages = {f"averages.{index}": tensor for index, tensor in enumerate(self._averages)}
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in averages.items()}
        counters = {"actor_updates": torch.tensor(self.actor_updates), "generator": self.generator.get_state()}
        return {**self._strategy.state(self._trained), **copied, **counters}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with what `state` returned."""
        self._strategy.restore(tensors, self._trained)
        with torch.no_grad():
            for index, tensor in enumerate(self._averages):
                tensor.copy_(tensors[f"averages.{index}"])
        self.actor_updates = int(tensors["actor_updates"])
        self.generator.set_state(tensors["generator"])
        if self._graphs is not None:
            self._graphs.clear()  # they were recorded with the optimizers' former tensors

    def _update(self, batch: Transitions, draws: Draws, *, train_actor: bool, clone: bool) -> Metrics:
        metrics: Metrics = {}
        part = batch
        for index, one in enumerate(batch.slices(self._settings.batch_size)):
            part = self._augmented(one, draws.augmentation[index])
            metrics = self._update_critics(part, draws.members[index], draws.next_noise[index])
        return {**metrics, **self._update_actor(part, draws, train_actor=train_actor, clone=clone)}

    def _update_critics(self, part: Transitions, members: Tensor, next_noise: Tensor) -> Metrics:
        targets = self._targets(part, members, next_noise)
        with torch.set_grad_enabled(self._trains_encoder):
            features = self.policy.critic_view(self.policy.encode(part.inputs))
        values = self.critics(features, part.actions.flatten(1))
        loss = critic_loss(values, targets)
        _descend(loss, self._critic_optimizer)
        polyak_update(self._polyak, self._trained_by_critics, self._settings.critics.tau)
        return {"critic/loss": loss.detach(), "critic/value": values.detach().mean(), "critic/target": targets.mean()}

    @torch.no_grad()
    def _targets(self, part: Transitions, members: Tensor, next_noise: Tensor) -> Tensor:
        encoded = self.policy.encode(part.next_inputs)
        actions, log_probs = self._head.rsample(self.policy.decode(encoded), next_noise)
        if self._trains_encoder:
            encoded = self._target_policy.encode(part.next_inputs)
        features = self.policy.critic_view(encoded)
        next_values = self.target_critics(features, actions.flatten(1), members)
        cost = self.temperature() * log_probs.sum((1, 2)) if self._settings.entropy.backup else None
        return td_target(part.rewards, part.discounts, next_values, cost)

    def _update_actor(self, part: Transitions, draws: Draws, *, train_actor: bool, clone: bool) -> Metrics:
        """A step of the actor, and one of the temperature for the entropy that the actor had before it."""
        with torch.no_grad():
            encoded = self.policy.encode(part.inputs)
        with torch.set_grad_enabled(train_actor):
            outputs = self.policy.decode(encoded)
            actions, log_probs = self._head.rsample(outputs, draws.noise)
            summed = log_probs.sum((1, 2))
        metrics = {"actor/entropy": -summed.detach().mean()}
        if train_actor:
            with _frozen(self.critics):
                values = self.critics(self.policy.critic_view(encoded), actions.flatten(1))
            loss = actor_loss(values, summed, self.temperature().detach())
            metrics["actor/loss"] = loss.detach()
            if clone:
                mask = self._cloned(part, encoded, values.detach())
                bc_loss = self._head.bc_loss(outputs, part.bc_actions, mask)
                metrics["actor/bc_loss"] = bc_loss.detach()
                loss = loss + draws.bc_weight * bc_loss
            _descend(loss, self._actor_optimizer)
        self._follow(self._settings.actor.ema_decay if train_actor else 0.0)
        temperature = self.temperature()
        _descend(temperature_loss(temperature, summed.detach(), self.target_entropy), self._temperature_optimizer)
        return {**metrics, "actor/temperature": temperature.detach()}

    @torch.no_grad()
    def _cloned(self, part: Transitions, encoded: Tensor, own_values: Tensor) -> Tensor:
        """The actions [B, C] to clone: of those in doubt, the ones that are worth more than the actor's own
        (`own_values` [E, B]), as a Q-filter does (Nair et al. 2018)."""
        if self._settings.interventions.imitate != "better":
            return part.bc_mask
        values: Tensor = self.critics(self.policy.critic_view(encoded), part.actions.flatten(1))
        is_better = values.mean(0) > own_values.mean(0)
        return part.bc_mask & (is_better[:, None] | ~part.bc_filter)

    def _follow(self, decay: float) -> None:
        """While the actor is not trained, the average is the policy itself: critics may train a shared encoder."""
        polyak_update(list(self.averaged.parameters()), list(self.policy.parameters()), 1 - decay)

    def _augmented(self, part: Transitions, draws: Tensor) -> Transitions:
        """Images shifted, each camera and each side of a transition by draws of its own."""
        if not draws.shape[-1]:
            return part
        before, after = draws
        return replace(
            part,
            inputs=self.policy.augment(part.inputs, before),
            next_inputs=self.policy.augment(part.next_inputs, after),
        )

    def _draw(self, steps: int, bc_weight: float) -> Draws:
        """For an update of so many critic steps."""
        rows, critics, generator = self._settings.batch_size, self._settings.critics, self.generator
        shape = (rows, self.policy.chunk, self.policy.action_dim)
        orders = [torch.randperm(critics.num_qs, generator=generator) for _ in range(steps)]
        return Draws(
            members=torch.stack(orders)[:, : critics.num_min_qs],
            next_noise=torch.randn(steps, *shape, generator=generator),
            noise=torch.randn(shape, generator=generator),
            augmentation=torch.rand(steps, 2, rows, self.policy.augmentation_draws, generator=generator),
            bc_weight=torch.tensor(bc_weight),
        )

    def _bc_weight(self) -> float:
        """It falls linearly to zero over `bc_steps` updates of the actor."""
        actor = self._settings.actor
        return actor.bc_weight * max(0.0, 1 - self.actor_updates / actor.bc_steps) if actor.bc_steps else 0.0

    def _graph(self, train_actor: bool, clone: bool) -> CudaGraph:
        assert self._graphs is not None
        key = (train_actor, clone)
        if key not in self._graphs:
            update = partial(self._update, train_actor=train_actor, clone=clone)
            self._graphs[key] = CudaGraph(update, self._changed())
        return self._graphs[key]

    def _changed(self) -> list[Tensor]:
        """All tensors that an update changes in place."""
        optimizers = [optimizer for _, optimizer in self._trained.values()]
        moments = [tensor for o in optimizers for values in o.state.values() for tensor in values.values()]
        return [p for o in optimizers for p in o.param_groups[0]["params"]] + moments + self._averages

    @property
    def _averages(self) -> list[Tensor]:
        return [*self._polyak, *self.averaged.parameters()]

    @property
    def _trained(self) -> Trained:
        return {
            "policy": (self.policy, self._actor_optimizer),
            "critics": (self.critics, self._critic_optimizer),
            "temperature": (self.temperature, self._temperature_optimizer),
        }


@torch.no_grad()
def mean_entropy(policy: HeadPolicy, parts: Iterable[Inputs]) -> float:
    """Of the policy's decisions, over all rows of `parts`."""
    entropies = [
        policy.head.entropy(policy({name: tensor.to(policy.device) for name, tensor in part.items()}), 1.0).sum((1, 2))
        for part in parts
    ]
    return torch.cat(entropies).mean().item()


def _tanh_gaussian(policy: HeadPolicy) -> TanhGaussianHead:
    if not isinstance(policy.head, TanhGaussianHead):
        raise ConfigError(
            "rlpd learns a policy whose actions are a Gaussian through tanh",
            "set policy.head: tanh_gaussian in params.yaml",
        )
    return policy.head


def _adam(parameters: Sequence[nn.Parameter], learning_rate: float) -> torch.optim.Adam:
    """With its moments in place from the start: a CUDA graph must not record how they come to be."""
    on_gpu = parameters[0].device.type == "cuda"
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, fused=True, capturable=on_gpu)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


@contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    """What is computed inside has no gradient for the weights."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)


def _descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step. Only the gradients of the optimizer's own parameters are computed."""
    parameters = optimizer.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = _strided_like(parameter, gradient)
    optimizer.step()


def _strided_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A convolution of images whose channels lie last gives such gradients, too, which fused Adam refuses."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
