"""3Dconnexion's SpaceMouse by its HID reports, through hidapi (the extra `teleop`).

    report 1   x, y, z as int16, little-endian; of newer devices roll, pitch, yaw follow in the same report
    report 2   roll, pitch, yaw, of older devices
    report 3   a bit per button

Pushed to its end an axis gives about ±350. Reports come while the cap is off its centre, and a last one with zeros. The
axes are those of robosuite's driver: its x is the cap's second axis, and so on.
"""

from __future__ import annotations

import struct
from types import ModuleType
from typing import Any

import numpy as np

from nightshift.errors import DeviceError
from nightshift.types import Array

VENDORS = (0x256F, 0x046D)
"""3Dconnexion, and Logitech, which sold older ones."""
_PRODUCT = "space"
_FULL = 350.0
_DEAD_ZONE = 0.03
_WITH_ROTATION = 13
_READ_MS = 50


class SpaceMouseState:
    def __init__(self) -> None:
        self.toggles = 0
        self._last_input = -np.inf
        self._axes = np.zeros(6, np.float32)
        self._pressed = 0

    def feed(self, data: bytes, now: float) -> None:
        match data[0]:
            case 1:
                self._axes[:3] = _translation(data[1:7])
                if len(data) >= _WITH_ROTATION:
                    self._axes[3:] = _rotation(data[7:13])
            case 2:
                self._axes[3:] = _rotation(data[1:7])
            case 3:
                self.toggles += (data[1] & ~self._pressed & 1) != 0
                self._pressed = data[1]
        if self._axes.any() or self._pressed:
            self._last_input = now

    def seconds_since_input(self, now: float) -> float:
        return now - self._last_input

    def command(self, now: float) -> Array:
        return self._axes.copy()


def _translation(data: bytes) -> Array:
    right, near, down = _scaled(data)
    return np.array([near, right, -down], np.float32)


def _rotation(data: bytes) -> Array:
    roll, pitch, yaw = _scaled(data)
    return np.array([pitch, roll, yaw], np.float32)


def _scaled(data: bytes) -> Array:
    values = np.clip(np.array(struct.unpack("<3h", data)) / _FULL, -1.0, 1.0)
    return np.where(np.abs(values) < _DEAD_ZONE, 0.0, values).astype(np.float32)


class SpaceMouseSource:
    """Example: SpaceMouseSource() opens the first one that is connected."""

    def __init__(self) -> None:
        path = find()
        self._device = _hidapi().device()
        try:
            self._device.open_path(path)
        except OSError as error:
            raise DeviceError(
                f"the SpaceMouse {path.decode(errors='replace')} cannot be opened: {error}",
                "end what else uses it, allow this user to read and write it (a udev rule), or change "
                "rlpd.interventions.source in params.yaml",
            ) from None

    def read(self) -> bytes:
        return bytes(self._device.read(_WITH_ROTATION, _READ_MS))

    def close(self) -> None:
        self._device.close()


def find() -> bytes:
    """The path of the first SpaceMouse that is connected."""
    found: list[bytes] = [one["path"] for one in _hidapi().enumerate() if _is_spacemouse(one)]
    if not found:
        raise DeviceError(
            "no SpaceMouse is connected", "connect it, or change rlpd.interventions.source in params.yaml"
        )
    return found[0]


def _hidapi() -> ModuleType:
    try:
        import hid
    except ImportError:
        raise DeviceError(
            "a SpaceMouse is read with hidapi, which is not installed here",
            "pip install -e '.[teleop]', or change rlpd.interventions.source in params.yaml",
        ) from None
    module: ModuleType = hid
    return module


def _is_spacemouse(described: dict[str, Any]) -> bool:
    return described["vendor_id"] in VENDORS and _PRODUCT in (described["product_string"] or "").lower()
