"""A gamepad by Linux's joystick device, /dev/input/js0: no package is needed.

The kernel sends `struct js_event` (linux/joystick.h): milliseconds uint32, value int16, type uint8, number uint8. Type
1 is a button, 2 an axis, and bit 7 marks the state when the device is opened. Axes and buttons are numbered as the
kernel's driver of the Xbox controller (xpad) has them:

    left stick    0, 1    y, x             right stick   3, 4    yaw, z
    LB, RB        4, 5    rx               X, B          2, 1    ry
    A             0       gripper

An event comes when something changes, so a stick that is held off its centre is input as long as it is held.
"""

from __future__ import annotations

import os
import select
import struct
from pathlib import Path

import numpy as np

from nightshift.errors import DeviceError
from nightshift.types import Array

DEVICE = Path("/dev/input/js0")
EVENT = struct.Struct("<IhBB")
_BUTTON, _AXIS, _INIT = 1, 2, 0x80
_GRIPPER = 0
_FULL = 32767.0
_DEAD_ZONE = 0.1
_READ_SECONDS = 0.05
_AXES = {0: (1, 1.0), 1: (0, 1.0), 3: (5, -1.0), 4: (2, -1.0)}
"""Axis of the gamepad: dimension of the command and sign. A stick that is pulled towards its owner is positive."""
_BUTTONS = {4: (3, -1.0), 5: (3, 1.0), 2: (4, -1.0), 1: (4, 1.0)}


class GamepadState:
    def __init__(self) -> None:
        self.toggles = 0
        self._command = np.zeros(6, np.float32)
        self._last_event = -np.inf

    def feed(self, data: bytes, now: float) -> None:
        for _, value, kind, number in EVENT.iter_unpack(data):
            if kind & _INIT:
                continue  # not a person's doing
            if kind == _AXIS and number in _AXES:
                dimension, sign = _AXES[number]
                self._command[dimension] = sign * _scaled(value)
            elif kind == _BUTTON and number in _BUTTONS:
                dimension, sign = _BUTTONS[number]
                self._command[dimension] = sign * value
            elif kind == _BUTTON and number == _GRIPPER:
                self.toggles += value
            self._last_event = now

    def seconds_since_input(self, now: float) -> float:
        return 0.0 if self._command.any() else now - self._last_event

    def command(self, now: float) -> Array:
        return self._command.copy()


def _scaled(value: int) -> float:
    scaled = value / _FULL
    return 0.0 if abs(scaled) < _DEAD_ZONE else float(np.clip(scaled, -1.0, 1.0))


class GamepadSource:
    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DeviceError(
                f"the gamepad cannot be opened: {error}",
                "connect it, join the group `input`, or change rlpd.interventions.source in params.yaml",
            ) from None

    def read(self) -> bytes:
        ready, _, _ = select.select([self._file], [], [], _READ_SECONDS)
        if not ready:
            return b""
        data = os.read(self._file, EVENT.size * 64)
        if not data:
            raise OSError("the gamepad is gone")
        return data

    def close(self) -> None:
        os.close(self._file)
