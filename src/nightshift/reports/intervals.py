"""How sure a success rate is: of one policy, and of a way to train, of which policies are samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Rate:
    """Successes out of episodes, with the 95 % Wilson interval."""

    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        return self.successes / self.episodes

    @property
    def low(self) -> float:
        return max(0.0, self._centre - self._half_width)

    @property
    def high(self) -> float:
        return min(1.0, self._centre + self._half_width)

    def to_json(self) -> dict[str, float | int]:
        return {
            "successes": self.successes,
            "episodes": self.episodes,
            "rate": self.rate,
            "low": self.low,
            "high": self.high,
        }

    @property
    def _centre(self) -> float:
        return (self.rate + Z95**2 / (2 * self.episodes)) / (1 + Z95**2 / self.episodes)

    @property
    def _half_width(self) -> float:
        spread = self.rate * (1 - self.rate) / self.episodes + Z95**2 / (4 * self.episodes**2)
        return Z95 * math.sqrt(spread) / (1 + Z95**2 / self.episodes)


def over_runs(scores: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of `scores` [runs, tasks], by a bootstrap that is stratified by task.

    Runs differ in their seed alone. Resampling them task by task keeps every task in every resample, so the interval
    tells what other seeds could have given, and not what other tasks could have. With one run it has no width.
    """
    runs, tasks = scores.shape
    chosen = np.random.default_rng(0).integers(runs, size=(_RESAMPLES, runs, tasks))
    means = np.take_along_axis(scores[None], chosen, axis=1).mean(axis=(1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
