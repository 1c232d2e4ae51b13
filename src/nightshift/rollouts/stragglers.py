"""Who plays what, and for how long: a worker may stand still, or move on so slowly that another is done first."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Collection
from typing import Any

from nightshift.cluster.heartbeat import PATIENCE_SECONDS, Watch

GRACE_SECONDS = 30.0
"""No request is late before: starting a worker, which a second attempt may need, takes about as long."""
_LATE_FACTOR = 3
"""A request is late when it takes this many times what the others took."""
_REMEMBERED = 64


class Attempt:
    """A request and the worker that plays it."""

    def __init__(self, index: int, actor: Any, *, was_idle: bool) -> None:
        self.index = index
        self.actor = actor
        self._was_idle = was_idle
        self._began = time.monotonic()
        self._watch = Watch(actor)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @property
    def may_have_come_too_late(self) -> bool:
        """Whether the worker, if it is dead, may have died before it got the request, which then is not to blame."""
        return self._was_idle and not self._watch.was_heard

    def is_stuck(self, patience: float) -> bool:
        """Whether the worker stood still for too long. One that has yet to start has as long as any pool allows."""
        still = self._watch.still()
        return still > (patience if self._watch.was_heard else max(patience, PATIENCE_SECONDS))


class Pace:
    """How long the last requests took, and so which is late.

    Example: after took(9), took(10), took(50) a request that has been played for 31 seconds is late.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def took(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def late(self, playing: Collection[tuple[int, float]]) -> int | None:
        """Of requests and the seconds each has been played for, the latest that nobody plays a second time yet."""
        if not self._seconds:
            return None
        due = max(self._grace, _LATE_FACTOR * statistics.median(self._seconds))
        players = Counter(index for index, _ in playing)
        late = [(seconds, index) for index, seconds in playing if seconds > due and players[index] == 1]
        return max(late)[1] if late else None
