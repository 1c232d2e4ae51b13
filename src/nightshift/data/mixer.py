"""Mixes batches from several sources (online replay, demos, …) in exact ratios, as RLPD's symmetric sampling does.

The order of sources is Tijdeman's schedule (chairman assignment) for K sources: among the sources that are far enough
behind their share, the one with the earliest deadline is next. At any sample the count of each source deviates from its
share by at most 1 - 1/(2K - 2), so nothing drifts, whatever the batch sizes. For two sources that is 1/2: every batch
and every sequence of batches has the share of each source to within one sample. (For more sources no schedule
guarantees that for every sequence; here it is within two, and within one since the start.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nightshift.data.replay.batch import gathered
from nightshift.data.replay.buffer_pool import BufferPool
from nightshift.data.replay.gather import Rows
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SampleBatch = dict[str, Any]

SOURCE = "source"
"""Key in a batch: the source of each row, as an index into `Mixer.names`."""
_MAX_DENOMINATOR = 10**6
"""Shares are rounded to fractions with at most this denominator, so that 0.1 is exactly 1/10."""


class SampleSource(Protocol):
    def sample(self, count: int, /) -> SampleBatch:
        """Arrays [count, …] by name, or nested dicts of them."""


@runtime_checkable
class RevocableSource(Protocol):
    """A source whose batch counts only if the mixed batch is complete. A `Mixer` prefers this to `sample`."""

    def sampling(self, count: int, /) -> contextlib.AbstractContextManager[SampleBatch]:
        """As `sample`, but large arrays may be `gather.Rows`; if the block raises, it was never sampled."""


class Mixer:
    """Example: Mixer({"online": replay, "demos": demos}, {"online": 0.5, "demos": 0.5}).sample(256, num_batches=20)"""

    def __init__(self, sources: Mapping[str, SampleSource], ratio: Mapping[str, float]) -> None:
        if not sources or set(sources) != set(ratio):
            raise DataError(f"the sources are {sorted(sources)}, but the ratio has {sorted(ratio)}")
        self.names: tuple[str, ...] = tuple(sources)
        self._sources = tuple(sources.values())
        self.mix(ratio)
        self._pool = BufferPool()

    def mix(self, ratio: Mapping[str, float]) -> None:
        """In this ratio from the next sample on; the order of sources starts again."""
        self._schedule = _Schedule(_shares([ratio[name] for name in self.names]))
        self._position = 0  # in the period of the schedule

    def sample(self, batch_size: int, num_batches: int = 1) -> SampleBatch:
        """`num_batches` concatenated batches of `batch_size` rows, each in the exact ratio, with the key SOURCE.

        If a source fails, nothing has been sampled from the others.
        """
        if batch_size < 1 or num_batches < 1:
            raise DataError(f"num_batches is {num_batches} and batch_size is {batch_size}", "both must be at least 1")
        count = num_batches * batch_size
        dealt = self._schedule.take(self._position, count).reshape(num_batches, batch_size)
        source = np.sort(dealt, axis=1).ravel()
        with contextlib.ExitStack() as sampled:
            parts = []
            for index, (name, origin) in enumerate(zip(self.names, self._sources, strict=True)):
                rows = np.flatnonzero(source == index)
                if len(rows):
                    parts.append((name, rows, _enter(sampled, name, origin, len(rows))))
            batch = gathered(_merged(parts, count, ""), self._pool)
        self._position = self._schedule.advance(self._position, count)
        return {**batch, SOURCE: source}

    def state_dict(self) -> dict[str, Any]:
        return {"sources": list(self.names), "shares": self._shares_as_text(), "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the order of sources; with other shares than in `state` it starts again."""
        if state.get("sources") != list(self.names):
            raise DataError(
                f"the state is of a mixer of {state.get('sources')!r:.200}, and this one mixes {', '.join(self.names)}",
                "resume with the sources of the checkpoint, in their order",
            )
        if state.get("shares") != self._shares_as_text():
            self._position = 0
            return
        position = state.get("position")
        if type(position) is not int or not 0 <= position < self._schedule.period:
            raise DataError(f"the state of a mixer has position {position!r} of {self._schedule.period}")
        self._position = position

    def _shares_as_text(self) -> list[str]:
        return [str(share) for share in self._schedule.shares]


class _Schedule:
    """Tijdeman's schedule in integers: source k gets `parts[k]` of every `period` samples."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.shares = tuple(shares)
        self.period = lcm(*(share.denominator for share in shares))
        self._parts = [int(share * self.period) for share in shares]
        common = lcm(*(part for part in self._parts if part))
        self._distance = [common // part if part else 0 for part in self._parts]  # between deadlines
        self._grain = max(1, 2 * len(shares) - 2)
        self._counts = [0] * len(shares)  # in `_order`
        self._order = np.zeros(0, np.int64)  # the sources of the first samples of a period; extended when needed

    def take(self, position: int, count: int) -> NDArray[np.int64]:
        """The sources of `count` samples from `position` in the period on."""
        self._extend(min(position + count, self.period))
        return self._order[np.arange(position, position + count) % self.period]

    def advance(self, position: int, count: int) -> int:
        return (position + count) % self.period

    def _extend(self, length: int) -> None:
        missing = length - len(self._order)
        if missing > 0:
            missing = min(max(missing, len(self._order)), self.period - len(self._order))  # at least doubled
            self._order = np.append(self._order, [self._next() for _ in range(missing)])

    def _next(self) -> int:
        now, grain, period, counts = sum(self._counts) + 1, self._grain, self.period, self._counts
        chosen, due_first = 0, None
        for source, part in enumerate(self._parts):
            if part and grain * (part * now - counts[source] * period) >= period:
                due = (grain - 1 + grain * counts[source]) * self._distance[source]
                if due_first is None or due < due_first:
                    chosen, due_first = source, due
        counts[chosen] += 1
        return chosen


def _shares(ratio: Sequence[float]) -> list[Fraction]:
    """Fractions with the sum 1, rounded to multiples of 1/_MAX_DENOMINATOR if their common denominator is larger."""
    if not all(map(isfinite, ratio)) or min(ratio) < 0 or abs(sum(ratio) - 1) > len(ratio) / _MAX_DENOMINATOR:
        raise DataError(f"the ratio {list(ratio)} must consist of shares that add up to 1")
    shares = [Fraction(share).limit_denominator(_MAX_DENOMINATOR) for share in ratio]
    if sum(shares) == 1 and lcm(*(share.denominator for share in shares)) <= _MAX_DENOMINATOR:
        return shares
    ends = [Fraction(0), *accumulate(shares)]
    edges = [round(end / ends[-1] * _MAX_DENOMINATOR) for end in ends]
    return [Fraction(end - begin, _MAX_DENOMINATOR) for begin, end in pairwise(edges)]


def _enter(sampled: contextlib.ExitStack, name: str, source: SampleSource, count: int) -> SampleBatch:
    try:
        if isinstance(source, RevocableSource):
            return sampled.enter_context(source.sampling(count))
        return source.sample(count)
    except DataError as error:
        raise DataError(f"the source {name}: {error.what}", error.next_step) from error


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


def _column(parts: Sequence[tuple[str, NDArray[np.int64], Any]], count: int, key: str) -> Column | Rows:
    _check_columns(parts, key)
    pieces = [part.addresses.shape[1] for _, _, part in parts if isinstance(part, Rows)]
    if pieces:
        as_rows = [(rows, part if isinstance(part, Rows) else Rows.of(part, max(pieces))) for _, rows, part in parts]
        return Rows.merged(as_rows, count)
    _, _, example = parts[0]
    column: Column = np.empty((count, *example.shape[1:]), example.dtype)
    for _, rows, part in parts:
        column[rows] = part
    return column


def _check_columns(parts: Sequence[tuple[str, NDArray[np.int64], Any]], key: str) -> None:
    first_name, _, example = parts[0]
    for name, rows, part in parts:
        if part.dtype != example.dtype or part.shape[1:] != example.shape[1:]:
            raise DataError(
                f"{key} of the source {name} is {part.dtype} {list(part.shape[1:])}; "
                f"of {first_name} it is {example.dtype} {list(example.shape[1:])}"
            )
        if len(part) != len(rows):
            raise DataError(f"the source {name} returned {len(part)} samples of {key}, not {len(rows)}")
