"""Processes in which the scripted expert decides.

The expert takes as long as a control step, in Python code that holds the GIL: threads that simulate would wait for it.
It is a function of the scene alone, so any process can decide for any episode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from nightshift import envs, spawning
from nightshift.policies.expert import Expert
from nightshift.types import Array, Scene

Decide = Callable[[Scene], Array]
"""The expert's action [A] in a scene."""


class ExpertProcesses:
    """At most `count` processes: they start when they are needed, also after `close`. None of them imports torch."""

    def __init__(self, count: int, suite: str) -> None:
        """Of the suite of this name."""
        self._count = count
        self._suite = suite
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None

    def act(self, scene: Scene) -> Array:
        """Waits without holding the GIL; any number of threads may call it.

        If a process dies, all calls that wait raise BrokenProcessPool, and later ones get new processes.
        """
        executor = self._started()
        try:
            return executor.submit(decide, self._suite, scene).result()
        except BrokenProcessPool:
            self._discard(executor)
            raise

    def close(self) -> None:
        """While no thread waits for an action."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def _started(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = spawning.processes(self._count)
            return self._executor

    def _discard(self, broken: ProcessPoolExecutor) -> None:
        """It has ended its other processes itself."""
        with self._lock:
            if self._executor is broken:
                self._executor = None


def decide(suite: str, scene: Scene) -> Array:
    """The action of the suite's own expert, or of the scripted one."""
    action = envs.suite(suite).expert(scene)
    return Expert().act(scene) if action is None else action
