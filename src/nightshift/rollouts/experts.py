"""Processes in which the scripted expert decides.

The expert takes as long as a control step, in Python code that holds the GIL: threads that simulate would wait for it.
It is a function of the scene alone, so any process can decide for any episode. But it keeps what it computed for the
scene before, such as the grasps of an object that has not moved: another process would compute them again, which takes
much longer than a decision. So one process decides for all of an episode.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from nightshift import envs, spawning
from nightshift.policies.expert import Expert
from nightshift.types import Array, Scene

Decide = Callable[[Scene], Array]
"""The expert's action [A] in a scene."""


class ExpertProcesses:
    """At most `count` processes: they start when they are needed, also after `close`. None of them imports torch."""

    def __init__(self, count: int, suite: str) -> None:
        """Of the suite of this name."""
        self._suite = suite
        self._lock = threading.Lock()
        self._executors: list[ProcessPoolExecutor | None] = [None] * count
        self._turn = itertools.cycle(range(count))

    def for_episode(self) -> Decide:
        """By one process, the next in turn. Any number of threads may call what this returns, which waits without
        holding the GIL; if the process dies, calls that wait raise BrokenProcessPool, and later ones get a new one."""
        return partial(self._act, next(self._turn))

    def close(self) -> None:
        """While no thread waits for an action."""
        with self._lock:
            running = [executor for executor in self._executors if executor is not None]
            self._executors = [None] * len(self._executors)
        with ThreadPoolExecutor(len(self._executors)) as threads:  # each waits for the end of its process
            list(threads.map(partial(ProcessPoolExecutor.shutdown, cancel_futures=True), running))

    def _act(self, place: int, scene: Scene) -> Array:
        executor = self._started(place)
        try:
            return executor.submit(decide, self._suite, scene).result()
        except BrokenProcessPool:
            self._discard(place, executor)
            raise

    def _started(self, place: int) -> ProcessPoolExecutor:
        with self._lock:
            executor = self._executors[place] or spawning.processes(1, _ignore_interrupts)
            self._executors[place] = executor
            return executor

    def _discard(self, place: int, broken: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._executors[place] is broken:
                self._executors[place] = None


def _ignore_interrupts() -> None:
    """The process that asks decides when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def decide(suite: str, scene: Scene) -> Array:
    """The action of the suite's own expert, or of the scripted one."""
    action = envs.suite(suite).expert(scene)
    return Expert().act(scene) if action is None else action


def no_expert(scene: Scene) -> Array:
    """Where another decides."""
    raise AssertionError(f"the expert is asked about {scene}")
