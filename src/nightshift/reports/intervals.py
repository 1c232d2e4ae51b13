"""How sure a success rate is: of one policy, and of a way to train, of which policies are samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from scipy.stats import t as student

Z95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""


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


def over_runs(scores: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean success of a way to train, by Student's t, from one rate per run.

    Runs differ in their seed alone: the interval tells what other seeds could have given. Three are few, so it is wide;
    one says nothing about others.
    """
    if len(scores) == 1:
        return 0.0, 1.0
    reach = float(student.ppf(0.975, len(scores) - 1)) * stdev(scores) / math.sqrt(len(scores))
    return max(0.0, mean(scores) - reach), min(1.0, mean(scores) + reach)
