"""Who plays what, and for how long: a worker may stand still, or move on so slowly that another is done first."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter, deque
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayError

PATIENCE_SECONDS = 300.0
"""A worker that makes no step for this long hangs. Building and compiling a simulator takes a tenth of it."""
GRACE_SECONDS = 30.0
"""No request is late before: starting a worker, which a second attempt may need, takes about as long."""
WATCH = "watch"
"""The thread of a worker that answers while another plays."""
_LATE_FACTOR = 3
"""A request is late when it takes this many times what the others took."""
_REMEMBERED = 64


class Attempt:
    """A request and the worker that plays it."""

    def __init__(self, index: int, actor: Any) -> None:
        self.index = index
        self.actor = actor
        self._count: int | None = None
        self._began = self._moved = time.monotonic()
        self._ask()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def is_stuck(self, patience: float) -> bool:
        """Whether the worker stood still for too long. One that has yet to start has as long as any pool allows."""
        if ray.wait([self._question], timeout=0)[0]:
            self._listen(patience)
        allowed = max(patience, PATIENCE_SECONDS) if self._count is None else patience
        return time.monotonic() - self._moved > allowed

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self._question = self.actor.progress.options(concurrency_group=WATCH).remote()

    def _listen(self, patience: float) -> None:
        with contextlib.suppress(RayError):  # that the worker died is for the request itself to tell
            count = ray.get(self._question)
            if count != self._count:
                self._count, self._moved = count, time.monotonic()
            if time.monotonic() - self._asked > patience / 8:
                self._ask()


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
