"""Supervised fine-tuning: behaviour cloning of demos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from nightshift.algorithms.strategy import SingleProcess, Trained
from nightshift.policies.base import Inputs, Policy, to_device
from nightshift.types import Array, Observation

if TYPE_CHECKING:
    from nightshift import config

Observe = Callable[[NDArray[np.int64]], Observation]
"""The observations of some steps of the demos, by their numbers."""


@dataclass(frozen=True)
class DemoBatch:
    """B steps of demos."""

    inputs: Inputs  # each [B, …]
    actions: Tensor  # [B, C, A] the chunk that follows each step
    mask: Tensor  # [B, C] true for actions of the chunk before the episode's end: its first one at least

    def to(self, device: torch.device) -> DemoBatch:
        return DemoBatch(to_device(self.inputs, device), self.actions.to(device), self.mask.to(device))


class Demos:
    """All steps of demos. Observations are read when they are drawn: images of all steps may not fit into memory."""

    def __init__(self, policy: Policy, observe: Observe, actions: Array, mask: NDArray[np.bool_]) -> None:
        self._policy = policy
        self._observe = observe
        self._actions = torch.tensor(actions)
        self.mask = torch.tensor(mask)

    def __getitem__(self, index: Tensor) -> DemoBatch:
        return DemoBatch(self._policy.inputs(self._observe(index.numpy())), self._actions[index], self.mask[index])

    def __len__(self) -> int:
        return len(self._actions)


class SftLearner:
    def __init__(self, policy: Policy, settings: config.Sft, *, microbatch_size: int) -> None:
        self._strategy = SingleProcess()
        self.policy = self._strategy.wrap(policy)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.learning_rate)
        self._settings = settings
        self._microbatch_size = microbatch_size
        self._scheduler = self._schedule(0)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what a checkpoint must hold."""
        return self._strategy.state(self._trained)

    def resume(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Continue with what `tensors` returned after `step` updates."""
        self._strategy.restore(tensors, self._trained)
        self._scheduler = self._schedule(step)

    def update(self, demos: Demos, index: Tensor, generator: torch.Generator) -> Tensor:
        """One gradient step on the steps `index` of the demos; its loss. `generator` draws the augmentation."""
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.policy.device)
        for batch, share in self._microbatches(demos, index):
            inputs = self.policy.augment(batch.inputs, generator)
            part = self.policy.bc_loss(inputs, batch.actions, batch.mask) * share
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        self.optimizer.step()
        self._scheduler.step()
        return loss

    @torch.no_grad()
    def loss(self, demos: Demos) -> float:
        """Over all steps of `demos`, without augmentation."""
        parts = self._microbatches(demos, torch.arange(len(demos)))
        return float(sum(self.policy.bc_loss(b.inputs, b.actions, b.mask) * share for b, share in parts))

    def _microbatches(self, demos: Demos, index: Tensor) -> Iterator[tuple[DemoBatch, float]]:
        """Parts that fit into memory, on the policy's device, each with its share of the actions."""
        total = demos.mask[index].sum().item()
        for part in torch.split(index, self._microbatch_size):
            batch = demos[part]
            yield batch.to(self.policy.device), batch.mask.sum().item() / total

    @property
    def _trained(self) -> Trained:
        return {"policy": (self.policy, self.optimizer)}

    def _schedule(self, step: int) -> LambdaLR:
        """The learning rate rises linearly during the warm-up, and falls linearly to zero over all steps."""
        warmup, steps = self._settings.warmup_steps, self._settings.steps
        return LambdaLR(
            self.optimizer, lambda done: min((done + 1) / (warmup + 1), 1.0) * (1 - done / steps), last_epoch=step - 1
        )
