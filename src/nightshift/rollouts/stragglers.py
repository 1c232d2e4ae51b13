"""Requests in flight: which worker plays which, and which take so long that another worker should play them too."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Collection
from typing import Any

from nightshift.cluster.heartbeat import Heartbeat
from nightshift.cluster.timeout import TIMEOUT_SECONDS

Bundle = tuple[int, ...]
"""The numbers of requests that one worker is given at once."""
GRACE_SECONDS = 30.0
"""No bundle is a straggler before: starting a worker, which a second attempt may need, takes about as long."""
_STRAGGLER_FACTOR = 3
"""A straggler takes this many times the median of the last bundles."""
_REMEMBERED = 64


class Attempt:
    """A bundle and the worker that plays it."""

    def __init__(self, bundle: Bundle, actor: Any, *, was_idle: bool) -> None:
        self.bundle = bundle
        self.actor = actor
        self._was_idle = was_idle
        self._started = time.monotonic()
        self._heartbeat = Heartbeat(actor)

    @property
    def seconds(self) -> float:
        """Since it started."""
        return time.monotonic() - self._started

    @property
    def has_begun(self) -> bool:
        """Whether the worker is known to live; another one may still be starting, or wait for a place on a node."""
        return self._heartbeat.has_answered

    @property
    def may_have_been_dead(self) -> bool:
        """Whether the worker, if it is dead, may have died before it got the bundle."""
        return self._was_idle and not self._heartbeat.has_answered

    def is_stuck(self, timeout: float) -> bool:
        """Whether the worker made no progress for too long. One that is still starting gets the default at least."""
        seconds = self._heartbeat.seconds_since_progress()
        return seconds > (timeout if self._heartbeat.has_answered else max(timeout, TIMEOUT_SECONDS))


class StragglerDetector:
    """Compares the bundles in flight with how long the last ones took.

    Example: after record(9), record(10), record(50) a bundle that has been in flight for 31 seconds is a straggler.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)

    def record(self, seconds: float) -> None:
        """How long a finished bundle took."""
        self._durations.append(seconds)

    def slowest(self, in_flight: Collection[tuple[Bundle, float]]) -> Bundle | None:
        """Of bundles and their seconds in flight, the slowest straggler that only one worker plays."""
        if not self._durations:
            return None
        limit = max(self._grace, _STRAGGLER_FACTOR * statistics.median(self._durations))
        workers = Counter(bundle for bundle, _ in in_flight)
        stragglers = [(seconds, bundle) for bundle, seconds in in_flight if seconds > limit and workers[bundle] == 1]
        return max(stragglers)[1] if stragglers else None
