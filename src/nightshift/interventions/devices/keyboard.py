"""The keyboard of a terminal. A terminal sends characters and no releases: a key counts as held for a moment after it.

    w s   x: to the robot, away from it     r f   z: up, down      z x   rx     c v   rz
    a d   y                                 t g   ry               space  gripper

The letters are those of robosuite's keyboard. A key that is held repeats after the terminal's delay, half a second on
many systems: with a shorter `release_seconds` the policy acts in between.
"""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty

import numpy as np

from nightshift.errors import DeviceError
from nightshift.types import Array

_KEYS = {
    "w": (0, -1.0),
    "s": (0, 1.0),
    "a": (1, -1.0),
    "d": (1, 1.0),
    "f": (2, -1.0),
    "r": (2, 1.0),
    "z": (3, -1.0),
    "x": (3, 1.0),
    "g": (4, -1.0),
    "t": (4, 1.0),
    "v": (5, -1.0),
    "c": (5, 1.0),
}
_GRIPPER = " "
_ESCAPE_SEQUENCE = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]")
"""Arrows and other keys whose sequences contain letters."""
_BEGUN_SEQUENCE = re.compile(rb"\x1b([\[O][0-9;]*)?\Z")
"""Its end comes with the next read."""
_READ_SECONDS = 0.05
_READ_BYTES = 64


class KeyboardState:
    def __init__(self, release_seconds: float) -> None:
        self.toggles = 0
        self._last_input = -np.inf
        self._release = release_seconds
        self._values = np.zeros(6, np.float32)
        self._pressed = np.full(6, -np.inf)
        self._begun = b""

    def feed(self, data: bytes, now: float) -> None:
        data = _ESCAPE_SEQUENCE.sub(b"", self._begun + data)
        begun = _BEGUN_SEQUENCE.search(data)
        self._begun = begun.group() if begun else b""
        for key in data.removesuffix(self._begun).decode("ascii", "ignore").lower():
            if key == _GRIPPER:
                self.toggles += 1
            elif key in _KEYS:
                dimension, value = _KEYS[key]
                self._values[dimension], self._pressed[dimension] = value, now
            else:
                continue
            self._last_input = now

    def seconds_since_input(self, now: float) -> float:
        return now - self._last_input

    def command(self, now: float) -> Array:
        return np.where(now - self._pressed < self._release, self._values, 0.0).astype(np.float32)


class KeyboardSource:
    """The terminal gives single keys until `close`."""

    def __init__(self) -> None:
        if sys.stdin is None or not sys.stdin.isatty():  # None: the process was started without one
            raise DeviceError(
                "the keyboard takes over from a terminal, and this process has none",
                "run nightshift in a terminal, or change rlpd.interventions.source in params.yaml",
            )
        self._file = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._file)
        tty.setcbreak(self._file)

    def read(self) -> bytes:
        ready, _, _ = select.select([self._file], [], [], _READ_SECONDS)
        if not ready:
            return b""
        if not (data := os.read(self._file, _READ_BYTES)):
            raise OSError("the terminal is gone")
        return data

    def close(self) -> None:
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)
