"""AdamW with a learning-rate schedule and gradient clipping, which skips gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from nightshift.algorithms.strategy import Strategy

if TYPE_CHECKING:
    from nightshift import config


class ClippedAdamW:
    """Call `begin_update` once per iteration, then `step` after every backward pass."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: config.Optimizer, strategy: Strategy) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._settings = settings
        self._strategy = strategy
        self.steps = 0
        """Steps taken; the position of the schedule, which a checkpoint must hold."""
        self.skipped = 0
        """Gradients that were not finite. They do not advance the schedule."""
        self.begin_update(progress=0.0)

    def begin_update(self, progress: float) -> None:
        """`progress` is the share of all iterations that is done; the cosine schedule is constant within one."""
        factor = partial(lr_factor, progress=progress, settings=self._settings)
        self._scheduler = LambdaLR(self.optimizer, factor, last_epoch=self.steps - 1)

    def step(self) -> float:
        """Apply the sum of all ranks' gradients; its norm before clipping."""
        self._strategy.sum_gradients(self._parameters)
        norm = self._strategy.clip_gradients(self._parameters, self._settings.max_grad_norm)
        if math.isfinite(norm):
            self.optimizer.step()
            self._scheduler.step()
            self.steps += 1
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        return norm


def lr_factor(step: int, progress: float, settings: config.Optimizer) -> float:
    """Linear warm-up from 1 / warmup_steps to 1 over steps, times 1 or a half cosine over `progress`."""
    warmup = min((step + 1) / settings.warmup_steps, 1.0) if settings.warmup_steps else 1.0
    return warmup if settings.schedule == "constant" else warmup * 0.5 * (1 + math.cos(math.pi * progress))
