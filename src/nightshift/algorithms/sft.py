"""Supervised fine-tuning: behaviour cloning of demos.

Every rank draws the same batches and reads its part of each. Every sum runs over all ranks, so a step depends neither
on the number of ranks nor on the size of a microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from nightshift.algorithms.collective import rank_slice, share_out
from nightshift.algorithms.strategy import SingleProcess, Strategy, Trained
from nightshift.policies.base import Inputs, Policy, with_loss_draws
from nightshift.types import Array, Observation

if TYPE_CHECKING:
    from nightshift import config

Observe = Callable[[NDArray[np.int64]], Observation]
"""The observations of some steps of the demos, by their numbers."""

_GENERATOR = "generator"
"""The name of the state of the loader's random generator in a checkpoint."""
_AHEAD = 4
"""Batches that are read ahead, each by a thread: to gather the images of one may take longer than a step on a GPU."""


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


class _Ahead(NamedTuple):
    """A batch that is being read."""

    batch: Future[DemoBatch]
    state: Tensor
    """Of the generator, after drawing it."""


class DemoLoader:
    """Endless batches of randomly drawn steps, of which each rank reads its part. The next batches are read while the
    learner works on the present one."""

    def __init__(
        self, demos: Demos, batch_size: int, generator: torch.Generator, strategy: Strategy, *, pin: bool
    ) -> None:
        """`generator` is in the same state on every rank, so all ranks draw alike."""
        self._demos = demos
        self._batch_size = batch_size
        self._own = share_out(strategy, batch_size)
        self._generator = generator
        self._pin = pin
        self._executor = ThreadPoolExecutor(_AHEAD)  # its threads end when the loader is not used any more
        self._ahead: deque[_Ahead] = deque()
        self.state = generator.get_state()
        """Of the generator, after drawing the batch that was handed out last: what a checkpoint must hold."""

    def take(self) -> DemoBatch:
        """This rank's part of the next batch."""
        while len(self._ahead) <= _AHEAD:
            self._ahead.append(self._prefetch())
        batch = self._ahead[0].batch.result()
        self.state = self._ahead.popleft().state
        return batch

    def restore(self, state: Tensor) -> None:
        self._generator.set_state(state)
        self.state = state
        while self._ahead:
            self._ahead.pop().batch.cancel()

    def _prefetch(self) -> _Ahead:
        index = torch.randint(len(self._demos), (self._batch_size,), generator=self._generator)
        reading = self._executor.submit(self._read, index[self._own.start : self._own.end])
        return _Ahead(reading, self._generator.get_state())

    def _read(self, index: Tensor) -> DemoBatch:
        batch = self._demos[index]
        return batch.pinned() if self._pin else batch


class SftOptimizer:
    """Gradient steps on batches of demos."""

    def __init__(
        self, policy: Policy, settings: config.Sft, *, microbatch_size: int, strategy: Strategy | None = None
    ) -> None:
        self.strategy = strategy or SingleProcess()
        self.policy = self.strategy.wrap(policy)
        self._parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(self._parameters, lr=settings.learning_rate)
        self.settings = settings
        self.steps = 0
        """Gradient steps so far."""
        self.microbatches = 0
        """Microbatches so far: rises during a step, so another thread can see that it is alive."""
        self._microbatch_size = microbatch_size
        self._scheduler = self._schedule(0)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what a checkpoint must hold."""
        return self.strategy.state(self.trained)

    def resume(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Continue with what `tensors` returned after `steps` updates."""
        self.strategy.restore(tensors, self.trained)
        self.steps = steps
        self._scheduler = self._schedule(steps)

    def update(self, batch: DemoBatch, generator: torch.Generator) -> Tensor:
        """One gradient step on a batch, of which this rank has a part that is not empty; its part of the loss.

        `generator` draws the augmentation and what the loss needs, and is in the same state on every rank.
        """
        self.optimizer.zero_grad()
        own = rank_slice(self.strategy, len(batch))
        total = batch.mask.sum().double()
        self.strategy.sum([total])
        augmentation = torch.rand(own.total, self.policy.augmentation_draws, generator=generator)[own.start : own.end]
        draws = torch.rand(own.total, self.policy.loss_draws, generator=generator)[own.start : own.end]
        batch = batch.with_loss_draws(self.policy, draws)
        loss = torch.zeros((), device=self.policy.device)
        for rows, weight in self._passes(0, len(batch)):
            share = weight * batch.mask[rows].sum().item() / total.item()
            part = batch[rows].to(self.policy.device)
            inputs = self.policy.augment(part.inputs, augmentation[rows])
            part_loss = self.policy.bc_loss(inputs, part.actions, part.mask) * share
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += part_loss.detach()
        self.strategy.sum_gradients(self._parameters)
        self.optimizer.step()
        self._scheduler.step()
        self.steps += 1
        return loss

    @torch.no_grad()
    def loss(self, demos: Demos) -> float:
        """Over all steps of `demos`, without augmentation, and with the same draws every time."""
        draws = torch.rand(len(demos), self.policy.loss_draws, generator=torch.Generator().manual_seed(0))
        own = share_out(self.strategy, len(demos))
        sums = torch.zeros(2, dtype=torch.float64)
        for rows, weight in self._passes(own.start, own.end):
            index = torch.arange(len(demos))[rows]
            sums += weight * self._weighted_loss(demos[index].with_loss_draws(self.policy, draws[index]))
        self.strategy.sum([sums])
        loss, count = sums.tolist()
        return float(loss / count)

    def _weighted_loss(self, batch: DemoBatch) -> Tensor:
        """The loss times the number of actions, and that number: [2]."""
        count = batch.mask.sum().item()
        batch = batch.to(self.policy.device)
        loss = self.policy.bc_loss(batch.inputs, batch.actions, batch.mask).item()
        return torch.tensor([loss * count, count], dtype=torch.float64)

    def _passes(self, start: int, end: int) -> Iterator[tuple[slice, float]]:
        """Samples `start` to `end` in parts that fit into memory, with a weight of 1. For every further pass that the
        strategy makes, the first sample with a weight of 0."""
        starts = range(start, end, self._microbatch_size)
        for number in range(self.strategy.passes(len(starts))):
            if number < len(starts):
                yield slice(starts[number], min(starts[number] + self._microbatch_size, end)), 1.0
            else:
                yield slice(0, 1), 0.0
            self.microbatches += 1

    @property
    def trained(self) -> Trained:
        return {"policy": (self.policy, self.optimizer)}

    def _schedule(self, step: int) -> LambdaLR:
        """The learning rate rises linearly during the warm-up, and falls linearly to zero over all steps."""
        warmup, steps = self.settings.warmup_steps, self.settings.steps
        return LambdaLR(
            self.optimizer,
            lambda done: min((done + 1) / (warmup + 1), 1.0) * (1 - done / max(steps, 1)),
            last_epoch=step - 1,
        )


@dataclass(frozen=True)
class SftSteps:
    """What every rank does in one update."""

    count: int
    """Gradient steps."""
    validate: bool
    """Compute the validation loss after them."""


class SftLearner:
    """Draws batches of demos, steps on them, and validates."""

    def __init__(
        self, optimizer: SftOptimizer, demos: Mapping[Literal["train", "validation"], Demos], *, seed: int
    ) -> None:
        self._optimizer = optimizer
        self._validation = demos["validation"]
        self._seed = seed
        self._loader = DemoLoader(
            demos["train"],
            optimizer.settings.batch_size,
            torch.Generator().manual_seed(seed),
            optimizer.strategy,
            pin=optimizer.policy.device.type == "cuda",
        )

    def update(self, steps: SftSteps) -> dict[str, float]:
        """The training loss of the last step, and the validation loss after it if demos were held back."""
        losses = [self._step() for _ in range(steps.count)]
        metrics = {}
        if losses:
            last = losses[-1].cpu()
            self._optimizer.strategy.sum([last])
            metrics["sft/loss"] = last.item()
        if steps.validate and len(self._validation):
            metrics["sft/validation_loss"] = self._optimizer.loss(self._validation)
        return metrics

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what a checkpoint must hold; `counters` are the rest."""
        return {_GENERATOR: self._loader.state, **self._optimizer.tensors()}

    @property
    def counters(self) -> dict[str, float]:
        return {"version": self.version}

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None:
        self._loader.restore(tensors[_GENERATOR])
        self._optimizer.resume(tensors, int(counters["version"]))

    @property
    def policy(self) -> Policy:
        return self._optimizer.policy

    @property
    def trained(self) -> Trained:
        return self._optimizer.trained

    @property
    def version(self) -> int:
        """Gradient steps so far."""
        return self._optimizer.steps

    @property
    def microbatches(self) -> int:
        return self._optimizer.microbatches

    def _step(self) -> Tensor:
        return self._optimizer.update(self._loader.take(), _augmentation(self._seed, self._optimizer.steps))


def _augmentation(seed: int, step: int) -> torch.Generator:
    """It follows from the step, so that no checkpoint needs its state. On the CPU torch uses 32 bits of a seed."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, step]).generate_state(1)[0]))
