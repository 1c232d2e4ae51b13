"""Ports of params.yaml on which a run of this project listens, so that its other commands do not call them taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from filelock import FileLock

from nightshift.errors import Busy
from nightshift.project import locks, paths


def hold(port: int) -> FileLock | None:
    """Say that this process listens on the port, until the lock is released. None where the folder cannot be written
    to, or another machine that has the folder, too, listens on a port of this number."""
    path = paths.port_lock(port)
    with contextlib.suppress(OSError, Busy):
        path.parent.mkdir(parents=True, exist_ok=True)
        return locks.acquire(path, lambda holder: Busy(f"process {holder} listens on port {port}", ""))
    return None


@contextlib.contextmanager
def held(port: int) -> Iterator[None]:
    """The same for a block."""
    lock = hold(port)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def holder(port: int) -> str:
    """The process id of this project's run that listens on the port; empty if none does."""
    lock = paths.port_lock(port)
    return locks.holder(lock) if locks.is_held(lock) else ""
