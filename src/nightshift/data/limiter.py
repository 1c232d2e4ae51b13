"""Holds the ratio of samples to inserts inside a band, by making whoever is ahead wait.

The rules are Reverb's. With `samples_per_insert` = r and the difference d = inserts · r - samples:

    one may sample n  when at least `min_size` items are there and d - n ≥ `min_diff`
    one may insert n  when no more than `min_size` items will be there, or d + n · r ≤ `max_diff`

Deletes make items fewer; they do not change d. Threads may share a limiter.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nightshift.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Band:
    """What a limiter enforces."""

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float

    def __post_init__(self) -> None:
        if self.samples_per_insert <= 0:
            raise ValueError(f"samples_per_insert is {self.samples_per_insert}; it must be above 0")
        if self.min_size < 1:
            raise ValueError(f"min_size is {self.min_size}; it must be at least 1")

    @classmethod
    def ratio(cls, samples_per_insert: float, min_size: int, error: float | tuple[float, float]) -> Band:
        """`error` is how far d may stray to either side of where it stands at `min_size` items; or the two ends of d.

        Example: Band.ratio(2, min_size=5, error=4) lets 7 inserts pass, and then one for every two samples.
        """
        centre = samples_per_insert * min_size
        low, high = error if isinstance(error, tuple) else (centre - error, centre + error)
        band = cls(samples_per_insert=samples_per_insert, min_size=min_size, min_diff=low, max_diff=high)
        narrowest = 2 * max(1.0, samples_per_insert)
        if high - low < narrowest:
            raise ValueError(
                f"the band of d is {high - low:g} wide and must be at least {narrowest:g}: "
                "in a narrower one nobody could move"
            )
        if low > centre:
            raise ValueError(
                f"the band of d begins at {low:g}, above the {centre:g} of {min_size} inserts: "
                "nobody could sample then, and soon nobody insert"
            )
        if high < centre:
            warnings.warn(
                f"the band of d ends at {high:g}, below the {centre:g} of {min_size} inserts: "
                "inserts stop there until somebody samples",
                stacklevel=2,
            )
        return band

    @classmethod
    def queue(cls, size: int) -> Band:
        """Every item is sampled once, and at most `size` wait for it."""
        return cls(samples_per_insert=1.0, min_size=1, min_diff=0.0, max_diff=float(size))


class Limiter:
    """Counts inserts, samples and deletes, and lets nobody leave the band."""

    def __init__(self, band: Band) -> None:
        self.band = band
        self._inserts = 0
        self._samples = 0
        self._deletes = 0
        self._changed = threading.Condition()

    def can_insert(self, count: int = 1) -> bool:
        with self._changed:
            return self._may_insert(count)

    def can_sample(self, count: int = 1) -> bool:
        with self._changed:
            return self._may_sample(count)

    def await_insert(self, count: int = 1, timeout: float | None = None) -> None:
        """Wait until `count` inserts keep to the band, and count them; TimeoutError if that takes too long."""
        with self._changed:
            self._await(self._may_insert, count, timeout, "insert")
            self._inserts += count
            self._changed.notify_all()

    def await_sample(self, count: int = 1, timeout: float | None = None) -> None:
        """As `await_insert`, for samples."""
        with self._changed:
            self._await(self._may_sample, count, timeout, "sample")
            self._samples += count
            self._changed.notify_all()

    def delete(self, count: int = 1) -> None:
        """Count items that are gone; nobody waits to be rid of them."""
        with self._changed:
            if count > self._inserts - self._deletes:
                raise ValueError(f"{count} items cannot go where {self._inserts - self._deletes} are")
            self._deletes += count
            self._changed.notify_all()

    def state(self) -> dict[str, int]:
        """What was counted, for a checkpoint. The band is not in it: it is configured, not remembered."""
        with self._changed:
            return {"inserts": self._inserts, "samples": self._samples, "deletes": self._deletes}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from where `state` was taken, within the band this limiter was given."""
        counts = [state.get(name) for name in ("inserts", "samples", "deletes")]
        if any(type(count) is not int or count < 0 for count in counts) or state["deletes"] > state["inserts"]:
            raise DataError(f"{dict(state)} is not the state of a limiter")
        with self._changed:
            self._inserts, self._samples, self._deletes = state["inserts"], state["samples"], state["deletes"]
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        with self._changed:
            counts = {"inserts": self._inserts, "samples": self._samples, "deletes": self._deletes}
            return {f"limiter/{name}": float(value) for name, value in {**counts, "difference": self._diff()}.items()}

    def _diff(self) -> float:
        return self._inserts * self.band.samples_per_insert - self._samples

    def _may_insert(self, count: int) -> bool:
        room = self._inserts + count - self._deletes <= self.band.min_size
        return room or (self._inserts + count) * self.band.samples_per_insert - self._samples <= self.band.max_diff

    def _may_sample(self, count: int) -> bool:
        enough = self._inserts - self._deletes >= self.band.min_size
        return enough and self._diff() - count >= self.band.min_diff

    def _await(self, may: Callable[[int], bool], count: int, timeout: float | None, what: str) -> None:
        if count < 1:
            raise ValueError(f"{count} cannot be counted: it must be at least 1")
        if not self._changed.wait_for(lambda: may(count), timeout):
            raise TimeoutError(
                f"no room to {what} {count} within {timeout} s: {self._inserts} inserts, {self._samples} samples, "
                f"{self._deletes} deletes; d is {self._diff():g} in [{self.band.min_diff:g}, {self.band.max_diff:g}]"
            )
