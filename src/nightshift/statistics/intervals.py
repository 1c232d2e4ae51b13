"""95 % intervals: of a success rate, of the difference of two, and of the mean success of a method over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

CONFIDENCE = 0.95


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
        return self._interval[0]

    @property
    def high(self) -> float:
        return self._interval[1]

    def to_json(self) -> dict[str, float | int]:
        return {
            "successes": self.successes,
            "episodes": self.episodes,
            "rate": self.rate,
            "low": self.low,
            "high": self.high,
        }

    @property
    def _interval(self) -> tuple[float, float]:
        from scipy.stats import binomtest  # takes a second to import, and commands that only show results need none

        found = binomtest(self.successes, self.episodes).proportion_ci(CONFIDENCE, method="wilson")
        return float(found.low), float(found.high)


def of_difference(one: Rate, other: Rate) -> tuple[float, float]:
    """The 95 % interval of the difference of two rates on different states, by Newcombe (1998), his method 10.

    Where both played the same states, `paired.Paired` is narrower.
    """
    gap = one.rate - other.rate
    down = math.hypot(one.rate - one.low, other.high - other.rate)
    up = math.hypot(one.high - one.rate, other.rate - other.low)
    return gap - down, gap + up


def over_runs(scores: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean success of a training method, by Student's t, from one rate per run.

    Runs differ in their seed alone, so the interval covers the variation between seeds. It is wide for three runs, and
    one run gives no estimate of that variation.
    """
    if len(scores) == 1:
        return 0.0, 1.0
    low, high = of_mean(scores)
    return max(0.0, low), min(1.0, high)


def of_mean(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of two or more independent values, by Student's t."""
    from scipy.stats import t as student

    reach = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - reach, mean(values) + reach
