"""What a set of episodes looks like in numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightshift.data.episode import Episode
from nightshift.errors import DataError

BINS = 20

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How often values fall between neighbouring edges; the last bin includes its upper edge."""

    edges: Numbers  # [bins + 1]
    counts: NDArray[np.int64]  # [bins]

    @classmethod
    def of(cls, values: Numbers, bins: int = BINS) -> Histogram:
        """Bins of equal width; values that are all the same, or too near each other to divide, get one bin."""
        low, high = float(values.min()), float(values.max())
        edges = np.linspace(low, high, bins + 1)
        if not (np.diff(edges) > 0).all():
            return cls(edges=np.array([low, high]), counts=np.array([len(values)]))
        return cls(edges=edges, counts=np.histogram(values, edges)[0])

    @classmethod
    def of_counts(cls, values: Numbers, bins: int = BINS) -> Histogram:
        """As `of`, but whole numbers get bins of whole width."""
        low, high = float(values.min()), float(values.max())
        if low == high or np.mod(values, 1).any():
            return cls.of(values, bins)
        width = int(np.ceil((high - low + 1) / bins))
        edges = np.arange(low, high + width + 1, width, dtype=np.float64)
        return cls(edges=edges, counts=np.histogram(values, edges)[0])


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One number per episode."""

    smallest: float
    median: float
    mean: float
    largest: float
    histogram: Histogram

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        numbers = np.asarray(values, np.float64)
        return cls(
            smallest=float(numbers.min()),
            median=float(np.median(numbers)),
            mean=float(numbers.mean()),
            largest=float(numbers.max()),
            histogram=Histogram.of_counts(numbers),
        )


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One dimension of the actions, over every step at which somebody acted."""

    smallest: float
    mean: float
    std: float
    largest: float
    histogram: Histogram


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of steps only those count at which somebody acted: all but the last of an episode."""

    tasks: dict[str, int]  # episodes of each
    sources: dict[str, int]
    episodes: int
    steps: int
    successes: int
    terminated: int
    interventions: int  # steps at which a person overruled whoever acted
    lengths: Spread  # actions per episode
    returns: Spread  # sum of an episode's rewards, not discounted
    actions: Sequence[Dimension]

    @property
    def intervention_share(self) -> float:
        return self.interventions / self.steps if self.steps else 0.0


def compute(episodes: Iterable[Episode]) -> Statistics:
    """Goes through the episodes once, and keeps only what is small of each."""
    found = [_Brief.of(episode) for episode in episodes]
    if not found:
        raise DataError("there are no episodes")
    actions = np.concatenate([brief.actions for brief in found])
    return Statistics(
        tasks=dict(sorted(Counter(brief.task for brief in found).items())),
        sources=dict(sorted(Counter(brief.source for brief in found).items())),
        episodes=len(found),
        steps=len(actions),
        successes=sum(brief.success for brief in found),
        terminated=sum(brief.terminated for brief in found),
        interventions=sum(brief.interventions for brief in found),
        lengths=Spread.of([len(brief.actions) for brief in found]),
        returns=Spread.of([brief.reward for brief in found]),
        actions=[_dimension(values) for values in actions.T] if len(actions) else [],
    )


@dataclass(frozen=True, kw_only=True)
class _Brief:
    """What of one episode is counted."""

    task: str
    source: str
    success: bool
    terminated: bool
    interventions: int
    reward: float
    actions: Numbers  # [N - 1, A]

    @classmethod
    def of(cls, episode: Episode) -> _Brief:
        acted = episode.actions[:-1]
        return cls(
            task=episode.provenance.task,
            source=episode.provenance.source,
            success=episode.success,
            terminated=episode.terminated,
            interventions=int(episode.interventions[:-1].sum()),
            reward=float(episode.rewards[:-1].sum(dtype=np.float64)),
            actions=acted.reshape(len(acted), math.prod(acted.shape[1:])).astype(np.float64),
        )


def _dimension(values: Numbers) -> Dimension:
    return Dimension(
        smallest=float(values.min()),
        mean=float(values.mean()),
        std=float(values.std()),
        largest=float(values.max()),
        histogram=Histogram.of(values),
    )
