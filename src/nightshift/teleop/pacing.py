"""When the next control step is due."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """One step per period. A command that changed does not wait for the end of the period: its step comes at once, but
    not before half a period after the last one. So a person waits for half a period at most, and a full period without
    a change follows. A simulator does not mind; a robot keeps its own period.
    """

    def __init__(
        self,
        period: float,
        is_changed_within: Callable[[float], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`is_changed_within` waits for a changed command, so many seconds at most, and says whether there is one."""
        self._period = period
        self._is_changed_within = is_changed_within
        self._clock = clock
        self._sleep = sleep
        self._last = clock() - period

    def wait(self) -> None:
        """Until the next step is due, which is made when this returns."""
        due = self._last + self._period
        self._sleep(max(0.0, due - self._period / 2 - self._clock()))
        while (left := due - self._clock()) > 0 and not self._is_changed_within(left):
            pass
        now = self._clock()
        # A late step is not made up for by faster ones, but that its waiting took a moment too long.
        self._last = now if now < due else max(due, now - self._period)
