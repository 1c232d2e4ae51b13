"""The actors of a learner, known by their polls for weights, which go on while they play."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

ABSENT_SECONDS = 30.0
"""Without a poll for so long an actor counts as gone; one that is started again is back sooner."""


@dataclass(frozen=True, slots=True)
class _Poll:
    time: float
    version: int  # of the weights that the actor has since


class Roster:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_polls: dict[str, _Poll] = {}
        self._polled = threading.Condition()

    def note(self, actor: str, version: int) -> None:
        """An actor has polled, and has the weights of this version now."""
        with self._polled:
            self._last_polls[actor] = _Poll(self._clock(), version)
            self._polled.notify_all()

    def present(self) -> list[str]:
        """The names of the actors that polled lately."""
        with self._polled:
            return self._present()

    def wait_until_all_have(self, version: int, timeout: float) -> bool:
        """Wait until the actors that are present have weights of this version; False after the timeout."""
        with self._polled:
            return self._polled.wait_for(
                lambda: all(self._last_polls[actor].version >= version for actor in self._present()), timeout
            )

    def _present(self) -> list[str]:
        since = self._clock() - ABSENT_SECONDS
        return sorted(actor for actor, poll in self._last_polls.items() if poll.time >= since)
