"""Whether a Ray actor makes progress: it counts what it does, and is asked for the count while it works."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
from ray.exceptions import RayError

HEARTBEAT_GROUP = "heartbeat"
"""The concurrency group, of one thread, that answers while another thread of the actor works."""
_POLL_SECONDS = 0.25


class Heartbeat:
    """Polls an actor's `heartbeats()`. An actor that does not answer makes no progress."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._count: int | None = None
        self._progressed = time.monotonic()
        self._ask()

    @property
    def has_answered(self) -> bool:
        """Whether it ever answered: an actor that did not may still be starting, or be dead."""
        return self._count is not None

    def seconds_since_progress(self) -> float:
        """Since the count last changed, or since this was created."""
        if time.monotonic() - self._asked > _POLL_SECONDS and ray.wait([self._answer], timeout=0)[0]:
            self._read()
            self._ask()
        return time.monotonic() - self._progressed

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self._answer = self._actor.heartbeats.options(concurrency_group=HEARTBEAT_GROUP).remote()

    def _read(self) -> None:
        with contextlib.suppress(RayError):  # the actor's own task reports that it died
            count = ray.get(self._answer)
            if count != self._count:
                self._count, self._progressed = count, time.monotonic()
