"""Supervised fine-tuning: behaviour cloning of demos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from nightshift.algorithms.strategy import SingleProcess, Trained
from nightshift.policies.base import Inputs, Policy, with_loss_draws
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

    def __getitem__(self, index: slice) -> DemoBatch:
        return self._map(lambda tensor: tensor[index])

    def __len__(self) -> int:
        return len(self.actions)

    def to(self, device: torch.device) -> DemoBatch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> DemoBatch:
        """In memory from which a copy to a GPU does not wait for the GPU."""
        return self._map(Tensor.pin_memory)

    def with_loss_draws(self, policy: Policy, draws: Tensor) -> DemoBatch:
        """`draws` [B, loss_draws of the policy]."""
        return replace(self, inputs=with_loss_draws(policy, self.inputs, draws))

    def _map(self, change: Callable[[Tensor], Tensor]) -> DemoBatch:
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        return DemoBatch(inputs, change(self.actions), change(self.mask))


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


class DemoLoader:
    """Endless batches of randomly drawn steps. The next one is read while the learner works on the present one."""

    def __init__(self, demos: Demos, batch_size: int, generator: torch.Generator, *, pin: bool) -> None:
        self._demos = demos
        self._batch_size = batch_size
        self._generator = generator
        self._pin = pin
        self._executor = ThreadPoolExecutor(1)
        self._next = self._prefetch()
        self.state = generator.get_state()
        """Of the generator, after drawing the batch that was handed out last: what a checkpoint must hold."""

    def __enter__(self) -> DemoLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def take(self) -> DemoBatch:
        batch, self.state = self._next.result(), self._generator.get_state()
        self._next = self._prefetch()
        return batch

    def _prefetch(self) -> Future[DemoBatch]:
        index = torch.randint(len(self._demos), (self._batch_size,), generator=self._generator)
        return self._executor.submit(self._read, index)

    def _read(self, index: Tensor) -> DemoBatch:
        batch = self._demos[index]
        return batch.pinned() if self._pin else batch


class SftLearner:
    def __init__(self, policy: Policy, settings: config.Sft, *, microbatch_size: int) -> None:
        self._strategy = SingleProcess()
        self.policy = self._strategy.wrap(policy)
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=settings.learning_rate)
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

    def update(self, batch: DemoBatch, generator: torch.Generator) -> Tensor:
        """One gradient step; its loss. `generator` draws the augmentation and what the loss needs."""
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.policy.device)
        draws = torch.rand(len(batch), self.policy.augmentation_draws, generator=generator)
        batch = batch.with_loss_draws(self.policy, torch.rand(len(batch), self.policy.loss_draws, generator=generator))
        microbatches = zip(self._microbatches(batch), torch.split(draws, self._microbatch_size), strict=True)
        for (part, share), own in microbatches:
            inputs = self.policy.augment(part.inputs, own)
            part_loss = self.policy.bc_loss(inputs, part.actions, part.mask) * share
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += part_loss.detach()
        self.optimizer.step()
        self._scheduler.step()
        return loss

    @torch.no_grad()
    def loss(self, demos: Demos) -> float:
        """Over all steps of `demos`, without augmentation, and with the same draws every time."""
        draws = torch.rand(len(demos), self.policy.loss_draws, generator=torch.Generator().manual_seed(0))
        sums = [
            self._weighted_loss(demos[index].with_loss_draws(self.policy, draws[index]))
            for index in torch.split(torch.arange(len(demos)), self._microbatch_size)
        ]
        return sum(loss for loss, _ in sums) / sum(count for _, count in sums)

    def _weighted_loss(self, batch: DemoBatch) -> tuple[float, float]:
        """The loss times the number of actions, and that number."""
        count = batch.mask.sum().item()
        batch = batch.to(self.policy.device)
        return self.policy.bc_loss(batch.inputs, batch.actions, batch.mask).item() * count, count

    def _microbatches(self, batch: DemoBatch) -> Iterator[tuple[DemoBatch, float]]:
        """Parts that fit into memory, on the policy's device, each with its share of the actions."""
        total = batch.mask.sum().item()
        for start in range(0, len(batch), self._microbatch_size):
            part = batch[start : start + self._microbatch_size]
            yield part.to(self.policy.device), part.mask.sum().item() / total

    @property
    def _trained(self) -> Trained:
        return {"policy": (self.policy, self.optimizer)}

    def _schedule(self, step: int) -> LambdaLR:
        """The learning rate rises linearly during the warm-up, and falls linearly to zero over all steps."""
        warmup, steps = self._settings.warmup_steps, self._settings.steps
        return LambdaLR(
            self.optimizer,
            lambda done: min((done + 1) / (warmup + 1), 1.0) * (1 - done / max(steps, 1)),
            last_epoch=step - 1,
        )
