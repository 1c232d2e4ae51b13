"""What every input device has in common: its state, a thread that reads it, and the intervention by it.

A device commands [x, y, z, rx, ry, rz], each in [-1, 1], in the frame of the simulator (x away from the robot's foot,
z up), and toggles the gripper. A person intervenes while input comes, and lets go `release_seconds` after the last, or
when the device is unplugged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from nightshift.closing import Closing
from nightshift.interventions.base import Moment
from nightshift.types import Array, Task

CONTROL_SECONDS = 0.05
"""Of a control step: a simulator that is faster waits for the person."""
_JOIN_SECONDS = 1.0
_log = logging.getLogger(__name__)


class DeviceState(Protocol):
    """What a device last said; `feed` is all that changes it."""

    toggles: int
    """How often the gripper's button was pressed."""

    def feed(self, data: bytes, now: float) -> None:
        """Bytes as the device sends them: whole reports or events."""
        ...

    def seconds_since_input(self, now: float) -> float:
        """Since a command or a button last came; 0 while one is held, infinity before the first."""
        ...

    def command(self, now: float) -> Array:
        """[6]; zeros at rest."""
        ...


class ByteSource(Protocol):
    def read(self) -> bytes:
        """What the device has sent, b"" if nothing came for a moment; OSError if it is gone."""
        ...

    def close(self) -> None: ...


class DeviceIntervention(Closing):
    """A person with an input device. The gripper stays as it was last commanded until its button is pressed: what the
    policy would do at the takeover is drawn anew and may drop what is held."""

    def __init__(
        self,
        source: ByteSource,
        state: DeviceState,
        release_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._source = source
        self._state = state
        self._release = release_seconds
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._is_closed = False
        self._due = clock()
        self._closes_gripper: bool | None = None
        """The last command that was executed; None: none yet in this episode."""
        self._toggles = 0
        self._is_gone = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def begin(self, task: Task) -> None:
        self._closes_gripper = None
        self._due = self._clock()

    def override(self, moment: Moment) -> Array | None:
        self._wait_for_step()
        now = self._clock()
        with self._lock:
            command, toggles = self._state.command(now), self._state.toggles
            holds = not self._is_gone and self._state.seconds_since_input(now) < self._release
        is_toggled, self._toggles = (toggles - self._toggles) % 2 == 1, toggles
        if not holds or self._closes_gripper is None:
            self._closes_gripper = bool(moment.policy_action[-1] > 0)
        if not holds:
            return None
        self._closes_gripper ^= is_toggled
        return np.append(command, 1.0 if self._closes_gripper else -1.0).astype(np.float32)

    def before_reset(self) -> None:
        """At any time: whoever has an input device alone cannot stop an episode."""

    def end(self) -> None:
        """The device stays open."""

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(_JOIN_SECONDS)
        self._source.close()

    def _wait_for_step(self) -> None:
        """At most one control step per CONTROL_SECONDS."""
        self._sleep(max(0.0, self._due - self._clock()))
        self._due = max(self._due, self._clock() - CONTROL_SECONDS) + CONTROL_SECONDS

    def _read(self) -> None:
        """Until it is closed. Whatever ends it sooner, what the device said last must not be held for ever."""
        try:
            while not self._is_closed:
                if data := self._source.read():
                    with self._lock:
                        self._state.feed(data, self._clock())
        except Exception as error:  # noqa: BLE001  # unplugged, or a report in no known format
            self._is_gone = True
            _log.warning("the input device can no longer be read (%r): the policy goes on without interventions", error)
