"""How well a binary classifier does, and which threshold reaches a precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.errors import DataError
from nightshift.statistics.intervals import CONFIDENCE, Rate

Scores = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """Counts of cases, which the intervals take to be independent."""

    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int

    @classmethod
    def of(cls, scores: Sequence[float], positive: Sequence[bool], threshold: float) -> Confusion:
        accepted, actual = np.asarray(scores) >= threshold, np.asarray(positive, np.bool_)
        return cls(
            true_positives=int((accepted & actual).sum()),
            false_positives=int((accepted & ~actual).sum()),
            false_negatives=int((~accepted & actual).sum()),
            true_negatives=int((~accepted & ~actual).sum()),
        )

    @property
    def precision(self) -> Rate | None:
        """None if nothing is accepted."""
        return _rate(self.true_positives, self.true_positives + self.false_positives)

    @property
    def recall(self) -> Rate | None:
        return _rate(self.true_positives, self.true_positives + self.false_negatives)

    @property
    def false_positive_rate(self) -> Rate | None:
        return _rate(self.false_positives, self.false_positives + self.true_negatives)

    def to_json(self) -> dict[str, Any]:
        rates = {
            "precision": self.precision,
            "recall": self.recall,
            "false_positive_rate": self.false_positive_rate,
        }
        counts = {
            "true_positives": self.true_positives,
            "false_positives": self.false_positives,
            "false_negatives": self.false_negatives,
            "true_negatives": self.true_negatives,
        }
        return {**counts, **{name: None if rate is None else rate.to_json() for name, rate in rates.items()}}


def _rate(part: int, whole: int) -> Rate | None:
    return Rate(part, whole) if whole else None


def threshold_for(scores: Sequence[float], positive: Sequence[bool], precision: float) -> float:
    """The lowest threshold whose precision is at least `precision`, by the lower end of its 95 % interval.

    Candidates are the scores of positives: a threshold at the score of a negative accepts that negative for nothing.
    The result lies half-way to the next score below. DataError if none reaches it. Its interval on the same data is
    optimistic, since it is the first of many that passes: quote the one on other data.
    """
    values, actual = np.asarray(scores, np.float64), np.asarray(positive, np.bool_)
    candidates = sorted(set(values[actual].tolist()))
    for candidate in candidates:
        found = Confusion.of(values.tolist(), actual.tolist(), candidate).precision
        if found is not None and found.low >= precision:
            below = values[values < candidate]
            return _half_way(float(below.max()) if below.size else 0.0, candidate)
    raise _out_of_reach(values, actual, precision, candidates)


def _half_way(lower: float, upper: float) -> float:
    """Above `lower` also where no number lies between the two."""
    middle = (lower + upper) / 2
    return middle if middle > lower else upper


def fewest_positives(precision: float) -> int:
    """As many as must be accepted, without one false positive, for the interval to end above `precision`."""
    from scipy.stats import norm

    z = float(norm.ppf((1 + CONFIDENCE) / 2))
    return math.ceil(z * z * precision / (1 - precision) - 1e-9)


def _out_of_reach(values: Scores, actual: NDArray[np.bool_], precision: float, candidates: list[float]) -> DataError:
    positives, negatives = int(actual.sum()), int((~actual).sum())
    found = [(Confusion.of(values.tolist(), actual.tolist(), one).precision, one) for one in candidates]
    reached = max(((rate.low, rate.rate, one) for rate, one in found if rate is not None), default=(0.0, 0.0, 1.0))
    low, rate, threshold = reached
    needed = fewest_positives(precision)
    more = (
        f"even without a mistake it takes {needed} successes to show that, and there are {positives}: record more "
        "episodes, or raise the share of calibration"
        if positives < needed
        else "record more episodes, above all failures like those it takes for successes; train longer; add a camera"
    )
    return DataError(
        f"no threshold reaches a precision of {precision:.0%} on {positives} successes and {negatives} stretches "
        f"without success: the best is {rate:.0%}, and at least {low:.0%} with {CONFIDENCE:.0%} confidence, at "
        f"{threshold:.3f}",
        f"{more}; or lower the target",
    )
