"""Processes in which the scripted expert decides.

The expert takes as long as a control step, in Python code that holds the GIL: threads that simulate would wait for it.
It is a function of the scene alone, so any process can decide for any episode.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from nightshift.policies.expert import Expert
from nightshift.types import Array, Scene

Decide = Callable[[Scene], Array]
"""The expert's action [A] in a scene."""


class ExpertProcesses:
    """Starts at most `count` processes, when they are first needed."""

    def __init__(self, count: int) -> None:
        # Not forked: this process may have threads and a GPU.
        self._executor = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))

    def act(self, scene: Scene) -> Array:
        """Waits without holding the GIL; any number of threads may call it."""
        return self._executor.submit(_act, scene).result()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


def _act(scene: Scene) -> Array:
    return Expert().act(scene)
