"""Keeps the ratio of samples to inserts within limits by blocking samplers or inserters.

The rules are those of Reverb's rate limiter. With `samples_per_insert` = r and the diff d = inserts · r - samples:

    n samples are allowed  if there are at least `min_size_to_sample` items and d - n ≥ `min_diff`
    n inserts are allowed  if there will be at most `min_size_to_sample` items, or d + n · r ≤ `max_diff`

Deletes reduce the number of items and do not change d. Thread-safe.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from nightshift.errors import DataError


@dataclass(frozen=True, kw_only=True)
class RateLimits:
    """The parameters of a rate limiter, as in Reverb."""

    samples_per_insert: float
    min_size_to_sample: int
    min_diff: float
    max_diff: float

    def __post_init__(self) -> None:
        if not 0 < self.samples_per_insert < math.inf:
            raise ValueError(f"samples_per_insert is {self.samples_per_insert}; it must be above 0 and finite")
        if not self.min_size_to_sample >= 1:
            raise ValueError(f"min_size_to_sample is {self.min_size_to_sample}; it must be at least 1")
        if not self.min_diff <= self.max_diff:
            raise ValueError(f"min_diff is {self.min_diff} and max_diff is {self.max_diff}; the first must be lower")

    @classmethod
    def sample_to_insert_ratio(
        cls, samples_per_insert: float, min_size_to_sample: int, error_buffer: float | tuple[float, float]
    ) -> RateLimits:
        """Reverb's `SampleToInsertRatio`: d may deviate by `error_buffer` from r · `min_size_to_sample`.

        A tuple gives (min_diff, max_diff) instead. Example: samples_per_insert=2, min_size_to_sample=5, error_buffer=4
        allows 7 inserts, and then one insert for every two samples.
        """
        centre = samples_per_insert * min_size_to_sample
        if isinstance(error_buffer, tuple):
            low, high = error_buffer
        else:
            low, high = centre - error_buffer, centre + error_buffer
        limits = cls(
            samples_per_insert=samples_per_insert, min_size_to_sample=min_size_to_sample, min_diff=low, max_diff=high
        )
        narrowest = 2 * max(1.0, samples_per_insert)
        if high - low < narrowest:
            raise ValueError(
                f"max_diff - min_diff is {high - low:g} and must be at least {narrowest:g}: "
                "otherwise samplers and inserters block each other"
            )
        if low > centre:
            raise ValueError(
                f"min_diff is {low:g}, above the {centre:g} of {min_size_to_sample} inserts: "
                "sampling would never start, and inserts would block"
            )
        if high < centre:
            warnings.warn(
                f"max_diff is {high:g}, below the {centre:g} of {min_size_to_sample} inserts: "
                "inserts block before sampling can keep up",
                stacklevel=2,
            )
        return limits

    @classmethod
    def queue(cls, size: int) -> RateLimits:
        """A FIFO queue of at most `size` items, each sampled once (Reverb's `Queue`)."""
        return cls(samples_per_insert=1.0, min_size_to_sample=1, min_diff=0.0, max_diff=float(size))


class RateLimiter:
    """Counts inserts, samples and deletes, and blocks those that would violate the limits."""

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
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

    def wait_for_insert(self, count: int = 1, timeout: float | None = None) -> None:
        """Wait until `count` inserts are allowed and count them; TimeoutError after `timeout` seconds."""
        with self._changed:
            self._wait(self._may_insert, count, timeout, "insert")
            self._inserts += count
            self._changed.notify_all()

    def wait_for_sample(self, count: int = 1, timeout: float | None = None) -> None:
        """Wait until `count` samples are allowed and count them; TimeoutError after `timeout` seconds."""
        with self._changed:
            self._wait(self._may_sample, count, timeout, "sample")
            self._samples += count
            self._changed.notify_all()

    @contextlib.contextmanager
    def sampling(self, count: int = 1, timeout: float | None = None) -> Iterator[None]:
        """As `wait_for_sample`, but the samples are not counted if the block raises: their batch never came."""
        self.wait_for_sample(count, timeout)
        try:
            yield
        except BaseException:
            with self._changed:
                self._samples -= count
                self._changed.notify_all()
            raise

    def delete(self, count: int = 1) -> None:
        """Count deleted items; never blocks."""
        with self._changed:
            if count > self._inserts - self._deletes:
                raise ValueError(f"{count} items cannot be deleted: there are {self._inserts - self._deletes}")
            self._deletes += count
            self._changed.notify_all()

    def state_dict(self) -> dict[str, int]:
        """The counters, for a checkpoint. The limits are configuration and not part of it."""
        with self._changed:
            return {"inserts": self._inserts, "samples": self._samples, "deletes": self._deletes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counters; the limits stay as configured."""
        self.check_state(state)
        with self._changed:
            self._inserts, self._samples, self._deletes = state["inserts"], state["samples"], state["deletes"]
            self._changed.notify_all()

    @staticmethod
    def check_state(state: Mapping[str, int]) -> None:
        """Raise DataError for counters that no rate limiter can have."""
        counts = [state.get(name) for name in ("inserts", "samples", "deletes")]
        if (
            any(type(count) is not int or count < 0 for count in counts)
            or state["deletes"] > state["inserts"]
            or (state["samples"] and not state["inserts"])
        ):
            raise DataError(f"{dict(state)} is not the state of a rate limiter", "resume from another checkpoint")

    def metrics(self) -> dict[str, float]:
        with self._changed:
            counts = {"inserts": self._inserts, "samples": self._samples, "deletes": self._deletes}
            return {
                f"rate_limiter/{name}": float(value) for name, value in {**counts, "difference": self._diff()}.items()
            }

    def _diff(self) -> float:
        return self._inserts * self.limits.samples_per_insert - self._samples

    def _may_insert(self, count: int) -> bool:
        is_filling = self._inserts + count - self._deletes <= self.limits.min_size_to_sample
        return (
            is_filling
            or (self._inserts + count) * self.limits.samples_per_insert - self._samples <= self.limits.max_diff
        )

    def _may_sample(self, count: int) -> bool:
        enough = self._inserts - self._deletes >= self.limits.min_size_to_sample
        return enough and self._diff() - count >= self.limits.min_diff

    def _wait(self, may: Callable[[int], bool], count: int, timeout: float | None, what: str) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1")
        if not self._changed.wait_for(lambda: may(count), timeout):
            raise TimeoutError(
                f"could not {what} {count} within {timeout} s: {self._inserts} inserts, {self._samples} samples, "
                f"{self._deletes} deletes; d is {self._diff():g}, "
                f"the limits are [{self.limits.min_diff:g}, {self.limits.max_diff:g}]"
            )
