"""Waiting for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SECONDS = 300


def wait_until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What the condition gives as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return found
