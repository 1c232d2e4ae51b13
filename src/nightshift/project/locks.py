"""A folder that one process works in at a time."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from nightshift import files
from nightshift.errors import NightshiftError

LOCK = "lock"


class Claim:
    """Held from construction to `release`, or until nobody has it any more, or to the end of the process."""

    def __init__(self, folder: Path, error: type[NightshiftError]) -> None:
        """`error` is raised where another has it, be it in this process."""
        _make(folder)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            self.release()
            raise error(
                f"{folder} is in use by process {holder or 'unknown'}",
                "stop it or close what holds it, or use another folder",
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _make(folder: Path) -> None:
    """Make the folder so that a power cut does not unmake it."""
    if not folder.exists():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        files.sync(folder.parent)
