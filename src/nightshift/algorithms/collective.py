"""Sums over the ranks of a data-parallel learner, and what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Collective(Protocol):
    """Every rank makes the same calls in the same order, also a rank that has nothing to add."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        ...


class SingleRank:
    """The collective of a learner in one process: every sum is already complete."""

    rank = 0
    size = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""


@dataclass(frozen=True)
class Moments:
    count: float
    mean: Tensor  # […]
    variance: Tensor  # […] with n in the denominator


def global_moments(collective: Collective, values: Tensor) -> Moments:
    """Moments of [N, …] values over the N of all ranks, in double precision."""
    values = values.double()
    sums = torch.cat([values.new_tensor([len(values)]), values.sum(0).flatten(), values.square().sum(0).flatten()])
    collective.sum([sums])
    count = sums[0].item()
    mean, square = (part.reshape(values.shape[1:]) / max(count, 1) for part in sums[1:].chunk(2))
    return Moments(count, mean, (square - mean.square()).clamp(min=0))


class RankSlice(NamedTuple):
    """This rank's samples [start, end) of the `total` of all ranks, numbered rank by rank."""

    start: int
    end: int
    total: int

    def local(self, indices: Tensor) -> Tensor:
        """Those of some global indices that are this rank's, as local indices."""
        return indices[(indices >= self.start) & (indices < self.end)] - self.start


def rank_slice(collective: Collective, count: int) -> RankSlice:
    counts = torch.zeros(collective.size, dtype=torch.int64)
    counts[collective.rank] = count
    collective.sum([counts])
    ends = counts.cumsum(0).tolist()
    return RankSlice(ends[collective.rank] - count, ends[collective.rank], ends[-1])
