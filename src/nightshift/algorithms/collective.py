"""What is computed from sums over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nightshift.algorithms.strategy import Strategy


@dataclass(frozen=True)
class Moments:
    count: float
    mean: Tensor  # […]
    variance: Tensor  # […] with n in the denominator


def global_moments(strategy: Strategy, values: Tensor) -> Moments:
    """Moments of [N, …] values over the N of all ranks, in double precision."""
    values = values.double()
    sums = torch.cat([values.new_tensor([len(values)]), values.sum(0).flatten(), values.square().sum(0).flatten()])
    strategy.sum([sums])
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


def rank_slice(strategy: Strategy, count: int) -> RankSlice:
    """Where this rank has `count` samples of its own."""
    counts = torch.zeros(strategy.size, dtype=torch.int64)
    counts[strategy.rank] = count
    strategy.sum([counts])
    ends = counts.cumsum(0).tolist()
    return RankSlice(ends[strategy.rank] - count, ends[strategy.rank], ends[-1])


def share_out(strategy: Strategy, total: int) -> RankSlice:
    """Where all ranks know the same `total` samples: parts that differ by one sample at most."""
    smaller, larger = divmod(total, strategy.size)
    start = strategy.rank * smaller + min(strategy.rank, larger)
    return RankSlice(start, start + smaller + (strategy.rank < larger), total)
