"""A folder that one process works in at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from nightshift import files
from nightshift.errors import StreamError

LOCK = "lock"


class Claim:
    """Held from construction to `release`, or to the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        _make(folder)
        self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StreamError(
                f"{folder} is in use by process {holder or 'unknown'}", "stop that process, or use another folder"
            ) from None
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


def _make(folder: Path) -> None:
    """Make the folder so that a power cut does not unmake it."""
    if not folder.exists():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        files.sync(folder.parent)
