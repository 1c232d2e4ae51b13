"""The actors of a learner, known by their polls for weights, which go on while they play."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

ABSENT_SECONDS = 30.0
"""Without a poll for so long an actor counts as gone; one that is started again is back sooner."""


class Roster:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_polls: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, actor: str) -> None:
        """An actor has polled."""
        with self._lock:
            self._last_polls[actor] = self._clock()

    def present(self) -> list[str]:
        """The names of the actors that polled lately."""
        with self._lock:
            since = self._clock() - ABSENT_SECONDS
            return sorted(actor for actor, polled in self._last_polls.items() if polled >= since)
