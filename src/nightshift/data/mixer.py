"""Mixes batches from several sources (online replay, demos, …) in exact ratios, as RLPD's symmetric sampling does.

The order of sources is Tijdeman's schedule (chairman assignment) for K sources: among the sources that are far enough
behind their share, the one with the earliest deadline is next. At any sample the count of each source deviates from its
share by at most 1 - 1/(2K - 2), so nothing drifts, whatever the batch sizes. For two sources that is 1/2: every batch
and every sequence of batches has the share of each source to within one sample. (For more sources no schedule
guarantees that for every sequence; here it is within two, and within one since the start.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite, lcm
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.data.tensors import Column
from nightshift.errors import DataError

SampleBatch = dict[str, Any]

SOURCE = "source"
"""Key in a batch: the source of each row, as an index into `Mixer.names`."""
_MAX_DENOMINATOR = 10**6
"""Shares are rounded to fractions with at most this denominator, so that 0.1 is exactly 1/10."""


class SampleSource(Protocol):
    @property
    def total_samples(self) -> int: ...

    def sample(self, count: int, /) -> SampleBatch:
        """Arrays [count, …] by name, or nested dicts of them."""


class Mixer:
    """Example: Mixer({"online": replay, "demos": demos}, {"online": 0.5, "demos": 0.5}).sample(256, num_batches=20)"""

    def __init__(self, sources: Mapping[str, SampleSource], ratio: Mapping[str, float]) -> None:
        if not sources or set(sources) != set(ratio):
            raise DataError(f"the sources are {sorted(sources)}, but the ratio has {sorted(ratio)}")
        if not all(map(isfinite, ratio.values())):
            raise DataError(f"the ratio {dict(ratio)} must consist of shares that add up to 1")
        shares = [Fraction(ratio[name]).limit_denominator(_MAX_DENOMINATOR) for name in sources]
        total = sum(shares, Fraction(0))
        if min(shares) < 0 or abs(total - 1) > Fraction(len(shares), _MAX_DENOMINATOR):
            raise DataError(f"the ratio {dict(ratio)} must consist of shares that add up to 1")
        self.names: tuple[str, ...] = tuple(sources)
        self._sources = tuple(sources.values())
        self._schedule = _Schedule([share / total for share in shares])

    def sample(self, batch_size: int, num_batches: int = 1) -> SampleBatch:
        """`num_batches` concatenated batches of `batch_size` rows, each in the exact ratio, with the key SOURCE."""
        if batch_size < 1 or num_batches < 1:
            raise DataError(f"num_batches is {num_batches} and batch_size is {batch_size}", "both must be at least 1")
        schedule = self._schedule.copy()
        source = np.concatenate([np.sort(schedule.take(batch_size)) for _ in range(num_batches)])
        parts = []
        for index, (name, origin) in enumerate(zip(self.names, self._sources, strict=True)):
            rows = np.flatnonzero(source == index)
            if len(rows):
                parts.append((name, rows, _sample_source(name, origin, len(rows))))
        batch = _merged(parts, len(source), "")
        self._schedule = schedule
        return {**batch, SOURCE: source}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self._schedule.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["counts"]) != len(self.names):
            raise DataError(f"the state is of {len(state['counts'])} sources; there are {len(self.names)}")
        self._schedule.counts = list(state["counts"])


class _Schedule:
    """Tijdeman's schedule in integers: source k gets `parts[k]` of every `whole` samples."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.counts = [0] * len(shares)  # in the current period of `whole` samples
        self._shares = shares
        self._whole = lcm(*(share.denominator for share in shares))
        self._parts = [int(share * self._whole) for share in shares]
        common = lcm(*(part for part in self._parts if part))
        self._distance = [common // part if part else 0 for part in self._parts]  # between deadlines
        self._grain = max(1, 2 * len(shares) - 2)

    def copy(self) -> _Schedule:
        other = _Schedule(self._shares)
        other.counts = list(self.counts)
        return other

    def take(self, count: int) -> NDArray[np.int64]:
        return np.array([self._next() for _ in range(count)], np.int64)

    def _next(self) -> int:
        now, grain, whole, counts = sum(self.counts) + 1, self._grain, self._whole, self.counts
        chosen, due_first = 0, None
        for source, part in enumerate(self._parts):
            if part and grain * (part * now - counts[source] * whole) >= whole:
                due = (grain - 1 + grain * counts[source]) * self._distance[source]
                if due_first is None or due < due_first:
                    chosen, due_first = source, due
        counts[chosen] += 1
        if now == whole:
            self.counts = [0] * len(counts)
        return chosen


def _sample_source(name: str, source: SampleSource, count: int) -> SampleBatch:
    if not source.total_samples:
        raise DataError(f"the source {name} is empty, but {count} samples of the batch must come from it")
    return source.sample(count)


_SourceRows = tuple[str, NDArray[np.int64], Mapping[str, Any]]
"""The name of a source, the rows of the batch that it fills, and its samples."""


def _merged(parts: Sequence[_SourceRows], count: int, prefix: str) -> SampleBatch:
    first_name, _, first = parts[0]
    batch: SampleBatch = {}
    for name, _, part in parts[1:]:
        if set(part) != set(first):
            differing = ", ".join(prefix + key for key in sorted(set(part) ^ set(first)))
            raise DataError(f"only one of the sources {first_name} and {name} has {differing}")
    for key, example in first.items():
        inner = [(name, rows, part[key]) for name, rows, part in parts]
        is_nested = isinstance(example, Mapping)
        batch[key] = _merged(inner, count, f"{prefix}{key}.") if is_nested else _column(inner, count, prefix + key)
    return batch


def _column(parts: Sequence[tuple[str, NDArray[np.int64], Any]], count: int, key: str) -> Column:
    first_name, _, example = parts[0]
    column: Column = np.empty((count, *example.shape[1:]), example.dtype)
    for name, rows, part in parts:
        if part.dtype != example.dtype or part.shape[1:] != example.shape[1:]:
            raise DataError(
                f"{key} of the source {name} is {part.dtype} {list(part.shape[1:])}; "
                f"of {first_name} it is {example.dtype} {list(example.shape[1:])}"
            )
        if len(part) != len(rows):
            raise DataError(f"the source {name} returned {len(part)} samples of {key}, not {len(rows)}")
        column[rows] = part
    return column
