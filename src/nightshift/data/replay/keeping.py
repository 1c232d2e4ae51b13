"""Where the trajectories of a buffer lie: all in memory, or in files that one thread writes behind whoever adds.

    put ──▶ pending (in memory) ──▶ writer thread: file, fsync ──▶ open files, at most `cache_size`, first in first out
                                          └─ failure: stays in memory, is raised to the next caller, flush tries again

Methods are called with the buffer's lock held, except where they say otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nightshift import files
from nightshift.data.replay import formats
from nightshift.data.replay.batch import Flat
from nightshift.data.replay.index import INDEX, METADATA, Entry
from nightshift.data.replay.trajectory import TrajectoryBatch, own
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError, NightshiftError

HEAD = 64 * 1024
"""Of a file: its header and all that is not a picture, for trajectories of ordinary length."""
MOST_PENDING = 64
"""Trajectories waiting to be written before whoever adds has to wait too."""
LISTED_SHARE = 0.01
"""The index on disk is written again once this share of it is out of date: its cost per trajectory stays the same."""

Export = Callable[[Path], str]
"""Puts a trajectory's file at a path and says its sha256; runs without the lock, inside `steady`."""
Source = TrajectoryBatch | Path


class Keeping(Protocol):
    """Where trajectories lie."""

    def put(self, entry: Entry, trajectory: TrajectoryBatch) -> None: ...

    def get(self, entries: Iterable[Entry]) -> tuple[list[Flat], bool]:
        """The trajectories, and whether any of them had to be opened."""

    def drop(self, entry: Entry) -> None: ...

    def export(self, entry: Entry) -> Export: ...

    def adopt(self, items: Iterable[tuple[Entry, Source]]) -> None:
        """Hold these instead of all there was; after an error what there was is still held. Inside `steady`."""

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        """While it lasts, no file vanishes. Without the lock."""

    def keep_up(self) -> None:
        """Raise what went wrong behind the caller's back; wait if too much is pending. Without the lock."""

    def flush(self) -> None:
        """Everything is where it belongs, or an error. Without the lock."""

    def close(self) -> None:
        """Without the lock."""


class InMemory:
    """Nothing on disk until a checkpoint."""

    def __init__(self) -> None:
        self._flats: dict[int, Flat] = {}

    def put(self, entry: Entry, trajectory: TrajectoryBatch) -> None:
        self._flats[entry.trajectory_id] = Flat(trajectory)

    def get(self, entries: Iterable[Entry]) -> tuple[list[Flat], bool]:
        return [self._flats[entry.trajectory_id] for entry in entries], False

    def drop(self, entry: Entry) -> None:
        del self._flats[entry.trajectory_id]

    def export(self, entry: Entry) -> Export:
        return partial(formats.write, trajectory=self._flats[entry.trajectory_id].trajectory)

    def adopt(self, items: Iterable[tuple[Entry, Source]]) -> None:
        self._flats = {
            entry.trajectory_id: Flat(
                own(_open(source, entry).trajectory, copy=True) if isinstance(source, Path) else own(source)
            )
            for entry, source in items
        }

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def keep_up(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class OnDisk:
    """A file per trajectory in a folder, with an index beside them that lists only what is there."""

    def __init__(
        self, folder: Path, cache_size: int, lock: threading.RLock, describe: Callable[[], Mapping[str, Any]]
    ) -> None:
        """`lock` is the buffer's; `describe` gives the content of the JSON files, and is called by the writer."""
        self._folder = folder
        self._cache_size = cache_size
        self._lock = lock
        self._describe = describe
        self._pending: dict[int, tuple[Entry, Flat]] = {}
        self._cache: dict[int, Flat] = {}
        self._sums: dict[int, str] = {}  # sha256 of the files that are there
        self._doomed: list[Path] = []  # files to remove once the index on disk no longer lists them
        self._unlisted = 0
        self._folder_lock = threading.Lock()  # taken before the buffer's lock, never after
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay-writer")
        self._writes: deque[Future[None]] = deque()
        folder.mkdir(parents=True, exist_ok=True)
        files.sweep_temporaries(folder)
        self._holds_other_data = (folder / INDEX).exists()

    def put(self, entry: Entry, trajectory: TrajectoryBatch) -> None:
        if self._holds_other_data:
            raise DataError(
                f"{self._folder} holds the trajectories of an earlier buffer",
                "load them with load_checkpoint, or choose another folder",
            )
        self._pending[entry.trajectory_id] = (entry, Flat(trajectory))
        self._submit(partial(self._write, entry))

    def get(self, entries: Iterable[Entry]) -> tuple[list[Flat], bool]:
        entries = list(entries)
        found = [self._held(entry) for entry in entries]
        missing = [entry for entry, flat in zip(entries, found, strict=True) if flat is None]
        for entry in missing:
            _announce_head(self._path(entry))
        opened = {entry.trajectory_id: _open(self._path(entry), entry) for entry in missing}
        flats = [flat or opened[entry.trajectory_id] for entry, flat in zip(entries, found, strict=True)]
        for trajectory_id, flat in opened.items():
            self._remember(trajectory_id, flat)
        return flats, bool(missing)

    def drop(self, entry: Entry) -> None:
        self._pending.pop(entry.trajectory_id, None)
        self._cache.pop(entry.trajectory_id, None)
        if self._sums.pop(entry.trajectory_id, None):
            self._doomed.append(self._path(entry))
        self._unlisted += 1

    def export(self, entry: Entry) -> Export:
        if entry.trajectory_id in self._pending:
            _, flat = self._pending[entry.trajectory_id]
            return partial(formats.write, trajectory=flat.trajectory)
        return partial(_linked, source=self._path(entry), sha256=self._sums[entry.trajectory_id])

    def listed(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those whose files are there, with their sums."""
        sums = self._sums
        return [replace(e, sha256=sums[e.trajectory_id]) for e in entries if e.trajectory_id in sums]

    def adopt(self, items: Iterable[tuple[Entry, Source]]) -> None:
        with _stage(self._folder) as stage:
            sums = {}
            for entry, source in items:
                staged = stage / entry.file_name(SUFFIX)
                sums[entry.trajectory_id] = (
                    _linked(staged, source, entry.sha256) if isinstance(source, Path) else formats.write(staged, source)
                )
            names = {staged.name for staged in stage.iterdir()}
            for name in names:
                (stage / name).replace(self._folder / name)
        self._cache, self._pending, self._sums = {}, {}, sums
        self._doomed = [path for path in self._folder.glob(f"trajectory_*{SUFFIX}") if path.name not in names]
        self._holds_other_data = False

    def steady(self) -> contextlib.AbstractContextManager[Any]:
        return self._folder_lock

    def keep_up(self) -> None:
        while len(self._writes) > MOST_PENDING:
            wait([self._writes[0]])
            self._raise_failures()
        self._raise_failures()

    def flush(self) -> None:
        self._wait()
        with self._lock:
            unwritten = [entry for entry, _ in self._pending.values()]
        for entry in unwritten:
            self._submit(partial(self._write, entry))
        if not self._holds_other_data:
            self._submit(self._list)
        self._wait()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._writer.shutdown()

    def _path(self, entry: Entry) -> Path:
        return self._folder / entry.file_name(SUFFIX)

    def _held(self, entry: Entry) -> Flat | None:
        _, pending = self._pending.get(entry.trajectory_id, (None, None))
        return pending or self._cache.get(entry.trajectory_id)

    def _remember(self, trajectory_id: int, flat: Flat) -> None:
        self._cache[trajectory_id] = flat
        if len(self._cache) > self._cache_size:
            del self._cache[next(iter(self._cache))]

    def _submit(self, job: Callable[[], None]) -> None:
        self._writes.append(self._writer.submit(job))

    def _write(self, entry: Entry) -> None:
        with self._folder_lock:
            with self._lock:
                _, flat = self._pending.get(entry.trajectory_id, (None, None))
            if flat is None:
                return  # dropped before its turn came
            path = self._path(entry)
            sha256 = formats.write(path, flat.trajectory)
            written = _open(path, entry)
            with self._lock:
                if self._pending.pop(entry.trajectory_id, None) is None:
                    self._doomed.append(path)
                else:
                    self._sums[entry.trajectory_id] = sha256
                    self._remember(entry.trajectory_id, written)
                self._unlisted += 1
                is_due = self._unlisted > LISTED_SHARE * len(self._sums)
        if is_due:
            self._list()

    def _list(self) -> None:
        """Write the index, then remove the files that it no longer lists."""
        with self._folder_lock:
            with self._lock:
                content, doomed = self._describe(), list(self._doomed)
                self._unlisted = 0
            for name in (METADATA, INDEX):
                files.write_json(self._folder / name, content[name])
            for path in doomed:
                path.unlink(missing_ok=True)
            with self._lock:
                self._doomed = [path for path in self._doomed if path not in doomed]

    def _wait(self) -> None:
        wait(list(self._writes))
        self._raise_failures()

    def _raise_failures(self) -> None:
        failures = []
        with self._lock:
            while self._writes and self._writes[0].done():
                failure = self._writes.popleft().exception()
                if failure is not None:
                    failures.append(failure)
        if not failures:
            return
        if not isinstance(failures[0], OSError | NightshiftError):
            raise failures[0]
        raise DataError(
            f"{len(failures)} writes to {self._folder} failed, the first because: {failures[0]}",
            "what was not written is still in memory: remove the cause, and flush() or the next checkpoint writes it",
        ) from failures[0]


@contextlib.contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """A folder for files on their way in, on the same disk."""
    stage = folder / ".incoming.partial-"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        yield stage
    finally:
        shutil.rmtree(stage)


def _linked(path: Path, source: Path, sha256: str) -> str:
    """A second name for a file, which outlives the first; a copy where the disk has no such thing.

    Files of trajectories are replaced and removed but never changed, so two names for one are as good as two files.
    """
    try:
        os.link(source, path)
    except FileNotFoundError:
        raise _missing(source) from None
    except OSError:
        shutil.copyfile(source, path)
    return sha256


def _open(path: Path, entry: Entry) -> Flat:
    try:
        flat = Flat(formats.read(path))
    except FileNotFoundError:
        raise _missing(path) from None
    if flat.trajectory.num_samples != entry.num_samples:
        raise DataError(
            f"{path} has {flat.trajectory.num_samples} samples and the index says {entry.num_samples}",
            "load a checkpoint that is whole",
        )
    return flat


def _missing(path: Path) -> DataError:
    return DataError(f"{path} is missing, and the index lists it", "load a checkpoint that is whole")


def _announce_head(path: Path) -> None:
    """Have the operating system read it in the background, while those of other files are read too."""
    with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, HEAD, os.POSIX_FADV_WILLNEED)
