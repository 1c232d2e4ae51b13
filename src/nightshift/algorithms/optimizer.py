"""One gradient at a time: AdamW with warm-up and decay, bounded gradients, and no step on numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from nightshift import config


class Descent:
    """Steps the parameters by the gradients they hold."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: config.Optimizer) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._settings = settings
        self.steps = 0
        self.skipped = 0

    def step(self, progress: float) -> float:
        """The norm of the gradient before it was bounded. If it is not finite the step is skipped and counted."""
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._settings.gradient_norm))
        self.steps += 1
        if not math.isfinite(norm):
            self.skipped += 1
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = self._settings.learning_rate * self._factor(progress)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def gradients(self) -> list[Tensor]:
        """Of every parameter; zeros where nothing has flowed yet."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _factor(self, progress: float) -> float:
        """Up from 1 / warmup to 1, step by step; then constant, or down a half cosine as training comes to its end."""
        warm = min(self.steps / self._settings.warmup, 1.0) if self._settings.warmup else 1.0
        return warm if self._settings.decay == "constant" else warm * 0.5 * (1 + math.cos(math.pi * progress))
