"""Copies of a compiled MuJoCo model that are used again.

Of the 0.07 s that a copy of a LIBERO model takes (91 MB), 0.05 s go into new memory, while no other thread runs Python.
Setting the arrays of an old copy back takes 0.02 s, during which other threads go on. A process keeps few copies that
nobody uses, whichever task they are of: with one for every episode at once of every task they would fill a machine.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from typing import Any, ClassVar

import mujoco
import numpy as np

_STRUCTS = ("opt", "stat", "vis")
"""Fields of a model that are no arrays; its names and sizes are those of all copies."""
MOST_IDLE = 16
"""Copies that wait to be used again. An episode that ends makes room for the next, which takes its copy."""


class ModelCopies:
    """Example:
    copies = ModelCopies(model)
    changed = copies.take()
    changed.cam_fovy[:] = 60.0
    copies.give_back(changed)
    copies.take().cam_fovy  # that of `model` again
    """

    _lock = threading.Lock()
    _idle: ClassVar[deque[tuple[ModelCopies, mujoco.MjModel]]] = deque(maxlen=MOST_IDLE)
    """Of all models, the one that was used last at the end."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self._model = model

    def take(self) -> mujoco.MjModel:
        """A model that equals the original, for the caller alone."""
        found = self._take_idle()
        if found is None:
            return copy.copy(self._model)
        _set_back(found, self._model)
        return found

    def give_back(self, model: mujoco.MjModel) -> None:
        """It may be changed from now on: nobody may use it any more."""
        with self._lock:
            self._idle.append((self, model))

    def drop_idle(self) -> None:
        """Free the memory of those that nobody uses."""
        while self._take_idle() is not None:
            pass

    def _take_idle(self) -> mujoco.MjModel | None:
        with self._lock:
            for entry in reversed(self._idle):
                if entry[0] is self:
                    self._idle.remove(entry)
                    return entry[1]
        return None


def _set_back(changed: mujoco.MjModel, original: mujoco.MjModel) -> None:
    for name in _fields(original):
        values = getattr(original, name)
        if isinstance(values, np.ndarray):
            np.copyto(getattr(changed, name), values)
    for name in _STRUCTS:
        _copy_struct(getattr(changed, name), getattr(original, name))


def _copy_struct(changed: Any, original: Any) -> None:
    for name in _fields(original):
        value = getattr(original, name)
        if isinstance(value, np.ndarray):
            np.copyto(getattr(changed, name), value)
        elif isinstance(value, (int, float)):
            setattr(changed, name, value)
        elif not callable(value):
            _copy_struct(getattr(changed, name), value)


def _fields(struct: Any) -> list[str]:
    return [name for name in dir(struct) if not name.startswith("_")]
