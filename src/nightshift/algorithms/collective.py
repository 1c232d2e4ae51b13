"""The seam between a learner and the other ranks that train with it, and sums over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Collective(Protocol):
    """Every rank makes the same calls in the same order, also one that has nothing to add."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        ...


class Alone:
    """One process: there is nobody to add up with."""

    rank = 0
    size = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""


class Moments(NamedTuple):
    number: float
    mean: Tensor  # […]
    variance: Tensor  # […] with n in the denominator


def moments(collective: Collective, values: Tensor) -> Moments:
    """Of [N, …] values over all N of all ranks, in double precision."""
    values = values.double()
    sums = torch.cat([values.new_tensor([len(values)]), values.sum(0).flatten(), values.square().sum(0).flatten()])
    collective.sum([sums])
    count = sums[0].item()
    mean, square = (part.reshape(values.shape[1:]) / max(count, 1) for part in sums[1:].chunk(2))
    return Moments(count, mean, (square - mean.square()).clamp(min=0))


class Share(NamedTuple):
    """Which of the samples of all ranks, counted rank by rank, are ours."""

    start: int
    end: int
    total: int

    def of(self, order: Tensor) -> Tensor:
        """Our part of some global numbers, as local ones."""
        return order[(order >= self.start) & (order < self.end)] - self.start


def share(collective: Collective, count: int) -> Share:
    counts = torch.zeros(collective.size, dtype=torch.int64)
    counts[collective.rank] = count
    collective.sum([counts])
    ends = counts.cumsum(0).tolist()
    return Share(ends[collective.rank] - count, ends[collective.rank], ends[-1])
