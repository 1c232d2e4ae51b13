"""Whether an actor on Ray still moves: it counts what it does, and is asked for the count while it works."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
from ray.exceptions import RayError

PATIENCE_SECONDS = 300.0
"""Who does nothing countable for this long hangs. Building and compiling a simulator takes a tenth of it."""
WATCH = "watch"
"""The thread of an actor that answers while another works: the name of a concurrency group of one."""
_ASK_SECONDS = 0.25


class Watch:
    """Asks an actor again and again for its `progress`. One that does not answer has not moved."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._count: int | None = None
        self._moved = time.monotonic()
        self._ask()

    @property
    def was_heard(self) -> bool:
        """Whether it ever answered: one that did not may still be starting, or be dead."""
        return self._count is not None

    def still(self) -> float:
        """Seconds since it was last seen to move."""
        if time.monotonic() - self._asked > _ASK_SECONDS and ray.wait([self._question], timeout=0)[0]:
            self._listen()
            self._ask()
        return time.monotonic() - self._moved

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self._question = self._actor.progress.options(concurrency_group=WATCH).remote()

    def _listen(self) -> None:
        with contextlib.suppress(RayError):  # that it died is for its work to tell
            count = ray.get(self._question)
            if count != self._count:
                self._count, self._moved = count, time.monotonic()
