"""Locks between processes: at most one works in a folder at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from nightshift import files
from nightshift.errors import NightshiftError

LOCK = "lock"


def acquire(path: Path, refusal: Callable[[str], NightshiftError]) -> FileLock:
    """Lock `path`, or raise `refusal(holder)` with the process id of the holder, which may be this process.

    The lock lasts until it is released or collected as garbage; the kernel releases it when the process dies.
    """
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise refusal(holder(path)) from None
    with contextlib.suppress(OSError):  # only the error message above needs it, and the disk may be full
        path.write_text(f"{os.getpid()}\n")  # filelock itself does not record the holder
    return lock


@contextlib.contextmanager
def held(path: Path, refusal: Callable[[str], NightshiftError]) -> Iterator[None]:
    """Hold this lock while the block lasts; raises as `acquire` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = acquire(path, refusal)
    try:
        yield
    finally:
        release(lock)


def release(lock: FileLock) -> None:
    """Release the lock and say in its file that this was done."""
    with contextlib.suppress(OSError):
        Path(lock.lock_file).write_text("")
    lock.release()


def holder(path: Path) -> str:
    """The process id of the holder, as its file has it."""
    return path.read_text(errors="replace").strip() or "unknown"


def is_held(path: Path) -> bool:
    """Whether a living process, of whatever container, holds the lock."""
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def was_abandoned(path: Path) -> bool:
    """Whether the last holder of the lock died: the kernel released it, and the file still names the process."""
    return path.exists() and path.stat().st_size > 0 and not is_held(path)


def abandon(path: Path) -> None:
    """Have the next holder look for what this process leaves unfinished, as if it had died.

    One that holds the lock already stays named: it is the process to end, for who is refused.
    """
    with contextlib.suppress(OSError):  # the disk may be full
        if not is_held(path):
            path.write_text(f"{os.getpid()}\n")


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """An empty folder in `parent` while the block lasts. Those that killed processes left there are removed first.

    A folder is locked before it exists, so that no other process takes it for one that was left.
    """
    for left in parent.glob("*/"):
        if not is_held(_lock_of(left)):
            _remove_scratch(left)
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent.absolute() / uuid.uuid4().hex
    with FileLock(_lock_of(folder), thread_local=False):
        folder.mkdir()
        try:
            yield folder
        finally:
            _remove_scratch(folder)


def _lock_of(scratch: Path) -> Path:
    return scratch.with_name(f"{scratch.name}.{LOCK}")


def _remove_scratch(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)


class Claim:
    """Exclusive use of a folder from construction to `release`, or until the claim is collected as garbage."""

    def __init__(self, folder: Path, error: type[NightshiftError]) -> None:
        """`error` is raised if the folder is in use, by another process or by this one."""
        next_step = "stop it or close what holds it, or use another folder"
        with files.translated_errors(folder):
            _make(folder)
            self._lock = acquire(
                folder / LOCK, lambda holder: error(f"{folder} is in use by process {holder}", next_step)
            )

    def release(self) -> None:
        self._lock.release()


def _make(folder: Path) -> None:
    """Create the folder so that it survives a power cut."""
    if not folder.exists():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        files.sync(folder.parent)
