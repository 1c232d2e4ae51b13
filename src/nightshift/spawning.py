"""Processes for code that holds the GIL: spawned, not forked, since this process may have threads and a GPU."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess


def context() -> SpawnContext:
    return multiprocessing.get_context("spawn")


def processes(count: int, initialise: Callable[..., None] | None = None, *arguments: object) -> ProcessPoolExecutor:
    """At most `count` of them. Each calls `initialise` with `arguments` first, and ends with this process."""
    return ProcessPoolExecutor(count, context(), _begin, (initialise, arguments))


def process(run: Callable[..., None], *arguments: object) -> BaseProcess:
    """A started process that calls `run` with `arguments`, and ends with this process."""
    started = context().Process(target=_begin, args=(run, arguments), daemon=True)
    started.start()
    return started


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
