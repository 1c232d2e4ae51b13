"""Where the time goes: seconds by name."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping


class Stopwatch:
    """Example: with watch.timing("simulation"): …; then watch.seconds["simulation"]."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def timing(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - started

    def add(self, seconds: Mapping[str, float]) -> None:
        """What another stopwatch took."""
        for what, more in seconds.items():
            self.seconds[what] += more
