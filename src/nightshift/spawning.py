"""Processes for code that holds the GIL: spawned, not forked, since this process may have threads and a GPU."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""For libraries that read the environment when they are loaded."""
_starting = threading.Lock()
"""The environment is that of all threads."""


class _OneThreadContext(SpawnContext):
    class Process(SpawnProcess):
        def start(self) -> None:
            with _starting, variables(ONE_THREAD):
                super().start()


def context() -> SpawnContext:
    """Of processes that compute with one thread each: there is one for every core, and threads of linear algebra that
    wait for each other would take the cores from the others."""
    return _OneThreadContext()


def processes(count: int, initialise: Callable[..., None] | None = None, *arguments: object) -> ProcessPoolExecutor:
    """At most `count` of them. Each calls `initialise` with `arguments` first, and ends with this process."""
    return ProcessPoolExecutor(count, context(), _begin, (initialise, arguments))


def process(run: Callable[..., None], *arguments: object) -> BaseProcess:
    """A started process that calls `run` with `arguments`, and ends with this process."""
    started = context().Process(target=_begin, args=(run, arguments), daemon=True)
    started.start()
    return started


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Of the environment, for processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _begin(initialise: Callable[..., None] | None, arguments: tuple[object, ...]) -> None:
    """A parent that is killed cannot end its processes, and they would wait for work for ever."""
    threading.Thread(target=_exit_after_parent, daemon=True).start()
    if initialise is not None:
        initialise(*arguments)


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
