"""Summary statistics of a set of episodes."""

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
    """Counts of values between adjacent edges; the last bin includes its upper edge."""

    edges: Numbers  # [bins + 1]
    counts: NDArray[np.int64]  # [bins]

    @classmethod
    def of(cls, values: Numbers, bins: int = BINS) -> Histogram:
        """Bins of equal width; a single bin if the values are equal or too close to divide."""
        low, high = float(values.min()), float(values.max())
        edges = np.linspace(low, high, bins + 1)
        if not (np.diff(edges) > 0).all():
            return cls(edges=np.array([low, high]), counts=np.array([len(values)]))
        return cls(edges=edges, counts=np.histogram(values, edges)[0])

    @classmethod
    def of_counts(cls, values: Numbers, bins: int = BINS) -> Histogram:
        """As `of`, but integers get bins of integer width."""
        low, high = float(values.min()), float(values.max())
        if low == high or np.mod(values, 1).any():
            return cls.of(values, bins)
        width = int(np.ceil((high - low + 1) / bins))
        edges = np.arange(low, high + width + 1, width, dtype=np.float64)
        return cls(edges=edges, counts=np.histogram(values, edges)[0])


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The distribution of a number that every episode has."""

    smallest: float
    median: float
    mean: float
    largest: float
    histogram: Histogram

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        numbers = np.asarray(values, np.float64)
        return cls(
            smallest=float(numbers.min()),
            median=float(np.median(numbers)),
            mean=float(numbers.mean()),
            largest=float(numbers.max()),
            histogram=Histogram.of_counts(numbers),
        )


@dataclass(frozen=True, kw_only=True)
class ActionDimension:
    """One dimension of the actions, over all steps but the last of each episode."""

    smallest: float
    mean: float
    std: float
    largest: float
    histogram: Histogram


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Only steps with an action count: all but the last step of an episode."""

    tasks: dict[str, int]  # number of episodes
    sources: dict[str, int]
    episodes: int
    steps: int
    successes: int
    terminated: int
    interventions: int  # steps at which a person overrode the policy
    lengths: Distribution  # actions per episode
    returns: Distribution  # undiscounted sum of rewards
    actions: Sequence[ActionDimension]


def compute(episodes: Iterable[Episode]) -> Statistics:
    """Iterate over the episodes once; images are not kept in memory."""
    found = [_EpisodeSummary.of(episode) for episode in episodes]
    if not found:
        raise DataError("there are no episodes")
    actions = np.concatenate([summary.actions for summary in found])
    return Statistics(
        tasks=dict(sorted(Counter(summary.task for summary in found).items())),
        sources=dict(sorted(Counter(summary.source for summary in found).items())),
        episodes=len(found),
        steps=len(actions),
        successes=sum(summary.success for summary in found),
        terminated=sum(summary.terminated for summary in found),
        interventions=sum(summary.interventions for summary in found),
        lengths=Distribution.of([len(summary.actions) for summary in found]),
        returns=Distribution.of([summary.reward for summary in found]),
        actions=[_action_dimension(values) for values in actions.T] if len(actions) else [],
    )


@dataclass(frozen=True, kw_only=True)
class _EpisodeSummary:
    """The data of one episode that the statistics need."""

    task: str
    source: str
    success: bool
    terminated: bool
    interventions: int
    reward: float
    actions: Numbers  # [N - 1, A]

    @classmethod
    def of(cls, episode: Episode) -> _EpisodeSummary:
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


def _action_dimension(values: Numbers) -> ActionDimension:
    return ActionDimension(
        smallest=float(values.min()),
        mean=float(values.mean()),
        std=float(values.std()),
        largest=float(values.max()),
        histogram=Histogram.of(values),
    )
