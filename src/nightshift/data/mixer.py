"""Batches mixed from several sources (what the policy did, demos, …) in exact shares.

Samples are dealt out in one endless row, by Tijdeman's rule for K sources of given shares: of those that lag far enough
behind, the one whose turn is due first. Up to any sample each source has had its share to within 1 - 1/(2K - 2), so
nothing drifts, whatever the batch sizes. With two sources that is a half: every slice and every run of slices holds the
share of each to within one sample. (With more sources and any ratio no rule can promise that for every run; here it is
within two, and everything since the start is within one.)
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

Batch = dict[str, Any]

SOURCE = "source"
"""In a batch: which source each row comes from, as a position in `Mixer.names`."""
_FINEST = 10**6
"""Shares are fractions with at most this denominator: 0.1 is a tenth, not the float nearest to it."""


class Source(Protocol):
    @property
    def total_samples(self) -> int: ...

    def sample(self, count: int, /) -> Batch:
        """Arrays [count, …] by name, or dicts of such."""


class Mixer:
    """Example: Mixer({"online": replay, "demos": demos}, {"online": 0.5, "demos": 0.5}).sample(256, slices=20)"""

    def __init__(self, sources: Mapping[str, Source], ratio: Mapping[str, float]) -> None:
        if not sources or set(sources) != set(ratio):
            raise DataError(f"the sources are {sorted(sources)} and the ratio names {sorted(ratio)}")
        if not all(map(isfinite, ratio.values())):
            raise DataError(f"the ratio {dict(ratio)} is not made of shares that add up to 1")
        shares = [Fraction(ratio[name]).limit_denominator(_FINEST) for name in sources]
        total = sum(shares, Fraction(0))
        if min(shares) < 0 or abs(total - 1) > Fraction(len(shares), _FINEST):
            raise DataError(f"the ratio {dict(ratio)} is not made of shares that add up to 1")
        self.names: tuple[str, ...] = tuple(sources)
        self._sources = tuple(sources.values())
        self._deal = _Deal([share / total for share in shares])

    def sample(self, batch_size: int, slices: int = 1) -> Batch:
        """`slices` batches of `batch_size` rows end to end, each mixed exactly; with `source`, who gave each row."""
        if batch_size < 1 or slices < 1:
            raise DataError(f"{slices} slices of {batch_size} samples were asked for", "ask for at least one of one")
        deal = self._deal.copy()
        source = np.concatenate([np.sort(deal.take(batch_size)) for _ in range(slices)])
        parts = []
        for index, (name, origin) in enumerate(zip(self.names, self._sources, strict=True)):
            rows = np.flatnonzero(source == index)
            if len(rows):
                parts.append((name, rows, _drawn(name, origin, len(rows))))
        batch = _merged(parts, len(source), "")
        self._deal = deal
        return {**batch, SOURCE: source}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self._deal.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["counts"]) != len(self.names):
            raise DataError(f"the state is of {len(state['counts'])} sources; there are {len(self.names)}")
        self._deal.counts = list(state["counts"])


class _Deal:
    """Whose turn it is, in whole numbers: source k is to have `parts[k]` of every `whole` samples."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.counts = [0] * len(shares)  # in this round of `whole` samples
        self._shares = shares
        self._whole = lcm(*(share.denominator for share in shares))
        self._parts = [int(share * self._whole) for share in shares]
        common = lcm(*(part for part in self._parts if part))
        self._distance = [common // part if part else 0 for part in self._parts]  # between turns
        self._grain = max(1, 2 * len(shares) - 2)

    def copy(self) -> _Deal:
        other = _Deal(self._shares)
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


def _drawn(name: str, source: Source, count: int) -> Batch:
    if not source.total_samples:
        raise DataError(f"the source {name} is empty, and {count} samples of the batch are to come from it")
    return source.sample(count)


Part = tuple[str, NDArray[np.int64], Mapping[str, Any]]
"""A source's name, the rows of the batch it fills, and what it fills them with."""


def _merged(parts: Sequence[Part], count: int, prefix: str) -> Batch:
    first_name, _, first = parts[0]
    batch: Batch = {}
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
            raise DataError(f"the source {name} was asked for {len(rows)} samples and gave {len(part)} of {key}")
        column[rows] = part
    return column
