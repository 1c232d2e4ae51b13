"""Waiting for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SECONDS = 300
_LONGEST_PAUSE = 1.0


def wait_until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What the condition gives as soon as it is true.

    A condition may ask a server or read all of /proc. What is waited for needs the same cores, so that a pause is
    five times as long as the question before it.
    """
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if found := condition():
            return found
        answered = time.monotonic()
        assert answered < deadline, condition
        time.sleep(min(max(0.02, 5 * (answered - asked)), _LONGEST_PAUSE))
